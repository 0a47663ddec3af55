"""gTop-k: the k largest entries of the sum, by pairwise merges."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from communicators import Received, Round, Schedule, schedules
from sparse_compress import SparseVector, add_all, merge, share

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic
from sparse_collectives.algorithms.reference import cut
from sparse_collectives.wire import blame_rank


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
        group, total, dropped = schedules.largest_power_of_two(size), sparse, list[SparseVector]()
        nbytes = self.wire.nbytes(len(sparse), sparse.numel, sparse.dtype)
        if rank >= group:
            return (yield from self._fold_into(rank - group, sparse, nbytes))
        if rank + group < size:
            received = yield Round(recvs={rank + group: nbytes})
            total, rest = merge(total, self._vector(received, rank + group, sparse), k)
            dropped += _my_share(rest, rank, 1)
        for distance in schedules.powers_of_two(below=group):
            peer = rank ^ distance
            total, rest = self.wire.rounded(total)
            dropped += _my_share(rest, rank, distance)
            received = yield Round({peer: self.wire.message(total)}, {peer: nbytes})
            theirs = self._vector(received, peer, sparse)  # lower ranks first everywhere: NaN payloads do not commute
            total, rest = merge(total, theirs, k) if rank < peer else merge(theirs, total, k)
            dropped += _my_share(rest, rank, 2 * distance)
        if group < size:  # the folded ranks get what all hold
            total, rest = self.wire.rounded(total)
            dropped += _my_share(rest, rank, group)
        if rank + group < size:  # a copy: the total is the caller's to write into while this is under way
            yield Round(sends={rank + group: self.wire.message(total).clone()})
        return Reduction(total, add_all(dropped or [SparseVector.empty(total.numel, total.dtype, device=total.device)]))

    def _fold_into(self, partner: int, sparse: SparseVector, nbytes: int) -> Schedule[Reduction]:
        """Gives the vector to the partner, which keeps what is cut of it; gets the result last."""
        given, rounded_off = self.wire.rounded(sparse)
        yield Round(sends={partner: self.wire.message(given)})
        received = yield Round(recvs={partner: nbytes})
        return Reduction(self._vector(received, partner, sparse), rounded_off)

    def _vector(self, received: Received, peer: int, like: SparseVector) -> SparseVector:
        with blame_rank(peer):
            return self.wire.vector(received[peer], len(like), like)

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
        return 0 if rank >= group else 2 * min(k, numel) * (group.bit_length() - 1 + (rank + group < size))

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


def _my_share(cut: SparseVector, rank: int, holders: int) -> list[SparseVector]:
    """Entries of a cut that this one of its holders keeps."""
    return [share(cut, member=rank % holders, of=holders)] if len(cut) else []
