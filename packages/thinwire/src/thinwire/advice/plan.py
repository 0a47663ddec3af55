"""The advice in Python: a plan that says why, and does what it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from communicators import Link
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer
from replicas import MuonAdamW
from sparse_compress import WarmUp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.advice.measuring import Trained, device_of, find_out, join
from thinwire.advice.recommendation import OPTIMIZERS, Recommendation, recommend
from thinwire.advice.report import as_text
from thinwire.advice.situation import DENSITIES, LINKS, Situation
from thinwire.advice.ways import BY_NAME

KINDS = ((MuonAdamW, "muon"), (AdamW, "adamw"), (Adam, "adam"), (SGD, "sgd"))


def advise(
    model: nn.Module,
    *,
    steps_per_second: float,
    optimizer: str | Optimizer,
    link: str | Link | None = None,
    ranks: int | None = None,
    density: float | Iterable[float] | None = None,
    overlap: bool = False,
) -> Plan:
    """Predicts training this model with every way to exchange, and recommends one. Takes seconds.

        plan = thinwire.advise(model, steps_per_second=4, optimizer="adamw", link="100mbit", ranks=8)
        print(plan)
        model, optimizer = plan.apply(model, optimizer, steps=10_000)

    Args:
        model: Its trained parameters' shapes and device count.
        steps_per_second: Of one rank that trains alone.
        optimizer: "sgd", "adam", "adamw" or "muon", or one of these, with which you train.
        link: A name of those that `thinwire advise --help` lists, or a `communicators.Link`; default: what the ranks
            that run this are joined by is measured, which is collective.
        ranks: With `link`: how many there will be.
        density: One or several that are to be considered; yours are advised even if they are known to learn worse.
        overlap: Whether gradients travel during backward, as in DDP.

    Raises:
        ValueError: An argument makes no sense.
        NoAdvice: There is but one rank, and no link.
    """
    name = _named(optimizer)
    if not steps_per_second > 0:
        raise ValueError(f"steps_per_second is {steps_per_second}, expected above 0")
    if link is not None and not isinstance(link, Link) and link not in LINKS:
        raise ValueError(f"link is {link!r}, expected a Link(alpha, beta), None, or one of {', '.join(LINKS)}")
    if (link is None) != (ranks is None):
        raise ValueError("ranks goes with link: both of an assumed network, or neither where ranks are running")
    if ranks is not None and ranks < 2:
        raise ValueError(f"ranks is {ranks}, expected 2 or more: one exchanges nothing")
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient")
    assumed = LINKS[link] if isinstance(link, str) else link
    comm = join(assumed)
    densities = sorted({density} if isinstance(density, float | int) else set(density or DENSITIES), reverse=True)
    if wrong := [each for each in densities if not 0 < each <= 1]:
        raise ValueError(f"density is {wrong[0]}, expected above 0, and 1 at most")
    situation = find_out(
        Trained.of([p.shape for p in trained], 1 / steps_per_second),
        comm,
        lambda _: None,
        device=device_of(str(trained[0].device), comm),
        ranks=ranks or comm.size,
        densities=densities,
        link=assumed,
        link_name=link if isinstance(link, str) else "given",
        overlap=overlap,
        optimizer=name,
        chosen=density is not None,
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
        self, model: nn.Module, optimizer: Optimizer, *, steps: int, comm: Any = None
    ) -> tuple[nn.Module, Optimizer]:
        """Does what it says; collective over the ranks. Returns the model as it was given, and the optimizer to step.

        In a DDP module its hook is registered, where the way has one. The training loop stays as it is, but for ways
        that average models: `optimizer.average()` after each step, as the text says.

        Args:
            model: The module, or DDP of it.
            optimizer: Over its parameters, of the kind that was asked about; its settings are adapted as the text says.
            steps: Of the whole training, for the warm-up.
            comm: See `communicators.as_communicator`.

        Raises:
            ValueError: Another optimizer than was asked about, or DDP, which has sent the gradients before a way gets
                them.
        """
        if _named(optimizer) != self.situation.optimizer:
            raise ValueError(f"the advice is for {self.situation.optimizer}, but this is {type(optimizer).__name__}")
        p, ddp = self.recommendation.step.prediction, _in_ddp(model)
        if p.variant in BY_NAME:
            return model, self._other(model, optimizer, steps, comm)
        if p.algorithm == "dense":
            if ddp is None:
                named: Any = {"algorithm": "dense", "wire": p.wire}
                return model, DistributedOptimizer(optimizer, model.named_parameters(), comm=comm, **named)
            if p.wire == "bf16":
                SparseHookState.for_model(ddp, optimizer, algorithm="dense", wire="bf16")
            return model, optimizer
        settings: dict[str, Any] = {"algorithm": p.algorithm, "wire": p.wire}
        settings |= {"options": dict(p.options)} if p.options else {}
        if self.situation.sends_updates:
            _refuse_ddp(ddp, p.name)
            given: dict[str, Any] = {"steps": steps, "density": p.density, "comm": comm}
            return model, UpdateOptimizer.for_model(optimizer, model, **given, **settings)
        if ddp is not None:
            SparseHookState.for_model(ddp, optimizer, steps=steps, density=p.density, **settings)
            return model, optimizer
        settings |= {"density": WarmUp.recommended(p.density, steps), "momentum": _taken_momentum(optimizer)}
        return model, DistributedOptimizer(optimizer, model.named_parameters(), comm=comm, **settings)

    def _other(self, model: nn.Module, optimizer: Optimizer, steps: int, comm: Any) -> Optimizer:
        """A way that selects nothing."""
        way, ddp = BY_NAME[self.recommendation.step.prediction.variant], _in_ddp(model)
        if ddp is not None and way.settings is not None:
            SparseHookState.for_model(ddp, optimizer, **way.settings(steps))
            return optimizer
        _refuse_ddp(ddp, way.name)
        if way.rate != 1 and self.situation.optimizer != "muon":
            for group in optimizer.param_groups:
                group["lr"] *= way.rate
        return way.make(optimizer, model, comm, steps=steps, every=way.every)


def _named(optimizer: str | Optimizer) -> str:
    name = optimizer if isinstance(optimizer, str) else next((n for kind, n in KINDS if type(optimizer) is kind), None)
    if name not in OPTIMIZERS:
        given = repr(optimizer) if isinstance(optimizer, str) else type(optimizer).__name__
        raise ValueError(f"optimizer is {given}, expected {', '.join(OPTIMIZERS)}, or torch's of that name")
    return name


def _in_ddp(model: nn.Module) -> DistributedDataParallel | None:
    return model if isinstance(model, DistributedDataParallel) else None


def _refuse_ddp(ddp: DistributedDataParallel | None, name: str) -> None:
    if ddp is not None:
        raise ValueError(f"{name} exchanges after backward, where DDP has sent whole gradients: give the module itself")


def _taken_momentum(optimizer: Optimizer) -> float:
    """SGD's momentum, which goes before the selection, and then is 0 in the optimizer."""
    momentum: float = max(group["momentum"] for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    return momentum
