"""What a rank sends in one collective, known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from communicators.schedule import SLOT_BYTES, powers_of_two


class Traffic(NamedTuple):
    """nbytes: bytes that this rank sends, headers included; messages: in so many; rounds: that it takes part in."""

    nbytes: int
    messages: int
    rounds: int


def together(*parts: Traffic) -> Traffic:
    """One after the other."""
    return Traffic(*(sum(column) for column in zip(*parts, strict=True)))


def bruck_sent(nbytes: Sequence[int], rank: int) -> Traffic:
    """Bruck's all-gather of a block of nbytes[r] bytes from every rank r: ⌈log P⌉ messages, each with a slot.

    With distance D = 1, 2, 4, … a rank hands on the min(D, P − D) blocks from its own on.
    """
    size = len(nbytes)
    onwards = [*nbytes[rank:], *nbytes[:rank]]
    sent = [SLOT_BYTES + sum(onwards[: min(distance, size - distance)]) for distance in powers_of_two(below=size)]
    return Traffic(sum(sent), len(sent), len(sent))
