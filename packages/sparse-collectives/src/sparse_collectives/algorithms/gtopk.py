"""gTop-k: the k largest entries of the sum, by pairwise merges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from communicators import Round, Schedule, schedules
from sparse_compress import SparseVector

from sparse_collectives.algorithm import Algorithm, Array
from sparse_collectives.algorithms.reference import cut
from sparse_collectives.algorithms.replicated import ReplicatedVector
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.traffic import Traffic


@dataclass(frozen=True)
class GTopK(Algorithm):
    """Sum over ranks, cut to the k largest at every merge (Shi et al., ICDCS 2019, algorithm 3).

    Ranks r ≥ Q, the largest power of two, fold into r − Q first and get the result last. Then log Q rounds of a
    hypercube: after round i the 2^(i + 1) ranks that agree in the higher bits hold the same vector.

        total, cut ← merge(total, received, k)      k largest of the sum; ties to the lowest index
        dropped ← dropped + my share of cut         entry i of the cut is kept by member i mod 2^(i + 1)

    Differs from the paper: hypercube instead of tree and broadcast, half the rounds and bytes; any P; and what a merge
    cuts goes back to exactly one residual. (The paper clears the residual at every index of the final result; so an
    entry that is cut on the way is lost when the same index of another rank survives.)

    Args:
        wire: How vectors travel; the rounding error of one that several ranks hold is shared among their residuals.
    """

    name = "gtopk"
    takes_wire = True

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        group, held = schedules.largest_power_of_two(size), ReplicatedVector(sparse, k, self.wire)
        if rank >= group:
            return (yield from _fold_into(rank - group, held))
        folded, has_partner = rank + group, rank + group < size
        if has_partner:
            received = yield Round(recvs={folded: held.nbytes})
            held.merge(received[folded], folded)
        for distance in schedules.powers_of_two(below=group):
            peer = rank ^ distance
            message = held.message(member=rank % distance, of=distance)
            received = yield Round({peer: message}, {peer: held.nbytes})
            held.merge(received[peer], peer, member=rank % (2 * distance), of=2 * distance, after=peer < rank)
        if group < size:  # the folded ranks get what all hold
            message = held.message(member=rank, of=group)
            if has_partner:
                # A copy: the call is over while this is under way, and the total is then the caller's to write into.
                yield Round(sends={folded: message.clone()})
        return held.reduction()

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """One packed vector a message: 8k bytes (float64: 12k) and its header, or what another wire takes.

        log P messages where P is a power of two. Else, with Q the largest below: 1 for ranks r ≥ Q; log Q for the
        others, one more for those that have a folded partner.
        """
        group = schedules.largest_power_of_two(size)
        levels, has_partner = group.bit_length() - 1, rank + group < size
        messages, rounds = (1, 2) if rank >= group else (levels + has_partner, levels + 2 * has_partner)
        return Traffic.of_bodies(messages * self.wire.nbytes(min(k, numel), numel, dtype), messages, rounds)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """Two vectors for each merge of this rank."""
        group = schedules.largest_power_of_two(size)
        levels = group.bit_length() - 1
        return 0 if rank >= group else 2 * min(k, numel) * (levels + (rank + group < size))

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """Ranks beyond the power of two are folded in, then neighbouring groups are merged until one is left."""
        groups = [cut(x, k) for x in inputs]
        power = schedules.largest_power_of_two(len(groups))
        for rank in range(power, len(groups)):
            groups[rank - power] = cut(groups[rank - power] + groups[rank], k)
        del groups[power:]
        while len(groups) > 1:
            groups = [cut(low + high, k) for low, high in zip(groups[::2], groups[1::2], strict=True)]
        return groups[0]


def _fold_into(partner: int, held: ReplicatedVector) -> Schedule[Reduction]:
    """Gives the vector to the partner, which keeps what is cut of it; gets the result last."""
    yield Round(sends={partner: held.message()})
    received = yield Round(recvs={partner: held.nbytes})
    held.replace(received[partner], partner)
    return held.reduction()
