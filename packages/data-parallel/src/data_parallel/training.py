"""Core that every adapter holds: the exchange, the steps, and their part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from communicators import Communicator, Stats
from replicas import hash_bits, refuse_unlike, saved_by
from torch import Tensor
from torch.optim import Optimizer

from data_parallel.exchange import Exchange
from data_parallel.schemes.choose import choose_scheme
from data_parallel.settings import Settings
from data_parallel.state_dict import RESHARD, Shapes, check_fit, check_sent, complete, own_state, refuse_residuals

SHARED = ("lr", "momentum", "betas", "weight_decay")
"""Settings of parameter groups that ranks share; an optimizer may adapt other values there, each rank its own."""
GROUPS_EVERY = 100
"""Steps between two comparisons of parameter groups' settings, the first of which is in the first step."""


class Training:
    """Exchanges what an adapter brings, counts its steps, and saves and loads both.

    Only the count of the steps belongs in a checkpoint: the density depends on nothing else, so a resumed run goes on
    with it.

    Args:
        settings: Checked ones.
        comm: The ranks.
        names: Names of the parameters, which buckets refer to by position; the list may grow.
        parameters: Tensors of which "auto" chooses by size.
        owner: The adapter's name in messages.
        sends: "gradients", or "updates" for an algorithm that selects.
        native: Dense sums are left to the transport.
        withholds: Residuals wait of parameters whose gradient is all zeros.
    """

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        *,
        owner: str,
        sends: str = "gradients",
        native: bool = False,
        withholds: bool = False,
    ) -> None:
        self.settings, self.comm, self.sends = settings, comm, sends
        self.taken = self.skipped = 0
        self._begins = True  # no step since parameters may have been loaded
        selects = sends == "updates"
        self.scheme, self.choice = choose_scheme(settings, comm, selects=selects, parameters=parameters)
        what = sends.removesuffix("s")
        self.exchange = Exchange(
            self.scheme, comm, names, settings, owner=owner, native=native, withholds=withholds, what=what
        )

    def said(self) -> str:
        """Settings in use, as text that names them; all ranks share it but for the compressor's density."""
        scheme = self.scheme
        compressor = self.settings.compressor if scheme.selects else None
        return self.settings.said(algorithm=scheme.name, wire=scheme.wire, compressor=compressor)

    def facts(self) -> str:
        """Settings that all ranks must share, as text."""
        scheme = self.scheme
        found = {"algorithm": scheme.name, "wire": scheme.wire, "compressor": None, "options": None}
        return ", ".join([self.settings.said(**found), *scheme.settings])

    def begin_step(self) -> None:
        """Ends the last step, if nothing else has told that it is over, and sets the density before a first selection.

        Raises the compressor's errors for an invalid density.
        """
        self.skipped += not self.exchange.commit_or_rollback()
        if self.settings.density is not None:
            self.settings.compressor.density = self.settings.density(self.taken)

    def share(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Makes facts of the step that begins, unless `verify` is 0: the first parameters, and the groups' settings."""
        self.exchange.shared = ""
        if self.settings.verify == 0 or not (self._begins or self.taken % GROUPS_EVERY == 0):
            return
        begun = ""
        if self._begins:
            digest = int(hash_bits(torch.stack([hash_bits(p).cpu() for p in parameters.values()])))
            begun = f", begun with parameters of hash {digest % 2**64:016x} (load weights on all ranks alike)"
        self.exchange.shared = f" with {_shared_settings(optimizer)}{begun}"

    def count_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Counts a step. Raises CollectiveError on every rank if a comparison is due and parameters differ."""
        self.taken, self._begins = self.taken + 1, False
        verify = self.settings.verify
        if verify and self.taken % verify == 0:
            self.comm.atomic(lambda: refuse_unlike(parameters, self.comm))

    def stats(self) -> Stats:
        """Costs and savings so far; see `communicators.Stats`."""
        found = {"steps": self.taken, "skipped": self.skipped, **self.exchange.stats()}
        density = getattr(self.settings.compressor, "density", None) if self.scheme.selects else 1.0
        return Stats(found if density is None else {**found, "density": float(density)})

    def state(self, trained: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """This rank's state: references. trained: what learns, with zeros in the state where nothing is kept yet."""
        kept = self.exchange.state_dict()
        return {
            **saved_by(self.comm.rank, self.comm.size, RESHARD),
            **({} if self.sends == "gradients" else {"sends": self.sends}),
            "algorithm": self.scheme.name,
            "skipped": self.skipped,
            "steps": self.taken,
            **kept,
            **complete(kept, self.scheme.keeps, trained),
        }

    def own(
        self, state: Mapping[str, Any], shapes: Shapes, *, frozen: Shapes | None = None
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """This rank's part of a state, or of a gathered one, and what `load` takes of that; changes nothing.

        Raises TypeError or ValueError for one that does not fit. shapes: of what learns, {} if not known yet.
        """
        state, own = own_state(state, self.comm)
        check_sent(own, self.sends)
        if not self.scheme.keeps:
            refuse_residuals(own["residuals"])
            own |= {"residuals": {}, "velocities": {}}
        elif shapes:
            check_fit(own, shapes, frozen=frozen)
        return state, own

    def load(self, own: Mapping[str, Any]) -> None:
        """Goes on from what `own` gave."""
        self.exchange.load_state_dict(own)
        self.taken, self.skipped, self._begins = own.get("steps", 0), own.get("skipped", 0), True

    def shared_state(self) -> dict[str, Any]:
        """State that a newcomer to an elastic group goes on from: all but this rank's residuals and velocities."""
        kept = {**self.exchange.state_dict(), "residuals": {}, "velocities": {}, "algorithm": self.scheme.name}
        own = {"skipped": self.skipped, "steps": self.taken, "loaded": self.exchange.loaded, "begins": self._begins}
        return {**kept, **own, "selection": self._selection()}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Goes on from another rank's `shared_state`, with the facts of those that train.

        Raises ValueError, on this rank alone, for another selection than theirs.
        """
        if (own := self._selection()) != state["selection"]:
            self.comm.close()
            raise ValueError(
                f"this rank has come to a training with other settings or another model: that selects by "
                f"{state['selection']}, this one by {own}; start it as those who train were started, with the density "
                "that they have now"
            )
        self.load(state)
        self.exchange.loaded, self._begins = state["loaded"], state["begins"]

    def _selection(self) -> str:
        """Compressor and number of entries, as text; "" where nothing is selected, or a schedule says how much."""
        if not self.scheme.selects or self.settings.density is not None:
            return ""
        numel, compressor = sum(shape.numel() for shape in self.exchange.shapes.values()), self.settings.compressor
        return f"{type(compressor).__name__}, {compressor.entries(numel)} of {numel} elements"


def _shared_settings(optimizer: Optimizer) -> str:
    """`SHARED` settings of all parameter groups, as a fact, in plain numbers: a tensor's text is rounded."""
    groups = [[(name, group[name]) for name in SHARED if group.get(name)] for group in optimizer.param_groups]
    said = [
        ", ".join(f"{name} {torch.as_tensor(value, dtype=torch.float64).tolist()}" for name, value in group)
        for group in groups
    ]
    return f"parameter groups of {'; '.join(said)}"
