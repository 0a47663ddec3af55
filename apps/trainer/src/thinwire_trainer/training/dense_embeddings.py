"""Gradients are dense here: those of torch's embeddings are made so, others' are asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from thinwire_trainer.errors import AgreedError


def make_dense(model: nn.Module) -> None:
    """An nn.Embedding or nn.EmbeddingBag with `sparse=True` gives dense gradients from now on, in the same numbers.

    So every algorithm, clipping and weight decay take them. What is exchanged is a selection, or all of it, anyway:
    rows that were not looked up are zeros, which no selection takes before others.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


@contextmanager
def dense_gradients(model: nn.Module) -> Iterator[None]:
    """A backward that leaves dense gradients; AgreedError, on every rank for itself, where one is not.

    Also where an exchange that has begun meanwhile does not take it (--overlap).
    """
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise AgreedError(
                    f"the gradient of {name} is sparse ({parameter.grad.layout}), expected a dense one: give "
                    f"sparse=False where the model looks its rows up"
                ) from None
