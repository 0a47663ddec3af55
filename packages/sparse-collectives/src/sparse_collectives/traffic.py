"""Traffic of a rank in one collective, known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from communicators import SLOT_BYTES, schedules


class Traffic(NamedTuple):
    """Traffic of a rank in one collective.

    Attributes:
        nbytes: Bytes sent, headers included.
        messages: Messages sent.
        rounds: Rounds that the rank takes part in.
    """

    nbytes: int
    messages: int
    rounds: int

    @classmethod
    def of_bodies(cls, nbytes: int, messages: int, rounds: int) -> Traffic:
        """Traffic of messages whose bodies have so many bytes together; each travels behind a slot.

        Args:
            nbytes: Bytes of all bodies.
            messages: Messages sent.
            rounds: Rounds that the rank takes part in.
        """
        return cls(nbytes + messages * SLOT_BYTES, messages, rounds)


def together(*parts: Traffic) -> Traffic:
    """Traffic of several collectives, one after the other."""
    return Traffic(*(sum(column) for column in zip(*parts, strict=True)))


def bruck_sent(nbytes: Sequence[int], rank: int) -> Traffic:
    """Bruck's all-gather of a block of nbytes[r] bytes from every rank r: ⌈log P⌉ messages.

    With distance D = 1, 2, 4, … a rank hands on the min(D, P − D) blocks from its own on.
    """
    size = len(nbytes)
    onwards = [*nbytes[rank:], *nbytes[:rank]]
    sent = [sum(onwards[: min(distance, size - distance)]) for distance in schedules.powers_of_two(below=size)]
    return Traffic.of_bodies(sum(sent), len(sent), len(sent))


def sum_sent(rank: int, size: int, nbytes: int) -> Traffic:
    """A halving-doubling sum of so many bytes, split evenly among Q, the largest power of two in P.

    2·(Q − 1)/Q of the bytes in 2 log Q messages; all of them once more from a rank with a folded partner, whose own
    message is its only one.
    """
    group = schedules.largest_power_of_two(size)
    if rank >= group:
        return Traffic.of_bodies(nbytes, 1, 2)
    levels, has_partner = group.bit_length() - 1, rank + group < size
    messages = 2 * levels + has_partner
    sent = 2 * (nbytes - nbytes // group) + has_partner * nbytes
    return Traffic.of_bodies(sent, messages, 2 * levels + 2 * has_partner)
