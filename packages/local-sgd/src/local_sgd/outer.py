"""Rule of an outer optimizer, whose gradient is the change of a block."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from replicas import check_like, check_loaded, load_into, saved_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from local_sgd.rule import Part, Rule
from local_sgd.two_momenta import sgd_momentum

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler: TypeAlias = Callable[[Optimizer], LRScheduler]

NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class OuterStep(Rule):
    """Rule of `DiLoCo`: one step of an optimizer over the anchors z, with Δ = z − x̄ as their gradient.

    It has one parameter for each of the model's, in its shape and the model's order.

    make: makes it, such as `functools.partial(torch.optim.SGD, lr=0.7)`.
    schedule: makes a scheduler of its rate, which steps after each outer step; None: there is none.
    outer, scheduler: both, once made.
    """

    make: MakeOptimizer = field(repr=False)
    schedule: MakeScheduler | None = field(repr=False)
    outer: Optimizer = field(init=False, repr=False)
    scheduler: LRScheduler | None = field(init=False, repr=False)
    anchors = ("anchor",)

    def begin(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        """Makes the outer optimizer over the anchors."""
        views = {name: view for part in parts for name, view in part.by_name(part["anchor"]).items()}
        self._parameters = {name: nn.Parameter(views[name]) for name in names if name in views}
        given = list(self._parameters.values())
        self.outer = _checked(self.make(given) if callable(self.make) else self.make, self._parameters)
        self.scheduler = self.schedule(self.outer) if callable(self.schedule) else None
        if self.schedule is not None and not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(
                f"outer_scheduler is {self.schedule!r}, expected what makes a scheduler of the optimizer given to it"
            )
        self._steps = 0

    def apply(self, parts: Sequence[Part], xs: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
        """Steps with Δ = z − x̄, and takes z."""
        self.step(parts, [part["anchor"] - mean for part, mean in zip(parts, means, strict=True)])
        return [self.taken(x, part["anchor"]) for x, part in zip(xs, parts, strict=True)]

    def taken(self, x: Tensor, z: Tensor) -> Tensor:
        """x after the outer step; may be written into."""
        del x
        return z

    def step(self, parts: Sequence[Part], deltas: Sequence[Tensor]) -> None:
        """Steps the optimizer with Δ as the gradient of each part's anchor, then the scheduler."""
        for part, delta in zip(parts, deltas, strict=True):
            for name, view in part.by_name(delta).items():
                self._parameters[name].grad = view
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self._steps += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def gain(self) -> float:
        """Factor by which SGD's momentum multiplies a steady change, its rate included; 0 without momentum.

        NaN for other optimizers, such as Adam, whose steps are not in proportion to the change.
        """
        groups = self.outer.param_groups
        if not all("dampening" in group and (sgd_momentum(group) or not group.get("momentum")) for group in groups):
            return math.nan
        momenta = [(float(group["lr"]), sgd_momentum(group)) for group in groups]
        return max((rate / (1 - momentum) for rate, momentum in momenta if momentum), default=0.0)

    def alike(self) -> str:
        """Outer optimizer's settings and rates, which ranks must share at every outer step."""
        schedule = "" if self.scheduler is None else f", {type(self.scheduler).__name__}"
        return f", outer optimizer {' '.join(str(self.outer).split())}{schedule}"

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer by parameter, whatever the cut into vectors."""
        state, held = saved_optimizer(self.outer, stepped=self._steps > 0)
        schedule = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {"outer": {"state": state, "held": held, "steps": self._steps, **schedule}}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        state = state["outer"]
        check_like(state, {"state": {"state": {}, "param_groups": [{"params": []}]}, "steps": 0}, "outer")
        if ("scheduler" in state) != (self.scheduler is not None):
            raise ValueError(
                f"the state is of an outer optimizer with{'' if 'scheduler' in state else 'out'} a scheduler"
            )
        theirs = [len(group["params"]) for group in state["state"]["param_groups"]]
        own = [len(group["params"]) for group in self.outer.param_groups]
        if theirs != own:
            raise ValueError(f"the state's outer optimizer has groups of {theirs} parameters, this one of {own}")
        check_loaded(state["state"], state["held"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        state = state["outer"]
        load_into(self.outer, check_loaded(state["state"], state["held"]))
        if self.scheduler is not None:
            load_into(self.scheduler, state["scheduler"])
        self._steps = state["steps"]


def _checked(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"outer is or makes {type(optimizer).__name__}, expected a torch.optim.Optimizer over the parameters "
            "given to it, such as functools.partial(torch.optim.SGD, lr=0.7) makes"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if lacking := [name for name, p in parameters.items() if id(p) not in held]:
        raise ValueError(f"the outer optimizer lacks {lacking}: outer makes it over all parameters given to it")
    return optimizer
