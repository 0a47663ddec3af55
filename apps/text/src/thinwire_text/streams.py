"""A text as streams that go on from window to window, for truncated back-propagation through time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from thinwire_trainer.errors import RunError
from thinwire_trainer.training.batches import SHUFFLE, derived_seed

TEST_STREAMS = 16  # whatever the number of ranks
SPARED = 8  # an epoch leaves out at most this part of each stream


class Window(NamedTuple):
    """The `length` tokens of streams that begin at these places of the text, from `start` on; what follows each is to
    be foretold. start 0: the streams begin."""

    origins: tuple[int, ...]
    start: int
    length: int


def train_windows(
    tokens: int, *, rank: int, size: int, batch_size: int, seed: int, epoch: int, window: int
) -> Sequence[Window]:
    """This rank's `batch_size` streams out of all ranks', each a part of a text of so many tokens, window by window.

    Windows are as even as they can be, the longest ≤ `window`. From the second epoch on all streams begin at another
    place, by up to a window and an eighth of a stream, so that windows differ; so many tokens of each stream are left
    out in every epoch. RunError where a stream would be shorter than a window.
    """
    streams = size * batch_size
    length = (tokens - 1) // streams
    if length < window:
        raise RunError(
            f"{size} × --batch-size {batch_size} = {streams} streams of a text of {tokens:,} tokens would be of "
            f"{length}, shorter than --window {window}: take fewer streams, or a shorter window"
        )
    slack = min(window, length // SPARED)
    drawn = np.random.Generator(np.random.PCG64(derived_seed(seed, SHUFFLE, epoch)))
    shift = int(drawn.integers(0, slack + 1)) if epoch else 0
    origins = tuple(shift + stream * length for stream in range(rank * batch_size, (rank + 1) * batch_size))
    return _windows(origins, length - slack, window)


def test_windows(tokens: int, *, rank: int, size: int, window: int) -> Sequence[Window]:
    """This rank's streams of the test text, window by window: over all ranks every token but the first is foretold.

    The text is cut into TEST_STREAMS alike and a rest: what is foretold does not depend on the number of ranks.
    """
    streams = max(1, min(TEST_STREAMS, (tokens - 1) // window))
    length, rest = divmod(tokens - 1, streams)
    others = range(rank, streams - 1, size)
    found = [*_windows(tuple(stream * length for stream in others), length, window)] if others else []
    if rank == (streams - 1) % size:  # the last stream has the rest, too
        found += _windows(((streams - 1) * length,), length + rest, window)
    return found or [Window((), 0, 0)]


def _windows(origins: tuple[int, ...], length: int, window: int) -> Sequence[Window]:
    bounds = np.linspace(0, length, -(-length // window) + 1).round().astype(int).tolist()
    return [Window(origins, start, end - start) for start, end in pairwise(bounds)]
