"""Sweeps over magnitudes that stay in cache: no temporary is larger than a chunk."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_compress.magnitude import Bits, Keys, magnitude_mask

CHUNK = 1 << 18  # elements, a MiB of keys: shorter chunks cost more in calls than they save in cache
WORD_BITS = 3
WORD = 1 << WORD_BITS  # flags looked at together

Positions = NDArray[np.integer[Any]]


def key_chunks(bits: Bits, written: Iterable[None] | None = None) -> Iterator[tuple[int, Keys]]:
    """(start, keys) of one chunk after the other; the keys are valid until the next is asked for.

    ``written`` is advanced once before each chunk is read: it writes that chunk, which is still in cache then.
    """
    scratch = np.empty(min(CHUNK, len(bits)), bits.dtype)
    mask = magnitude_mask(bits)
    starts = range(0, len(bits), CHUNK)
    for start, _ in zip(starts, starts if written is None else written, strict=True):
        part = bits[start : start + CHUNK]
        yield start, np.bitwise_and(part, mask, out=scratch[: len(part)])


def at_least(
    bits: Bits, threshold: int, limit: int, written: Iterator[None] | None = None
) -> tuple[Positions, Bits] | None:
    """Positions and bits of all elements whose key reaches ``threshold``; None when they are more than ``limit``.

    ``written`` (see ``key_chunks``) is used up in either case.
    """
    bound = bits.dtype.type(threshold)
    flags = np.zeros(-(-min(CHUNK, len(bits)) // WORD) * WORD, bool)
    positions, found, total = [], [], 0
    for start, keys in key_chunks(bits, written):
        np.greater_equal(keys, bound, out=flags[: len(keys)])
        flags[len(keys) :] = False
        hits = positions_of(flags)
        total += len(hits)
        if total > limit:
            for _ in written or ():
                pass
            return None
        hits += start
        positions.append(hits)
        found.append(bits[hits])
    return np.concatenate(positions, dtype=np.int32), np.concatenate(found)


def positions_of(flags: NDArray[np.bool_]) -> NDArray[np.intp]:
    """``np.flatnonzero`` of whole words of flags: word by word, then within those found, where they are few.

    NumPy mispredicts a branch for every True when they are rare, which costs more than looking at all flags.
    """
    words = flags.view(np.uint64)
    found = np.flatnonzero(words != 0)
    if 2 * len(found) > len(words):
        return np.flatnonzero(flags)
    within = np.flatnonzero(words.take(found).view(bool))
    return (found << WORD_BITS).take(within >> WORD_BITS) + (within & WORD - 1)


def count_above(bits: Bits, threshold: int) -> int:
    """How many elements have a key strictly greater than ``threshold``."""
    bound = bits.dtype.type(threshold)
    return sum(int(np.count_nonzero(keys > bound)) for _, keys in key_chunks(bits))


def above_and_ties(bits: Bits, threshold: int, ties: int) -> Positions:
    """Positions of all keys strictly greater than ``threshold`` and of the first ``ties`` equal to it, increasing."""
    bound = bits.dtype.type(threshold)
    positions = []
    for start, keys in key_chunks(bits):
        flags = keys > bound
        if ties:
            equal = np.flatnonzero(keys == bound)[:ties]
            flags[equal] = True
            ties -= len(equal)
        positions.append(np.flatnonzero(flags) + start)
    return np.concatenate(positions)
