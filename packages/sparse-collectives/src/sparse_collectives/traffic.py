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

    @classmethod
    def total(cls, *parts: Traffic) -> Traffic:
        """Traffic of several collectives, one after the other.

        Args:
            *parts: Traffic of each.
        """
        return cls(*(sum(column) for column in zip(*parts, strict=True)))

    @classmethod
    def allgather(cls, nbytes: Sequence[int], rank: int) -> Traffic:
        """Bruck's all-gather of one block a rank: ⌈log P⌉ messages.

        With distance D = 1, 2, 4, … a rank hands on the min(D, P − D) blocks from its own on.

        Args:
            nbytes: Bytes of each rank's block.
            rank: This rank.
        """
        size = len(nbytes)
        onwards = [*nbytes[rank:], *nbytes[:rank]]
        sent = [sum(onwards[: min(distance, size - distance)]) for distance in schedules.powers_of_two(below=size)]
        return cls.of_bodies(sum(sent), len(sent), len(sent))

    @classmethod
    def allreduce(cls, nbytes: int, rank: int, size: int) -> Traffic:
        """Halving-doubling sum, split evenly among Q ranks, the largest power of two in P.

        2·(Q − 1)/Q of the bytes in 2 log Q messages; all of them once more from a rank with a folded partner, whose own
        message is its only one.

        Args:
            nbytes: Bytes of the tensor, a multiple of Q.
            rank: This rank.
            size: P.
        """
        group = schedules.largest_power_of_two(size)
        if rank >= group:
            return cls.of_bodies(nbytes, 1, 2)
        levels, has_partner = group.bit_length() - 1, rank + group < size
        messages = 2 * levels + has_partner
        sent = 2 * (nbytes - nbytes // group) + has_partner * nbytes
        return cls.of_bodies(sent, messages, 2 * levels + 2 * has_partner)
