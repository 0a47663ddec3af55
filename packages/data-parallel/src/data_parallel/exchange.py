"""Exchange of this rank's gradients for their mean over all ranks: the core that every adapter holds.

An `Exchange` has a lane for each bucket: dense in, dense out. A lane decides how its gradient travels, and owns what is
kept of it between steps. The exchange counts steps, ends them, and saves and loads all of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, Stats, Work, run, start, tracing
from replicas import hash_bits, refuse_unlike, saved_by
from sparse_compress import all_finite
from torch import Tensor
from torch.optim import Optimizer

from data_parallel.clipping import clip_limit, clip_together
from data_parallel.lanes import ERROR_STATE, Lane, Saved, Sending, State, empty_like, unused_spans
from data_parallel.nonfinite import culprit, unlawful
from data_parallel.schemes.choose import choose_scheme
from data_parallel.settings import Settings
from data_parallel.state_dict import (
    RESHARD,
    Shapes,
    check_fit,
    check_sent,
    complete,
    own_state,
    refuse_nonfinite,
    without,
)
from data_parallel.tally import Tally

SHARED = ("lr", "momentum", "betas", "weight_decay")
"""Settings of parameter groups that ranks share; an optimizer may adapt other values there, each rank its own."""
GROUPS_EVERY = 100
"""Steps between two comparisons of parameter groups' settings, from the first step on; 1 with an `Elastic`.

They are compared after a skipped step, too: a scheduler that follows each rank's own GradScaler parts them there.
"""
HASHES = 1 << 48
"""Number of different hashes in statistics: whole numbers that float64, and so every logger, holds exactly."""


Checked = tuple[Any, CollectiveError | None]
"""A schedule's result, and the error that every rank is to raise where it is not finite."""


class Exchange:
    """Means of buckets, and the steps that they make up.

    Only the count of the steps belongs in a checkpoint: the density depends on nothing else, so a resumed run goes on
    with it.

    Args:
        settings: Checked ones. nonfinite="raise": a NaN or inf of any rank is an error on all of them, raised by each
            mean's wait. "skip": `commit_or_rollback` tells whether the step stands, and otherwise undoes it. clip_norm:
            target norm of the mean, which `clip` approaches by clipping ranks' own gradients.
        comm: The ranks.
        names: Names of the parameters, which buckets refer to by position; the list may grow.
        parameters: Tensors of which "auto" chooses by size.
        owner: The adapter's name in messages.
        sends: "gradients", or "updates" for an algorithm that selects.
        native: Dense sums are left to the transport, if it has its own, when their mean is waited for.
        withholds: Residuals wait of members whose gradient is all zeros.

    Attributes:
        taken: Steps so far. skipped: Those of them that were undone.
        cut: A fact, as text: how parameters were cut into buckets, if ranks could differ in that.
        shared: Another fact, about this step: values that ranks must share.
        loaded: Another: whether a state was loaded, because residuals that only some ranks have loaded are lost on
            others.
        ranks: Numbers by which replicas that differ are named, where those of `comm` say little.
        unclaimed: Error state of no lane, by kind and parameter: that was loaded, or whose bucket has been cut anew.
        selection_seconds: Seconds so far on this rank, by the communicator's clock.
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
        self.settings, self.comm, self.names, self.native = settings, comm, names, native
        self.sends, self.what = sends, sends.removesuffix("s")  # the second in messages
        self.scheme, self.choice = choose_scheme(settings, comm, selects=sends == "updates", parameters=parameters)
        self._owner = owner if settings.clip_norm is None else f"{owner} with clip_norm={settings.clip_norm}"
        self._withholds = withholds and bool(self.scheme.keeps)
        self._undoes = settings.undoes(comm)
        self.taken = self.skipped = self._skipped = 0  # the last: as of the step before
        self._begins = True  # no step since parameters may have been loaded
        self.cut = self.shared = self.loaded = ""
        self.ranks: Sequence[int] | None = None
        self._lanes: dict[int, Lane] = {}  # by first member
        self._open: list[Lane] = []  # those of this step, as they were first used in it
        self.unclaimed: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
        self._states: dict[str, State] = {}  # of the algorithm, loaded, of no lane yet
        # whether total and dropped are finite, of this step, by bucket, 0-D bool: a GPU is asked at the step's end
        self.flags: list[tuple[Tensor, Tensor]] = []
        self.selection_seconds = 0.0
        self.tally = Tally(comm.clock)
        self._verified: dict[str, int] = {}

    def said(self) -> str:
        """Settings in use, as text that names them; all ranks share it but for the compressor's density."""
        scheme = self.scheme
        found = {} if scheme.selects else {"compressor": None, "density": None}
        return self.settings.said(**{"density": self.settings.density} | found, algorithm=scheme.name, wire=scheme.wire)

    def facts(self) -> str:
        """Settings that all ranks must share, as text."""
        scheme = self.scheme
        found = {"algorithm": scheme.name, "wire": scheme.wire, "compressor": None, "options": None}
        return ", ".join([self.settings.said(**found), *scheme.settings])

    def begin_step(self) -> None:
        """Ends the last step, if nothing else has told that it is over, and sets the density before a first selection.

        Raises TypeError or ValueError for an invalid density.
        """
        self.skipped += not self.commit_or_rollback()
        self.settings.begin_step(self.taken)

    def share(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Makes facts of the step that begins, unless `verify` is 0: the first parameters, and the groups' settings."""
        self.shared = ""
        elastic = self.comm.elastic  # who comes later may lack a scheduler's state
        after_skip, self._skipped = self.skipped != self._skipped, self.skipped
        due = self._begins or elastic or after_skip or self.taken % GROUPS_EVERY == 0
        if self.settings.verify == 0 or not due:
            return
        begun = ""
        if self._begins:
            digest = int(hash_bits(torch.stack([hash_bits(p).cpu() for p in parameters.values()])))
            begun = f", begun with parameters of hash {digest % 2**64:016x} (load weights on all ranks alike)"
        carried = " (newcomers get a scheduler's state by Elastic.carry)" if elastic else ""
        says = after_skip and not elastic  # who comes later knows of no skipped step
        skip = " (after a skipped step: let schedulers follow .skipped, not a GradScaler)" if says else ""
        self.shared = f" with {_shared_settings(optimizer)}{carried}{skip}{begun}"

    def count_step(self, parameters: Mapping[str, Tensor], *, when: str = "before") -> None:
        """Counts a step. Raises CollectiveError on every rank if a comparison is due and parameters differ.

        when: "before" the step that is counted, or "after" it.
        """
        self.taken, self._begins = self.taken + 1, False
        verify, step = self.settings.verify, f"{when} step {self.taken}"
        if verify and self.taken % verify == 0:
            compared = partial(refuse_unlike, parameters, self.comm, when=step, ranks=self.ranks)
            digest = self.comm.atomic(compared)
            self._verified = {"verified_step": self.taken, "verified_hash": digest % HASHES}

    def clip(self, flats: Sequence[Tensor], *, scale: float = 1.0, of: int | None = None) -> None:
        """Clips this rank's gradients, which have the loss scale `scale`, in place before they are started.

        of: elements of the whole model, if these are a part of it. Each part's norm is limited to √share of the limit,
        which limits the whole model's norm however it is spread over the parts (`clip_limit`).
        """
        if self.settings.clip_norm is not None:
            share = 1.0 if of is None else sum(flat.numel() for flat in flats) / of
            clip_together(flats, scale * clip_limit(self.settings.clip_norm, self.comm.size) * math.sqrt(share))

    def start(self, bucket: Bucket, flat: Tensor, *, scale: float = 1.0, of: int | None = None) -> Mean:
        """Starts one bucket: `flat`, 1-D, belongs to the exchange until its mean has been waited for.

        scale: loss scale; residuals are stored without it. of: elements of the whole model, to clip this bucket by its
        share of them; None: it is not clipped here.
        """
        lane = self.open(bucket)
        if lane not in self._open:
            self._open.append(lane)
            if self._undoes:
                lane.begin()
        if of is not None:
            self.clip([flat], scale=scale, of=of)
        unused = unused_spans(lane.spans, flat) if self._withholds else ()
        began = self.comm.clock()
        with tracing.labelled("select"):
            sending = lane.send(flat, scale, unused)
        self.selection_seconds += self.comm.clock() - began
        mean = Mean(self, lane, sending, f"{sending.facts} in {self._owner}{self.shared}{self.loaded}{self.cut}")
        if not self.native or sending.summed is None:
            mean.start()
        self.tally.add(mean.works or [mean.cost], dense=2 * flat.nbytes * (self.comm.size - 1) // self.comm.size)
        return mean

    def open(self, bucket: Bucket) -> Lane:
        """The bucket's lane; if its parameters were cut differently before, their error state moves here."""
        first = bucket.members[0]
        if first in self._lanes and self._lanes[first].bucket == bucket:
            return self._lanes[first]
        for old in [one for one in self._lanes.values() if not set(one.bucket.members).isdisjoint(bucket.members)]:
            if self.flags:  # a skipped step could not be undone in other buckets
                self.commit_or_rollback()
            for kind, found in self._by_parameter([old]).items():
                self.unclaimed[kind].update(found)
            del self._lanes[old.bucket.members[0]]
            self._open = [lane for lane in self._open if lane is not old]
        key = self.names[first]
        self._lanes[first] = self.scheme.open(bucket, Saved(key, self._taken(bucket), self._states.pop(key, None)))
        return self._lanes[first]

    def commit_or_rollback(self) -> bool:
        """Ends the step, in the same way on every rank; returns False if it was undone because a mean is not finite."""
        if not self.finite():
            self.undo()
            return False
        dropped, self.flags = [flag for _, flag in self.flags], []
        if dropped and not bool(torch.stack(dropped).all()):
            raise unlawful(self._owner, self.comm.rank)
        for lane in self._open:
            lane.commit()
        self._open = []
        return True

    def finite(self) -> bool:
        """Whether all means of this step are finite so far, if steps may be skipped; does not end it."""
        return not self.flags or bool(torch.stack([total for total, _ in self.flags]).all())

    def undo(self) -> None:
        """Ends a step that has failed, and takes back what it can."""
        if self._undoes:
            for lane in reversed(self._open):  # lanes share a compressor's state, which the first saw before the step
                lane.rollback()
        self._open, self.flags = [], []

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that buckets have brought, by name."""
        return {
            self.names[member]: shape
            for lane in self._lanes.values()
            for member, shape in zip(lane.bucket.members, lane.bucket.shapes, strict=True)
        }

    def stats(self) -> Stats:
        """Costs and savings so far; see `communicators.Stats`."""
        residuals = [lane.residual for lane in self._lanes.values() if lane.residual is not None]
        residuals += self.unclaimed["residuals"].values()
        squares = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in residuals]
        density = getattr(self.settings.compressor, "density", None) if self.scheme.selects else 1.0
        found = {
            "steps": self.taken,
            "skipped": self.skipped,
            **self.tally.numbers(),
            "dense_steps_left": self.scheme.dense_steps_left,
            "seconds_selecting": self.selection_seconds,
            "residual_norm": math.sqrt(sum(squares)),
            "density": None if density is None else float(density),
            **self._verified,
        }
        return Stats.of_group(self.comm, **{name: number for name, number in found.items() if number is not None})

    def error_state(self) -> dict[str, dict[str, Tensor]]:
        """Error state by kind and parameter: references."""
        found = self._by_parameter(self._lanes.values())
        return {kind: {**self.unclaimed[kind], **found[kind]} for kind in ERROR_STATE}

    def state_dict(self, trained: Iterable[tuple[str, Tensor]] = ()) -> dict[str, Any]:
        """This rank's state: references. trained: what learns, with zeros in the state where nothing is kept yet.

        The algorithm's is by bucket, and a list, which torch.distributed.checkpoint loads as a whole.
        """
        states = self._states | {lane.key: lane.state for lane in self._lanes.values() if lane.state is not None}
        return {
            **saved_by(self.comm.rank, self.comm.size, RESHARD),
            **({} if self.sends == "gradients" else {"sends": self.sends}),
            "algorithm": self.scheme.name,
            "skipped": self.skipped,
            "steps": self.taken,
            **complete(self.error_state(), self.scheme.keeps, trained),
            "algorithm_state": list(states.items()),
            **self.scheme.state_dict(),
        }

    def own(
        self, state: Mapping[str, Any], shapes: Shapes, *, frozen: Shapes | None = None
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """This rank's part of a state, or of a gathered one, and what `load_state_dict` takes of that; changes nothing.

        Raises TypeError or ValueError for one that does not fit. shapes: of what learns, {} if not known yet.
        """
        state, own = own_state(state, self.comm)
        check_sent(own, self.sends)
        if not self.scheme.selects:
            own = without(own, [kind for kind in ERROR_STATE if kind not in self.scheme.keeps])
        if shapes:
            check_fit(own, shapes, frozen=frozen)
        return state, own

    def load_state_dict(self, own: Mapping[str, Any]) -> None:
        """Goes on from copies of what `own` gave, but for another algorithm's own. ValueError before any change."""
        if own["algorithm"] != self.scheme.name:
            own = {**own, "algorithm_state": []}
        refuse_nonfinite(own)
        error_state = {kind: {name: tensor.clone() for name, tensor in own[kind].items()} for kind in ERROR_STATE}
        states = copy.deepcopy(dict(own["algorithm_state"]))
        self.scheme.load_state_dict(own)
        self.unclaimed, self._states, lanes = error_state, states, list(self._lanes.values())
        self._lanes, self._open, self.flags = {}, [], []
        self.loaded = f" with a state of {own['steps']} steps loaded" if "steps" in own else " with a state loaded"
        self.taken, self.skipped, self._begins = own.get("steps", 0), own.get("skipped", 0), True
        self._skipped = self.skipped
        for lane in lanes:
            self.open(lane.bucket)

    def shared_state(self) -> dict[str, Any]:
        """State that a newcomer to an elastic group goes on from: all but this rank's residuals and velocities."""
        shared = {"residuals": {}, "velocities": {}, "loaded": self.loaded, "selection": self._selection()}
        return {**self.state_dict(), **shared, "begins": self._begins}

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
        self.load_state_dict(state)
        self.loaded, self._begins = state["loaded"], state["begins"]

    def _selection(self) -> str:
        """Compressor and number of entries, as text; "" where nothing is selected, or a schedule says how much."""
        if not self.scheme.selects or self.settings.density is not None:
            return ""
        numel, compressor = sum(shape.numel() for shape in self.shapes.values()), self.settings.compressor
        return f"{type(compressor).__name__}, {compressor.entries(numel)} of {numel} elements"

    def _by_parameter(self, lanes: Iterable[Lane]) -> dict[str, dict[str, Tensor]]:
        """Error state of lanes, by parameter: views."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
        for lane in lanes:
            for kind, flat in lane.error_state().items():
                for member, view in zip(lane.bucket.members, lane.bucket.views(flat), strict=True):
                    found[kind][self.names[member]] = view
        return found

    def _taken(self, bucket: Bucket) -> dict[str, Tensor]:
        """The members' unclaimed residuals and velocities, each as one flat tensor, zeros where there is none."""
        kept = {}
        for kind in self.scheme.keeps:
            found: dict[int, Tensor | None] = {}
            for member, shape in zip(bucket.members, bucket.shapes, strict=True):
                tensor = found[member] = self.unclaimed[kind].pop(self.names[member], None)
                if tensor is not None and tensor.shape != shape:
                    raise ValueError(
                        f"{kind} of {self.names[member]!r}: {tuple(tensor.shape)}, expected {tuple(shape)}"
                    )
            if any(tensor is not None for tensor in found.values()):
                kept[kind] = bucket.gather(found, out=empty_like(bucket))
        return kept


@dataclass(eq=False)
class Mean:
    """A bucket's mean on its way; what was dropped goes back to its lane once, at the first request.

    works: the call that carries it, and one beside it, if any; none: the transport's own sum does, once it is waited
    for. cost: of that sum, as a `Work` has it. lost: error of the start that `wait` raises.
    """

    exchange: Exchange
    lane: Lane
    sending: Sending
    facts: str
    works: list[Work[Checked]] = field(default_factory=list)
    cost: Any = field(default_factory=lambda: SimpleNamespace(began=math.inf, ended=None, bytes_sent=0))
    mean: Tensor | None = None
    lost: CollectiveError | None = None

    def start(self) -> None:
        """Starts the calls.

        An elastic group's failure is an error of `wait`, since backward, which starts them, goes on; so is that of the
        second call, as the first must be waited for.
        """
        comm, device, sending = self.exchange.comm, self.lane.bucket.device, self.sending
        try:
            self.works = [start(self.checked(sending.schedule), comm, facts=self.facts, device=device)]
            if sending.beside is not None:
                facts = f"sum beside {self.facts}"
                self.works.append(start(self.checked(sending.beside), comm, facts=facts, device=device))
        except CollectiveError as error:
            if not comm.elastic and not self.works:
                raise
            self.lost = error

    def wait(self) -> Tensor:
        """The mean. Raises the CollectiveError of the call, or of what is not finite."""
        if self.mean is None:
            exchange = self.exchange
            outcomes = wait_for_all(self.works, self.lost) or [self._summed()]
            for _, error in outcomes:
                if error is not None:
                    raise error
            result, *beside = [result for result, _ in outcomes]
            with tracing.labelled("restore"):
                self.mean, seen = self.lane.receive(self.sending, (result, *beside) if beside else result)
            if exchange.settings.nonfinite == "skip":
                exchange.flags.append((all_finite(seen), all_finite(self.lane.values(result)[1])))
        return self.mean

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future that is over when its calls are."""
        first, *others = self.works
        return first.get_future(*others)

    def checked(self, schedule: Schedule[Any]) -> Schedule[Checked]:
        """The schedule's result and, in the same call, the error that names who gave what is not finite in it.

        Where only what this rank keeps is not finite, the algorithm has hidden that: then all ranks' calls fail.
        """
        result = yield from schedule
        if self.exchange.settings.nonfinite != "raise":
            return result, None
        total, dropped = self.lane.values(result)
        if not bool(all_finite(total)):
            return result, (yield from self._culprit())
        if not bool(all_finite(dropped)):
            raise unlawful(self.facts, self.exchange.comm.rank)
        return result, None

    def _culprit(self) -> Schedule[CollectiveError]:
        exchange = self.exchange
        return culprit(self.sending.suspect(), self.lane.bucket, exchange.names, exchange.comm, exchange.what)

    def _summed(self) -> Checked:
        """The plain sum, by the transport where it has one."""
        comm, device = self.exchange.comm, self.lane.bucket.device
        self.cost.began = comm.clock()
        total = comm.native_allreduce(cast(Tensor, self.sending.summed), facts=self.facts)
        outcome: Checked = total, None
        if total is None:
            work = start(self.checked(self.sending.schedule), comm, facts=self.facts, device=device)
            outcome, self.cost.bytes_sent = work.wait(), work.bytes_sent
        else:
            self.cost.bytes_sent = 2 * total.nbytes * (comm.size - 1) // comm.size  # of the best dense allreduces
            if self.exchange.settings.nonfinite == "raise" and not bool(all_finite(total)):
                outcome = total, run(self._culprit(), comm, facts=f"not finite: {self.facts}", device=device)
        self.cost.ended = comm.clock()
        return outcome


def wait_for_all(begun: Iterable[Any], lost: CollectiveError | None = None) -> list[Any]:
    """All results; raises the first error once all are over, so that none is under way after it.

    begun: each has a `wait()`, as a `Work` has. lost: an error from before.
    """
    found, errors = [], [] if lost is None else [lost]
    for one in begun:
        try:
            found.append(one.wait())
        except CollectiveError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def _plain(value: Any) -> Any:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").tolist()


def _shared_settings(optimizer: Optimizer) -> str:
    """`SHARED` settings of all parameter groups, as a fact, in plain numbers: a tensor's text is rounded."""
    groups = [[(name, group[name]) for name in SHARED if group.get(name)] for group in optimizer.param_groups]
    said = [
        ", ".join(f"{name} {value if isinstance(value, float) else _plain(value)}" for name, value in group)
        for group in groups
    ]
    return f"parameter groups of {'; '.join(said)}"
