"""Batches of utterances of like length: little padding, and as much work on every rank in the same step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Lengths = npt.NDArray[np.int64]
SPREAD = 0.2  # of a length, by which its place varies from epoch to epoch


def bucketed(lengths: Lengths, *, rank: int, size: int, batch_size: int, random: np.random.Generator) -> list[Tensor]:
    """This rank's batches of indices, in order. random: in the same state on every rank.

    Sorted by length, up to SPREAD, so that a batch is not the same in every epoch; neighbours go to different ranks;
    the batches' order is random, and the same on all ranks. As many batches of as many utterances on every rank; where
    `size` does not divide their number, up to size − 1 utterances are taken twice.
    """
    order = np.argsort(lengths * (1 + SPREAD * random.random(len(lengths))), kind="stable")
    dealt = _dealt(order, rank, size)
    steps = -(-len(dealt) // batch_size)
    shards = torch.from_numpy(dealt).tensor_split(steps)
    return [shards[step] for step in random.permutation(steps)]


def shuffled(lengths: Lengths, *, rank: int, size: int, batch_size: int, random: np.random.Generator) -> list[Tensor]:
    """As `bucketed`, whatever the lengths are: ranks then have unlike work."""
    dealt = _dealt(random.permutation(len(lengths)), rank, size)
    return list(torch.from_numpy(dealt).tensor_split(-(-len(dealt) // batch_size)))


def _dealt(order: Lengths, rank: int, size: int) -> Lengths:
    return order[np.arange(rank, size * -(-len(order) // size), size) % len(order)]


def sorted_batches(lengths: Lengths, *, rank: int, size: int, batch_size: int) -> Sequence[Tensor]:
    """This rank's test batches: over all ranks each utterance once, the like in length together. Maybe one, empty."""
    order = torch.from_numpy(np.argsort(lengths, kind="stable"))
    batches: tuple[Tensor, ...] = torch.split(order[rank::size], batch_size)
    return batches
