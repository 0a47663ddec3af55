"""Streaming DiLoCo, with overlapping communication (Douillard et al., 2025)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Unpack

from communicators import run, schedules
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.averaging import Averaging
from local_sgd.block import Every
from local_sgd.compression.choice import Compression
from local_sgd.compression.sparsifier import Allreduce, Compress
from local_sgd.fragment import Fragment
from local_sgd.fragments import Fragments, fragments_of
from local_sgd.nonfinite import refuse_nonfinite
from local_sgd.options import Options
from local_sgd.outer import NESTEROV, MakeOptimizer, MakeScheduler, Outer
from local_sgd.parts import Part
from local_sgd.periodic import PeriodicAveraging
from local_sgd.settings import below_one, count


class StreamingDiLoCo(PeriodicAveraging):
    """Runs DiLoCo fragment by fragment, so that less travels at a time, while training goes on.

        launch the mean of x of the next fragment                      one of F every τ/F steps
        Δ = z − x̄;  z ← outer(z, Δ);  x ← α·x + (1 − α)·z             `delay` steps later

    The k-th of F fragments of a block is launched after its step ⌊k·τ/F⌋, and applied `delay` steps later, or before
    its next launch where that comes earlier. With one fragment, no delay and α = 0 it is DiLoCo, bit for bit. The
    model is z.

    Args:
        optimizer: Inner optimizer, see `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        fragments: A number of fragments, of about equal bytes in the order of the parameters (at most one per
            parameter); or a list of modules or lists of parameter names, one entry per fragment, which leave no
            parameter out.
        delay: Steps between launch and application, 0 or more.
        alpha: 0 ≤ α < 1, the weight of the rank's own steps meanwhile.
        outer: See `DiLoCo`; every fragment has its own, which steps when the fragment is applied.
        outer_scheduler: See `DiLoCo`; one per fragment, too.
        compress: See `DiLoCo`.
        allreduce: See `DiLoCo`; a `Work` that it returns is waited for when the fragment is applied.
        **options: See `PeriodicAveraging`; buffers and inner state are exchanged each time that all fragments have
            been launched once; `native` is refused.
    """

    anchors = ("anchor",)
    settings = ("delay", "alpha")
    more = ("turn", "launched", "fragments")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 100,
        fragments: Fragments = 4,
        delay: int = 1,
        alpha: float = 0.5,
        outer: MakeOptimizer = NESTEROV,
        outer_scheduler: MakeScheduler | None = None,
        compress: Compress = None,
        allreduce: Allreduce | None = None,
        **options: Unpack[Options],
    ) -> None:
        if options.get("native"):
            raise ValueError("native=True waits for the transport, but StreamingDiLoCo goes on meanwhile: leave it out")
        self.delay, self.alpha = count("delay", delay), below_one("alpha", alpha)
        self._asked, self._cut = fragments, list[dict[str, Tensor]]()
        self.compression = Compression(compress, allreduce)
        self._turn = self._launched = 0  # the next fragment; how many were launched in this block
        super().__init__(optimizer, sync_every=sync_every, **options)
        self._fragments = [self._fragment(piece, outer, outer_scheduler) for piece in self.pieces()]
        named = zlib.crc32(repr([fragment.names for fragment in self._fragments]).encode())
        for fragment in self._fragments:
            fragment.averaging.alike = fragment.outer.alike
        facts = f"{len(self._fragments)} fragments {named:08x}{self._fragments[0].outer.alike()}"
        run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=facts)

    def pieces(self) -> list[dict[str, Tensor]]:
        """Parameters by fragment."""
        if not self._cut:
            self._cut = fragments_of(self.trained, self._asked)
        return self._cut

    def averagings(self) -> list[Averaging]:
        """Exchanges of all fragments."""
        return [fragment.averaging for fragment in self._fragments]

    def average(self, weight: float | None = None) -> None:
        """Counts a step, applies fragments that are due, and launches the next; see `PeriodicAveraging.average`."""
        weight = self._counted(weight)
        last = self._block.count(weight)
        for fragment in self._fragments:
            fragment.count(weight)
        for fragment in self._under_way():
            assert fragment.due is not None
            fragment.due -= 1
            if fragment.due <= 0:
                self._take(fragment)
        while self._launched < self._launches_by_now():
            self._launch(finished=False)
        if last:
            self._block.end()
            self._launched = 0

    def gain(self) -> float:
        """Gain of the outer optimizer's momentum."""
        return self._fragments[0].outer.gain()

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Mixes a fragment's x with z, once its outer optimizer has stepped."""
        return x.mul_(self.alpha).add_(part["anchor"], alpha=1 - self.alpha)

    def more_state(self) -> dict[str, Any]:
        """Adds the state of every fragment, and whose turn it is."""
        fragments = {str(turn): fragment.state_dict() for turn, fragment in enumerate(self._fragments)}
        own = {"turn": self._turn, "launched": self._launched, "fragments": fragments}
        return {**super().more_state(), **own}  # the residuals last: waiting for what is under way changes them

    def check_more(self, state: Mapping[str, Any]) -> None:
        """Checks the state of every fragment too."""
        super().check_more(state)
        if len(state["fragments"]) != len(self._fragments):
            raise ValueError(f"the state is of {len(state['fragments'])} fragments, this is of {len(self._fragments)}")
        for turn, fragment in enumerate(self._fragments):
            fragment.check(state["fragments"][str(turn)])

    def load_more(self, state: dict[str, Any]) -> None:
        """Restores every fragment, and whose turn it is."""
        for turn, fragment in enumerate(self._fragments):
            fragment.load_state_dict(state["fragments"][str(turn)])
        super().load_more(state)
        self._turn, self._launched = state["turn"], state["launched"]

    def _fragment(self, piece: dict[str, Tensor], make: MakeOptimizer, schedule: MakeScheduler | None) -> Fragment:
        parts = [part for part in self._parts if part.names[0] in piece]
        return Fragment(parts, self.averaging_of(parts), Outer(parts, list(piece), make, schedule))

    def _under_way(self) -> list[Fragment]:
        """Fragments under way, in the order of their launches."""
        ordered = self._fragments[self._turn :] + self._fragments[: self._turn]
        return [fragment for fragment in ordered if fragment.due is not None]

    def _launches_by_now(self) -> int:
        count, τ = len(self._fragments), self._block.length
        return sum(max(1, k * τ // count) <= self._block.done for k in range(1, count + 1))

    def _launch(self, *, finished: bool) -> Fragment:
        self._next_boundary()
        fragment = self._fragments[self._turn]
        if fragment.due is not None:
            self._take(fragment)
        weight = 0.0 if fragment.done == 0 else fragment.weight if self._weighted else 1.0
        fragment.launch(weight, self.delay, finished=finished)
        self._launched, self._turn = self._launched + 1, (self._turn + 1) % len(self._fragments)
        if not self.delay and not finished:
            self._take(fragment)
        if self._turn == 0:
            self._inner.at_boundary()
            self._buffers.at_boundary()
        return fragment

    def _take(self, fragment: Fragment) -> int:
        """Applies a launched fragment; returns how many ranks had not finished at its launch."""
        arrived, fragment.due = fragment.averaging.arrived(), None
        refuse_nonfinite(fragment.parts, arrived.means, self.comm, self._what)
        if not arrived.means:
            return arrived.unfinished
        for part, mean in zip(fragment.parts, arrived.means, strict=True):
            fragment.outer.give(part, part["anchor"] - mean)
        fragment.outer.step()
        for part, mean in zip(fragment.parts, arrived.means, strict=True):
            part.put(self.boundary(part, part.gather(), mean))
        return arrived.unfinished

    def _end(self, *, most: int | None) -> None:
        """Launches fragments, and applies each at once, until all were launched with all ranks finished."""
        for fragment in self._under_way():
            self._take(fragment)
        ended = 0
        while ended < len(self._fragments):
            unfinished = self._take(self._launch(finished=True))
            if unfinished and most is not None:
                self._refuse_undrained(unfinished)
            ended = 0 if unfinished else ended + 1
        for part in self._parts:
            part.put(part["anchor"])
        self._all_hold([part["anchor"] for part in self._parts])
        self._buffers.at_end()
        self._block.end()
        self._launched = 0
