"""Who trains on which samples, who tests which, and with which random numbers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SHUFFLE, AUGMENT, DROPOUT, SAMPLES = range(4)  # purposes of random numbers


def steps_per_epoch(samples: int, *, size: int, batch_size: int) -> int:
    """Steps that every rank takes in an epoch: ⌈⌈samples / size⌉ / batch_size⌉."""
    return _ceil(_ceil(samples, size), batch_size)


def batches(samples: int, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """This rank's batches of sample indices in this epoch, in order; every rank has as many, of the same lengths.

    All ranks together see every sample; where `size` does not divide their number, up to size − 1 of them twice.
    A shard is divided evenly, into batches of at most `batch_size` that differ by at most one sample, so that no
    tiny last batch upsets batch normalisation and the mean over ranks is the mean over samples.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, SHUFFLE, epoch))
    order = torch.randperm(samples, generator=generator)
    wrapped = torch.arange(rank, size * _ceil(samples, size), size) % samples
    return order[wrapped].tensor_split(steps_per_epoch(samples, size=size, batch_size=batch_size))


def evaluation_batches(samples: int, *, rank: int, size: int, batch_size: int) -> Sequence[Tensor]:
    """This rank's test samples, in batches: over all ranks each sample once. At least one batch, maybe empty."""
    return torch.split(torch.arange(samples)[rank::size], batch_size)


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def derived_seed(seed: int, purpose: int, index: int) -> int:
    """A 64-bit seed for one purpose and one rank or epoch; equal on every machine and rank."""
    return int(np.random.SeedSequence([seed, purpose, index]).generate_state(1, np.uint64)[0])
