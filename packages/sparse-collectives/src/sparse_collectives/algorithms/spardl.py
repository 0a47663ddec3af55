"""SparDL: every block is summed at its owner, cut to its budget on the way, and gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from communicators.dense_schedules import allgather_blocks, block_bounds
from communicators.schedule import SLOT_BYTES, Elapse, Round, Schedule, frame, powers_of_two
from sparse_compress import SparseVector
from sparse_compress.nonfinite import all_finite
from sparse_compress.selection import LargestOfBlocks, Selection

from sparse_collectives.algorithms.among import among
from sparse_collectives.algorithms.budgets import block_budgets
from sparse_collectives.algorithms.spardl_blocks import Blocks
from sparse_collectives.algorithms.spardl_teams import SAG, combine_teams, divisors_of
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State, check_values, is_count
from sparse_collectives.wire.wire import PLAIN, Wire, joined


def spardl(
    sparse: SparseVector,
    rank: int,
    size: int,
    k: int,
    *,
    teams: int = 1,
    sag: str = "auto",
    state: State | None = None,
    wire: Wire = PLAIN,
    cost: Callable[[int], float] | None = None,
) -> Schedule[Reduction]:
    """At most k entries of the sum, chosen block by block (Zhao et al., ICDE 2024).

    d teams of T = P/d ranks; T blocks of the index range, each with a budget of about k/T entries.

        Spar-Reduce-Scatter in each team      after ⌈log T⌉ rounds, rank r of the team has its sum of block r
        Spar-All-Gather                       the d sums of one block become one (d > 1, see `spardl_teams`)
        all-gather in each team               Bruck, ⌈log T⌉ rounds

    Whatever is cut to a budget stays with the rank that cuts it (global residual collection).
    Differs from the paper: budgets are exact in integers and turn with the step where k < T, so that no block starves.

    sparse: min(k, n) entries, cut to the budgets first; those of `spardl_select` need no cut.
    teams: d, divides P. sag: "r-sag" (d a power of two), "b-sag", or "auto": the first where it can be.
    state: see `spardl_state`. wire: what it rounds off stays with the rank that sends it.
    cost: seconds to merge so many entries, which a simulated world charges.
    """
    state = spardl_state() if state is None else state
    team, position = divmod(rank, size // teams)
    mates = range(team * (size // teams), (team + 1) * (size // teams))
    blocks = Blocks(sparse, len(mates), k, state["step"], wire)
    yield from among(mates, spar_reduce_scatter(blocks, position, len(mates), cost))
    settings = [k, size, teams]
    entries = before = state["entries"] if state["of"] == settings else None
    if teams > 1:
        others = range(position, size, len(mates))
        entries = yield from among(others, combine_teams(blocks, position, team, teams, sag, before, cost))
    lengths = [high - low for low, high in blocks.bounds]
    sizes = [wire.block_nbytes(*sized, sparse.dtype) for sized in zip(blocks.budgets, lengths, strict=True)]
    own = blocks.own(position, team, teams)
    bodies = yield from among(mates, allgather_blocks(own, sizes, position, len(mates)))
    total = joined(wire, bodies, blocks.bounds, blocks.budgets, sparse, mates)
    if entries != before and not bool(all_finite(total.values)):  # alike on all ranks
        entries = before
    state.update(step=state["step"] + 1, entries=entries, of=settings)
    return Reduction(total, blocks.dropped())


def spar_reduce_scatter(
    blocks: Blocks, rank: int, size: int, cost: Callable[[int], float] | None = None
) -> Schedule[None]:
    """Afterwards rank r holds the sum of block r over all ranks, cut to its budget after every addition; any P.

    A rank holds partial sums of the blocks rank + j, j < m (m = P at first). With distance D it gives those from D on
    to rank + D, which holds them at j − D, and has D left: every block goes round by ever shorter hops to its owner.
    """
    held = size
    for distance in reversed(list(powers_of_two(below=size))):
        to, source = (rank + distance) % size, (rank - distance) % size
        gives = [(rank + j) % size for j in range(distance, held)]
        takes = [(rank + j) % size for j in range(held - distance)]
        received = yield Round({to: frame(blocks.give(gives))}, {source: SLOT_BYTES + blocks.nbytes(takes)})
        blocks.add(received[source][SLOT_BYTES:], takes, source)
        if cost is not None:
            yield Elapse(cost(2 * sum(blocks.budgets[b] for b in takes)))
        held = distance


def spardl_state() -> State:
    """The state before the first call.

    step: calls so far, which turn the budgets where k < T. entries: B-SAG's h, as the last call with a finite total
    left it. of: the k, P and d that h is for.
    """
    return {"step": 0, "entries": None, "of": None}


def check_spardl_state(state: State) -> None:
    """Raises ValueError for what `spardl_state` cannot have become."""
    check_values(
        state,
        {
            "step": is_count,
            "entries": lambda entries: entries is None or is_count(entries),
            "of": lambda of: of is None or (isinstance(of, list) and len(of) == 3 and all(map(is_count, of))),
        },
    )


def spardl_select(
    like: torch.Tensor, rank: int, size: int, k: int, state: State | None, *, teams: int = 1, sag: str = "auto"
) -> Selection:
    """The largest entries of every block, as many as its budget; and a NaN or inf of a block that has none."""
    del rank, sag
    bounds = block_bounds(like.numel(), size // teams)
    return LargestOfBlocks(bounds, block_budgets(k, like.numel(), len(bounds), state["step"] if state else 0))


def check_spardl(size: int, *, teams: int, sag: str) -> None:
    """Raises ValueError for teams that do not divide P, and for an unknown or impossible sag."""
    if teams < 1 or size % teams:
        divisors = ", ".join(map(str, divisors_of(size)))
        raise ValueError(f"teams is {teams}, expected a divisor of the {size} ranks: {divisors}")
    if sag not in SAG:
        raise ValueError(f"sag is {sag!r}, expected one of {', '.join(SAG)}")
    if sag == "r-sag" and teams & (teams - 1):
        raise ValueError(f"sag='r-sag' needs a power of two of teams, not {teams}: take sag='b-sag'")
