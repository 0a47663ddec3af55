"""Ok-Topk: regions of about equally many entries, and thresholds that several calls may share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from communicators import Schedule, schedules
from sparse_compress import Largest, Reaching, SparseVector, add_all, all_finite, magnitude_keys, union_of, vectors
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic, check_values, is_count
from sparse_collectives.algorithms.even_out import even_counts, gather_evenly, gather_evenly_sent
from sparse_collectives.algorithms.kth_largest import kth_largest, kth_largest_sent, sample_count
from sparse_collectives.algorithms.reference import cut, sum_of_selections
from sparse_collectives.algorithms.topk_dsa import split
from sparse_collectives.wire import RAW, InvalidMessageError, Wire, blame_rank

SPAN = 1.5  # measured in training with random gradients, P = 2 … 16: 1.2 to 1.5


@dataclass(frozen=True)
class OkTopk(Algorithm):
    """The entries of the sum from about its k-th largest on, at most k (Li & Hoefler, PPoPP 2022, algorithm 1).

        boundaries   every τ calls: P regions; each boundary is the integer mean of the ranks' proposals
        split        own entries of region j to rank j, P − 1 messages; rank j adds them (`add_all`)
        threshold    every τ' calls, and after one that let through fewer than k/2: the k-th largest sum, exactly;
                     rank j keeps its sums that reach the last one
        gather       where more than k reach it, the k largest; evened out; ⌈log P⌉ rounds

    A rank's own entries whose index is not in the total are dropped: their owner has summed them, and kept none.
    A call whose total is not finite leaves the state as it was: what is due stays due.
    Differs from the paper: the threshold is found by regular samples, not by gathering all sums, and the result is cut
    to k exactly, so 6k elements are a bound on entries from the first call on; ties and zeros are no special case. A
    threshold that lets too few through is not kept: where gradients shrink, as by a schedule of the rate, hardly
    anything would be sent between two estimates. Explicit zeros are not sent.

    Args:
        thresholds_every: τ', in calls.
        boundaries_every: τ, in calls.
        wire: How vectors travel; what it rounds off, of own entries and of kept sums, is dropped.
    """

    name = "oktopk"
    takes_wire = True
    exact = False
    thresholds_every: int = 1
    boundaries_every: int = 64

    def check(self, size: int) -> None:
        """Both intervals are 1 call or more."""
        if self.thresholds_every < 1 or self.boundaries_every < 1:
            raise ValueError(
                f"thresholds_every is {self.thresholds_every} and boundaries_every {self.boundaries_every}, expected "
                "1 call or more"
            )

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        state, wire = self.initial_state() if state is None else state, self.wire
        of = _of(sparse.numel, sparse.dtype, size, k)
        known = dict(state) if state["of"] == of else self.initial_state()
        own, dropped = wire.rounded(vectors.larger(sparse, 0))
        if known["step"] % self.boundaries_every == 0:
            known["boundaries"] = yield from _agree_on_boundaries(own, rank, size)
        region = yield from _split_and_reduce(own, known["boundaries"], rank, size, k, wire)
        most, due = min(k, sparse.numel), known["step"] % self.thresholds_every == 0
        if due or not known["local"]:
            known["local"] = int(magnitude_keys(sparse.values).min()) if len(sparse) else 0
        elif 2 * int(sparse.values.count_nonzero()) < most:
            known["local"] = 0
        least = 0 if due else known["threshold"]
        kept, counts, kth = yield from _global_largest(region, least, most, rank, size)
        if not least:
            known["threshold"] = kth
        elif 2 * sum(counts) < most:
            known["threshold"] = 0
        gathered = yield from gather_evenly(kept, counts, rank, size, wire)
        total = gathered.total
        if bool(all_finite(total.values)):  # alike on all ranks; a threshold that is NaN would hide all that follows
            state.update(known, step=known["step"] + 1, of=of)
        return Reduction(total, add_all([vectors.without(own, total), dropped, gathered.dropped]))

    def select(self, like: Tensor, rank: int, size: int, k: int, state: State | None) -> Largest | Reaching:
        """The entries that reach the local threshold, at most k; the k largest where it is to be estimated."""
        numel = like.numel()
        known = state is not None and state["of"] == _of(numel, torch.promote_types(like.dtype, torch.float32), size, k)
        if state is None or not known or not state["step"] % self.thresholds_every or k >= numel or not state["local"]:
            return Largest(k)
        return Reaching(state["local"], k)

    def initial_state(self) -> State:
        """The state before the first call.

        step: calls so far with a finite total. local, threshold: least key (magnitude as an integer) to be selected
        here, and in the total; 0 where it is to be estimated.

        boundaries: edges of the regions. of: k, P, n and dtype that all this is for; for others it starts anew. `local`
        is this rank's own, the rest is alike on all ranks.
        """
        return {"step": 0, "local": 0, "threshold": 0, "boundaries": [], "of": None}

    def check_state(self, state: State) -> None:
        of = state.get("of")
        fits = {
            **dict.fromkeys(("step", "local", "threshold"), is_count),
            "of": lambda of: of is None or _is_of(of),
            "boundaries": lambda edges: isinstance(edges, list) and (of is None or _are_edges(edges, of[2], of[1])),
        }
        check_values(state, fits)

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """The most that a first call sends; later ones, that agree on no regions, send less.

        Entries: k in the split, k in evening out, (P − 1)·⌈k/P⌉ in the gather, so 6k elements where P divides k.
        Besides: one sum of the boundaries; with S = ⌊√2k⌋ + 1 keys of 4 bytes (float64: 8), (P − 1)·S as samples, and
        at most P·S between two of them, handed on ⌈log P⌉ times if they are one rank's; 4 numbers a rank, the slots.
        """
        if size == 1:
            return Traffic(0, 0, 0)
        wire, k, none, edges = self.wire, min(k, numel), [0] * size, [0, *accumulate(even_counts(numel, size))]
        first = oktopk_traffic(rank, k, dtype, none, none, [-(-k // size)] * size, edges, True, wire)
        between = (size - 1).bit_length() * size * sample_count(k) * torch.promote_types(dtype, torch.float32).itemsize
        moved = wire.block_nbytes(k, numel, dtype) + wire.block_nbytes(k, (size - 1) * numel, dtype)
        nbytes = moved + between + (3 * size + 1) * wire.overhead
        return Traffic.total(first, Traffic.of_bodies(nbytes, size - 1, 1))

    def typical(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """A call between two agreements on regions, where these are balanced.

        There are more than k sums, as long as ranks do not select the same. All count where the threshold is new,
        nearly all with one of before, while gradients do not get smaller. Samples a gap of g = ⌈k/S⌉ apart leave
        SPAN·(g − 1) keys a rank.
        """
        k, edges = min(k, numel), [0, *accumulate(even_counts(numel, size))]
        even, spans = even_counts(k, size), [round(SPAN * (-(-k // sample_count(k)) - 1))] * size
        return oktopk_traffic(rank, k, dtype, even, spans, even, edges, False, self.wire)

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """The k largest entries of the sum of all selections, because a first call estimates a new threshold."""
        return cut(sum_of_selections(inputs, k), k)


def _agree_on_boundaries(own: SparseVector, rank: int, size: int) -> Schedule[list[int]]:
    """Edges of P regions: each rank proposes those with as many of its entries, and the mean of proposals stands."""
    n, m = own.numel, len(own)
    indices = own.indices.tolist()
    proposal = [indices[b * m // size] if m else b * n // size for b in range(1, size)]
    proposed = torch.tensor(proposal, dtype=torch.int64, device=own.device)
    sums = yield from schedules.allreduce(proposed, rank, size)
    boundaries = [0, *(total // size for total in sums.tolist()), n]
    if not _are_edges(boundaries, n, size):
        raise InvalidMessageError(None, f"boundaries of regions {boundaries}, expected increasing ones")
    return boundaries


def _split_and_reduce(
    own: SparseVector, boundaries: Sequence[int], rank: int, size: int, k: int, wire: Wire
) -> Schedule[SparseVector]:
    """The sum of this rank's region over all ranks."""
    regions = list(pairwise(boundaries))
    given, length = vectors.split(own, regions), boundaries[rank + 1] - boundaries[rank]
    capacity = wire.block_nbytes(min(k, length), length, own.dtype) + wire.overhead
    bodies = yield from split(lambda to: wire.block(given[to], regions[to]), capacity, rank, size)
    for source, body in bodies.items():
        with blame_rank(source):
            given[source] = wire.entries(body, regions[rank], own)
    return union_of(given)


def _global_largest(
    region: SparseVector, threshold: int, k: int, rank: int, size: int
) -> Schedule[tuple[SparseVector, list[int], int]]:
    """This rank's sums that reach the threshold, or belong to the k largest where all ranks' are more.

    Also how many they are on every rank, and the key of the k-th largest, 0 where there are no more than k.
    """
    keys = magnitude_keys(region.values)
    kth, above, equal = yield from kth_largest(keys, threshold, k, rank, size, most=min(k * size, region.numel))
    before = accumulate(equal, initial=sum(above))
    allowed = [min(max(k - earlier, 0), ties) for earlier, ties in zip(before, equal, strict=False)]
    # Ties to the lowest index: regions are in rank order.
    kept = vectors.larger(region, max(kth, threshold - 1), allowed[rank])
    return kept, [n + ties for n, ties in zip(above, allowed, strict=True)], max(kth, 0)


def oktopk_traffic(
    rank: int,
    k: int,
    dtype: torch.dtype,
    given: Sequence[int],
    spans: Sequence[int] | None,
    kept: Sequence[int],
    edges: Sequence[int],
    boundaries: bool,
    wire: Wire = RAW,
) -> Traffic:
    """Exact traffic of a rank in a call with k ≤ n.

    given: its entries in each region. spans: keys of each rank that may be the k-th largest, as `kth_largest.bracket`
    finds them; None if at most k sums reach the threshold. kept: entries of each region that are in the total. edges:
    edges of the regions. boundaries: whether the ranks agree on new ones in this call.
    """
    size, regions = len(given), zip(given, pairwise(edges), strict=True)
    sizes = [wire.block_nbytes(entries, high - low, dtype) for entries, (low, high) in regions]
    agreed = [Traffic.allreduce(8 * (size - 1), rank, size, 8)] if boundaries else []
    return Traffic.total(
        Traffic.of_bodies(sum(sizes) - sizes[rank], size - 1, size - 1),
        kth_largest_sent(rank, k, dtype, spans, size),
        gather_evenly_sent(rank, dtype, kept, edges[-1], wire),
        *agreed,
    )


def _is_of(of: Any) -> bool:
    return isinstance(of, list) and len(of) == 4 and all(map(is_count, of[:3])) and isinstance(of[3], str)


def _are_edges(boundaries: Sequence[Any], numel: int, size: int) -> bool:
    """Whether these are the edges of so many regions, which may be empty."""
    edges = [0, *boundaries, numel]
    whole = len(boundaries) == size + 1 and boundaries[0] == 0 and boundaries[-1] == numel
    return whole and all(map(is_count, boundaries)) and all(low <= high for low, high in pairwise(edges))


def _of(numel: int, dtype: torch.dtype, size: int, k: int) -> list[Any]:
    return [min(k, numel), size, numel, str(dtype)]
