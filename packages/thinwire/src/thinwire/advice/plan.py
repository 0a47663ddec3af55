"""The advice in Python: a plan that says why, and does what it says."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
from communicators import Communicator, Link, as_communicator
from data_parallel import SparseHookState, UpdateOptimizer
from replicas import MuonAdamW
from sparse_collectives import Prediction
from sparse_compress import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.advice.accuracy import DATA, data_of
from thinwire.advice.measuring import Trained, device_of, find_out, join, on_every_rank, other_dtype, shapeless, told
from thinwire.advice.recommendation import OPTIMIZERS, Recommendation, recommend
from thinwire.advice.report import as_text
from thinwire.advice.situation import DENSITIES, LINKS, MOST_RANKS, Situation
from thinwire.advice.stragglers import Stragglers
from thinwire.advice.ways import DENSE, MADE, Way

Model = TypeVar("Model", bound=nn.Module)
USUAL_STEPS = 1000
ADAPTED = "rate_adapted_to"
"""Key of groups whose learning rate `apply` has adapted to a way, which is in their checkpoints too."""
UNADAPTED = (
    "the state that was loaded is of a training whose learning rate was not adapted by apply(), and has set it back: "
    "{name} takes {rate:g} of that of a training without it; multiply that of the groups by {rate:g}, before a "
    "scheduler is made"
)
FSDP = {"FSDPModule", "FullyShardedDataParallel"}
"""Names of their classes, which take seconds to import: fully_shard's, and the older one."""
KINDS = ((MuonAdamW, "muon"), (AdamW, "adamw"), (Adam, "adam"), (SGD, "sgd"))


def advise(
    model: nn.Module,
    *,
    steps_per_second: float,
    optimizer: str | Optimizer = "sgd",
    link: str | Link | None = None,
    ranks: int | None = None,
    density: float | Iterable[float] | None = None,
    overlap: bool | None = None,
    stragglers: Mapping[float, float] | Sequence[float] | None = None,
    data: str | None = None,
    comm: Any = None,
) -> Plan:
    """Predicts training with every way to exchange, recommends one: in seconds, or minutes to measure a slow link.

        print(plan := thinwire.advise(model, steps_per_second=4, optimizer="adamw", link="100mbit", ranks=8))
        model, optimizer = plan.apply(model, optimizer, steps=10_000)

    Args:
        model: Its parameters' shapes and device count; not in FSDP. torch's own ways are advised only in DDP.
        steps_per_second: Of one rank that trains alone.
        optimizer: "sgd", "adam", "adamw" or "muon", or the SGD, Adam, AdamW or MuonAdamW with which you train.
        link: A name that `thinwire advise --help` lists, or a `communicators.Link`; default: measured, by all ranks.
        ranks: With `link`: how many there will be.
        density: One or several that are considered; yours are advised if faster, even if they are known to learn worse.
        overlap: Whether gradients travel during backward, without DDP by the optimizer's `overlap`; default: in DDP.
        stragglers: How late ranks are: {seconds: share of each rank's steps}, such as {0.3: 0.05}, alike on all; or a
            list of seconds of this rank's steps without exchanges, whose fastest of all ranks sets `steps_per_second`.
        data: Trainings that judge ways: "text", "text/recurrent", … (as `--data`), "" for all; default: by the layers.
        comm: Without `link`, the ranks: see `communicators.as_communicator`.

    Raises:
        ValueError, TypeError: An argument makes no sense, or the model is in FSDP, or ranks differ in it.
        NoAdvice: There is but one rank, and no link.
    """
    _check_model(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    name, densities, kind = _named(optimizer), _densities(density), data_of(model) if data is None else data
    if wrong := _wrong(model, steps_per_second, link, ranks, overlap) or _unfit(name, density, kind):
        raise ValueError(wrong)
    assumed = LINKS[link] if isinstance(link, str) else link
    shapes, ddp = [p.shape for p in trained], _in_ddp(model) is not None
    asked: dict[str, Any] = {"optimizer": name, "data": kind, "overlap": ddp if overlap is None else bool(overlap)}
    alike = {**asked, "density": densities, "model": _size(shapes, ddp=ddp)}
    late, times = _late_of_all(stragglers, alike, comm := join(assumed, comm))
    situation = find_out(
        Trained.of(shapes, 1 / steps_per_second)._replace(times=times),
        comm,
        lambda _: None,
        device=device_of(str(trained[0].device), comm),
        ranks=ranks or comm.size,
        densities=densities,
        link=assumed,
        link_name=link if isinstance(link, str) else "given",
        stragglers=late,
        chosen=density is not None,
        plain=not ddp,
        **asked,
    )
    return Plan(situation, recommend(situation))


@dataclass(frozen=True)
class Plan:
    """Advice, as text by `print(plan)`.

    Attributes:
        situation: What was asked and measured, with all `predictions()`.
        recommendation: The way that is recommended, why, and what comes next.
    """

    situation: Situation
    recommendation: Recommendation

    def __str__(self) -> str:
        return as_text(self.situation)

    def apply(
        self, model: Model, optimizer: Optimizer, *, steps: int | None = None, comm: Any = None, scheduler: Any = None
    ) -> tuple[Model, Optimizer]:
        """Does what it says; collective over the ranks. Returns the model as it was given, and the optimizer to step.

        In a DDP module its hook is registered, where the way has one. The training loop stays as it is, but for what
        the text says: most ways that average models want `optimizer.average()` after each step and `finish()` at the
        end, torch's an average of the parameters before an evaluation, eager SGD `finish()`.

        Args:
            model: The module, or DDP of it.
            optimizer: Over its parameters, of the kind that was asked about; its settings are adapted as the text says.
            steps: Of the whole training, for the warm-up; default 1,000. Rank 0's count, where ranks have unlike ones.
            comm: See `communicators.as_communicator`.
            scheduler: Of the optimizer, for eager SGD alone, which steps it itself: then the loop must not.

        All ranks do what rank 0's plan says, with its steps; a rank that gave others warns. Make other learning-rate
        schedulers, and load checkpoints, afterwards; one of a training without the plan sets an adapted rate back, with
        a warning: load it into the plain optimizer before. In DDP the residuals are in no checkpoint: to save them,
        write the line that the plan prints, in which `state` is what has them, or of torch's hooks the first argument.

        Raises:
            ValueError: Another optimizer or number of ranks than was asked about (one rank may try any plan), or DDP,
                which has sent the gradients before a way gets them; a hook of DDP without DDP, as where the advice was
                for a model in DDP; torch's PowerSGD over gloo in more than one bucket (the text has the size); other
                `steps`; an optimizer whose rate was adapted already, or may be set back by its scheduler; a scheduler
                for a way that does not step it, or none for eager SGD where the optimizer has one; or a model that is
                in FSDP, or holds DDP inside.
        """
        _check_model(model)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
            raise ValueError(f"steps is {steps!r}, expected a whole number of 0 or more, or None for {USUAL_STEPS:,}")
        if adapted := [group[ADAPTED] for group in optimizer.param_groups if ADAPTED in group]:
            raise ValueError(
                f"the learning rate is adapted to {adapted[0]} already: give an optimizer that was made anew, and load "
                "the checkpoint after apply()"
            )
        ranks = as_communicator(comm)
        if ranks.size not in (1, self.situation.ranks):
            raise ValueError(
                f"the advice is for {self.situation.ranks} ranks, but this is one of {ranks.size}: ask anew"
            )
        if _named(optimizer) != self.situation.optimizer:
            raise ValueError(f"the advice is for {self.situation.optimizer}, but this is {type(optimizer).__name__}")
        (p, total), ddp = self._of_rank_0(ranks, USUAL_STEPS if steps is None else steps), _in_ddp(model)
        if scheduler is not None and not (p.name in MADE and MADE[p.name].quorum):
            raise ValueError(f"{p.name} leaves the scheduler to the training loop: step it there, and do not give it")
        if p.name == DENSE.name and ddp is not None:  # which sums them itself
            return model, optimizer
        if p.name in MADE:
            return model, self._other(MADE[p.name], model, optimizer, total, comm, scheduler)
        settings: dict[str, Any] = {"algorithm": p.algorithm, "wire": p.wire, "density": p.density, "steps": total}
        settings["options"] = {name: o for name, o in p.options.items() if name != "teams" or ranks.size > 1} or None
        if ddp is not None and not self.situation.sends_updates:
            SparseHookState.for_model(ddp, optimizer, **settings)
            return model, optimizer
        if ddp is not None and self.situation.plain:
            raise ValueError("the advice is for a plain module: give the module itself, or ask anew for it in DDP")
        _refuse_ddp(ddp, p.name)
        return model, UpdateOptimizer.for_model(optimizer, model, comm=comm, **settings)

    def _of_rank_0(self, comm: Communicator, steps: int) -> tuple[Prediction, int]:
        """Exchange and steps of rank 0: other ranks may have measured otherwise, or have more batches."""
        own = self.recommendation.step.prediction
        said = {name: getattr(own, name) for name in ("algorithm", "options", "density", "wire")}
        first, total = told([said, steps], comm)[0]
        if total != steps:
            warnings.warn(
                f"steps is {steps:,}, but {total:,} on rank 0: all ranks warm up as in a training of {total:,}, so "
                "give all the same",
                stacklevel=3,
            )
        return replace(own, **first), total

    def _other(
        self, way: Way, model: nn.Module, optimizer: Optimizer, steps: int, comm: Any, scheduler: Any
    ) -> Optimizer:
        """A way that selects nothing."""
        ddp = _in_ddp(model)
        if ddp is not None and way.in_ddp is not None:
            return way.in_ddp(ddp, optimizer, steps)
        _refuse_ddp(ddp, way.name)
        if way.ddp_only:
            raise ValueError(f"{way.name} is a hook of DDP: give DistributedDataParallel(model), not the module itself")
        adapts = way.rate != 1 and self.situation.optimizer != "muon"
        if adapts and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"{way.name} takes {way.rate:g} of the learning rate, which a scheduler that was made before may set "
                "back: give an optimizer that was made anew, and make its scheduler after apply()"
            )
        if way.quorum and scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"{way.name} steps the learning-rate scheduler itself: give it as apply(…, scheduler=…), and do not "
                "step it"
            )
        more = {"scheduler": scheduler} if way.quorum else {"overlap": True} if self.situation.overlaps(way) else {}
        made = way.make(optimizer, model, comm, steps=steps, every=way.every, **more)
        if adapts:
            for group in optimizer.param_groups:
                group[ADAPTED] = way.name
                for rate in {"lr", "initial_lr"} & group.keys():
                    group[rate] = group[rate] * way.rate
            optimizer.register_load_state_dict_post_hook(partial(_tell_of_rates, way=way))
        return made


def _tell_of_rates(optimizer: Optimizer, way: Way) -> None:
    if any(ADAPTED not in group for group in optimizer.param_groups):
        warnings.warn(UNADAPTED.format(name=way.name, rate=way.rate), stacklevel=5)


def _densities(density: float | Iterable[float] | None) -> list[float]:
    """Densities that are considered, densest first. Raises TypeError or ValueError."""
    usual = DENSITIES if density is None else density
    given = list(usual) if isinstance(usual, Iterable) and not isinstance(usual, str) else [usual]
    if not given:
        raise ValueError(f"density is {density!r}, expected a number, or several: leave it out for the usual ones")
    expected = "a number above 0 and below 1, at which nothing is selected, or several"
    checked = {arguments.number(each, "density", expected, lambda share: 0 < share < 1) for each in given}
    return sorted(checked, reverse=True)


def _wrong(model: nn.Module, speed: float, link: str | Link | None, ranks: int | None, overlap: bool | None) -> str:
    """Reason why these arguments of `advise` make no sense; "" if they do. Raises TypeError or ValueError."""
    expected = "a number above 0 and finite, as the seconds of a step"
    arguments.number(speed, "steps_per_second", expected, lambda given: given > 0 and 0 < 1 / given < math.inf)
    if overlap not in (None, True, False):
        raise TypeError(f"overlap is {overlap!r} ({type(overlap).__name__}), expected True, False, or None")
    if link is not None and not isinstance(link, Link) and link not in LINKS:
        own = "a Link(alpha, beta) of seconds per message and per byte (1 Gbit/s is 8e-9)"
        return f"link is {link!r}, expected {own}, None, or one of {', '.join(LINKS)}"
    if (link is None) != (ranks is None):
        return "ranks goes with link: both of an assumed network, or neither where ranks are running"
    if ranks is not None and not (isinstance(ranks, int) and 2 <= ranks <= MOST_RANKS):
        return f"ranks is {ranks!r}, expected a whole number of 2 to {MOST_RANKS:,}: one exchanges nothing"
    if not any(p.numel() for p in model.parameters() if p.requires_grad):
        return "no parameter of the model requires a gradient"
    return other_dtype(model)


Late = Mapping[float, float] | Sequence[float] | None


def _late_of_all(
    stragglers: Late, alike: Mapping[str, Any], comm: Communicator
) -> tuple[Stragglers | None, tuple[float, ...]]:
    """Late ranks as all were told, or seconds of this rank's steps. Collective; raises ValueError on all ranks.

    alike: what else all must be told.
    """
    late, times = on_every_rank(lambda: _late(stragglers), comm, ValueError)
    own = {name: str(value) for name, value in alike.items()} | {"stragglers": "seconds of steps" if times else "None"}
    if late is not None:
        own["stragglers"] = str({by: share for by, share in sorted(late.by_rank[0].items()) if by})
    found = told(own, comm)
    for rank, each in enumerate(found):
        if what := next((name for name in own if each[name] != found[0][name]), None):
            same = "the same mapping, or each a list of its own steps' seconds" if what == "stragglers" else "the same"
            differ = f"ranks 0 and {rank} differ in {what}: {found[0][what]}, and {each[what]}"
            raise ValueError(f"{differ}; give all ranks {same}")
    return late, times


def _size(shapes: Sequence[torch.Size], *, ddp: bool) -> str:
    """Tensors and elements that are trained, with a checksum of their shapes, and whether in DDP."""
    checksum = zlib.crc32(str([tuple(shape) for shape in shapes]).encode())
    numel = sum(shape.numel() for shape in shapes)
    return f"{len(shapes)} tensors, {numel:,} elements, shapes {checksum:08x}{', in DDP' * ddp}"


def _late(stragglers: Late) -> tuple[Stragglers | None, tuple[float, ...]]:
    """Late ranks as told, or seconds of this rank's steps. Raises ValueError."""
    if stragglers is None:
        return None, ()
    if isinstance(stragglers, Mapping):
        return Stragglers.told(stragglers), ()
    times = tuple(stragglers) if isinstance(stragglers, Sequence) else ()
    if len(times) < 2 or not all(isinstance(seconds, Real) and 0 < seconds < math.inf for seconds in times):
        what = f": give tolist() of this {type(stragglers).__name__}" if hasattr(stragglers, "tolist") else ""
        raise ValueError(
            f"stragglers is {stragglers!r}, expected {{seconds late: share of the steps}}, or a list of seconds above "
            f"0 of 2 or more steps of this rank{what}"
        )
    return None, tuple(map(float, times))


def _unfit(optimizer: str, density: object, data: str) -> str:
    """Complaint about a density without a selection, or other data than are on record; "" if there is none."""
    if density is not None and optimizer == "muon":
        return "density is of a selection, and nothing is selected for muon: leave it out"
    known = ", ".join(map(repr, DATA[:-1]))
    return "" if data in DATA else f"data is {data!r}, expected {known}, or '' for all"


def _named(optimizer: str | Optimizer) -> str:
    name = (
        optimizer if isinstance(optimizer, str) else next((n for kind, n in KINDS if isinstance(optimizer, kind)), None)
    )
    if name not in OPTIMIZERS:
        given = repr(optimizer) if isinstance(optimizer, str | type) else type(optimizer).__name__
        raise ValueError(
            f"optimizer is {given}, expected {', '.join(OPTIMIZERS)}, or an SGD, Adam or AdamW of torch, or a "
            "replicas.MuonAdamW: how others learn was not measured"
        )
    return name


def _in_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module that this is, compiled or not."""
    whole = getattr(model, "_orig_mod", model)  # torch.compile's
    return whole if isinstance(whole, DistributedDataParallel) else None


def _check_model(model: nn.Module) -> None:
    """Raises TypeError for anything but a module, ValueError for one of which nothing can be measured or exchanged."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r:.80}, expected a torch.nn.Module that is trained, or DDP of it")
    if said := shapeless(model):
        raise ValueError(said)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device, where nothing can be measured: make it where it is trained")
    for name, module in model.named_modules():
        if FSDP & {kind.__name__ for kind in type(module).__mro__}:
            raise ValueError(
                "the model is in FSDP, of which each rank holds but a part: what fully_shard shards inside a node "
                "data_parallel.sparse_hsdp exchanges between nodes (docs/guides/hsdp.md); otherwise leave FSDP off"
            )
        if isinstance(module, DistributedDataParallel) and module is not _in_ddp(model):
            raise ValueError(f"the model holds DistributedDataParallel, as {name}: give that module itself")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            which = name or "the model"
            raise ValueError(f"{which} gives sparse gradients, which are not exchanged: take sparse=False")


def _refuse_ddp(ddp: DistributedDataParallel | None, name: str) -> None:
    if ddp is not None:
        raise ValueError(f"{name} exchanges after backward, where DDP has sent whole gradients: give the module itself")
