"""Traffic of a rank in one collective, known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from communicators.dense_schedules import largest_power_of_two
from communicators.schedule import SLOT_BYTES, powers_of_two


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
    def total(cls, *parts: Traffic) -> Self:
        """Traffic of several collectives, one after the other.

        Args:
            parts: Traffic of each.
        """
        return cls(*(sum(column) for column in zip(*parts, strict=True)))

    @classmethod
    def allgather(cls, nbytes: Sequence[int], rank: int) -> Self:
        """Bruck's all-gather of one block a rank: ⌈log P⌉ messages, each with a slot.

        With distance D = 1, 2, 4, … a rank hands on the min(D, P − D) blocks from its own on.

        Args:
            nbytes: Bytes of each rank's block.
            rank: This rank.
        """
        size = len(nbytes)
        onwards = [*nbytes[rank:], *nbytes[:rank]]
        sent = [SLOT_BYTES + sum(onwards[: min(distance, size - distance)]) for distance in powers_of_two(below=size)]
        return cls(sum(sent), len(sent), len(sent))

    @classmethod
    def allreduce(cls, nbytes: int, rank: int, size: int) -> Self:
        """Halving-doubling sum, split evenly among Q ranks, the largest power of two in P.

        2·(Q − 1)/Q of the bytes in 2 log Q messages; all of them once more from a rank with a folded partner, whose own
        message is its only one.

        Args:
            nbytes: Bytes of the tensor, a multiple of Q.
            rank: This rank.
            size: P.
        """
        group = largest_power_of_two(size)
        if rank >= group:
            return cls(nbytes + SLOT_BYTES, 1, 2)
        levels, has_partner = group.bit_length() - 1, rank + group < size
        messages = 2 * levels + has_partner
        sent = 2 * (nbytes - nbytes // group) + has_partner * nbytes
        return cls(sent + messages * SLOT_BYTES, messages, 2 * levels + 2 * has_partner)
