"""Gradients of embeddings, dense."""

from torch import nn


def make_dense(model: nn.Module) -> None:
    """What has `sparse=True` (nn.Embedding, nn.EmbeddingBag) gives dense gradients from now on, in the same numbers.

    So every algorithm, clipping and weight decay take them. What is exchanged is a selection, or all of it, anyway:
    rows that were not looked up are zeros, which no selection takes before others.
    """
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            module.sparse = False  # type: ignore[assignment]
