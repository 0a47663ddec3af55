"""Rule of periodic averaging: the state that an algorithm keeps of each part of a model, and its equation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from communicators import Bucket, check_settings, comparable
from torch import Tensor


@dataclass
class Part:
    """Parameters of one group, dtype and device as one vector x of at least 32 bits an element.

    Attributes:
        names: Names of the parameters.
        tensors: Parameters.
        bucket: Places of the parameters in the vector.
        group: Number of the optimizer's parameter group.
        kept: The rule's state between boundaries, by name; `part["anchor"]` is short for it.
        remainder: Rounding error of x in parameters of fewer bits, which belongs to x; None where there is none.
        weight: Sum over ranks in the mean at this boundary; of ranks that gave one, where they are not weighted.
        rate: The group's learning rate at this boundary; NaN where it has none.
        last_rate: The learning rate at the last boundary.
    """

    names: list[str]
    tensors: list[Tensor]
    bucket: Bucket
    group: int
    kept: dict[str, Tensor] = field(default_factory=dict)
    remainder: Tensor | None = None
    weight: float = 0.0
    rate: float = math.nan
    last_rate: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.kept:
            raise KeyError(
                f"no state {name!r}, but {list(self.kept)}: the rule's anchors and momenta name what it keeps"
            )
        return self.kept[name]

    def gather(self) -> Tensor:
        """Copies x out of the parameters."""
        x = self.bucket.gather(self.tensors)
        return x if self.remainder is None else x.add_(self.remainder)

    def put(self, x: Tensor) -> None:
        """Copies x into the parameters."""
        self.bucket.scatter(x, self.tensors)
        if self.remainder is not None:
            self.remainder = x - self.bucket.gather(self.tensors)

    def draft(self) -> Part:
        """Copies the part with its state, which may then be changed without consequence."""
        return replace(self, kept={name: flat.clone() for name, flat in self.kept.items()})

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector, by parameter."""
        return dict(zip(self.names, self.bucket.views(flat), strict=True))

    def flat_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Vector of tensors by parameter; the others are left aside."""
        return self.bucket.gather([tensors[name] for name in self.names])


class Rule:
    """Base class of rules, which are dataclasses; each says what it keeps, and what happens at a boundary.

        @dataclass
        class Halfway(Rule):
            '''x ← z ← (1 − a)·z + a·x̄'''

            a: float = 0.5
            anchors = ("anchor",)

            def boundary(self, part, x, mean):
                return part["anchor"].lerp_(mean, self.a)

    The fields of the dataclass are settings that ranks must share. State is in anchors and momenta: what a boundary
    keeps on self is not saved. `local_sgd.testing.check_rule_laws` checks a rule.

    Attributes:
        anchors: Names of state that begins as x, and equals the model once all is drained. The first one is the model:
            `finish` puts it in place, so that a rule that does not move it loses the training.
        momenta: Names of state that begins at zero.
        own: Those names of state of which every rank has its own; the others are compared with `verify`.
        overlaps: Whether the mean at a boundary is of what the last boundary returned, which travels meanwhile.
        mean_is_model: Whether the model is the mean over ranks, rather than the first anchor; anchors may be left out.
        needs_rate: Whether parameter groups must have an "lr", whose mean over ranks, at the last step, is `part.rate`.
        defaults: Settings that `prepare` filled in, as they were before.
    """

    anchors: tuple[str, ...] = ()
    momenta: ClassVar[tuple[str, ...]] = ()
    own: ClassVar[tuple[str, ...]] = ()
    overlaps: ClassVar[bool] = False
    mean_is_model: ClassVar[bool] = False
    needs_rate: ClassVar[bool] = False
    defaults: Mapping[str, Any] = MappingProxyType({})

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of all state of a part."""
        return self.anchors + self.momenta

    @property
    def shared_names(self) -> list[str]:
        """Names of state that is the same on all ranks after the same boundaries."""
        return [name for name in self.kept if name not in self.own]

    def prepare(self, size: int) -> None:
        """Fills in settings that depend on the number of ranks.

        Args:
            size: Number of ranks.

        Raises:
            ValueError: A setting does not fit that number.
        """

    def fit(self, size: int) -> None:
        """Prepares for a number of ranks, at first and whenever it changes: what was given stays, defaults are new.

        Args:
            size: Number of ranks.
        """
        vars(self).update(self.defaults)
        before = {one.name: getattr(self, one.name) for one in fields(self) if one.init}  # type: ignore[arg-type]
        self.prepare(size)
        self.defaults = {name: value for name, value in before.items() if getattr(self, name) is not value}

    def begin(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        """Starts whatever the rule keeps beside anchors and momenta, which are in the parts already.

        Args:
            parts: All parameters that are exchanged together.
            names: Their names, in the model's order.
        """

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Applies the equation to some of the parameters; updates the state in `part`, and may change x.

        Args:
            part: Some of the parameters, flat, with the rule's state of them.
            x: This rank's parameters, a copy.
            mean: Mean over ranks of x or, where the rule overlaps, of what the last boundary returned.

        Returns:
            x after the boundary; it may be state of `part` too, because it is copied.
        """
        raise NotImplementedError(f"{type(self).__name__} has no boundary()")

    def apply(self, parts: Sequence[Part], xs: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
        """Applies `boundary` to all parts; for rules that must see all of them before any can go on.

        Args:
            parts: All parameters that are exchanged together.
            xs: This rank's, copies.
            means: Their means.

        Returns:
            x after the boundary, of each part.
        """
        return [self.boundary(*each) for each in zip(parts, xs, means, strict=True)]

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Replaces `boundary` of an overlapping rule where no mean comes: at the beginning and after a drain.

        Args:
            part: Some of the parameters, as in `boundary`.
            x: This rank's parameters, a copy.

        Returns:
            x after the boundary.
        """
        del part
        return x

    def gain(self) -> float:
        """Factor by which momentum over blocks multiplies a steady change; 0 without such momentum, NaN if unknown.

        Unless it is 0 no `boundary` follows at the end on a block that no rank has completed: the mean is the model.
        """
        return 0.0

    def alike(self) -> str:
        """Text that must be the same on all ranks at every exchange, such as an outer optimizer's rates."""
        return ""

    def shared(self) -> dict[str, Any]:
        """Settings that ranks must share, by name."""
        return {one.name: comparable(getattr(self, one.name)) for one in fields(self) if one.repr}  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """State beside anchors and momenta, by names of its own."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks a saved state, and changes nothing.

        Args:
            state: Result of `state_dict`, among other keys.

        Raises:
            ValueError: The state does not fit.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted.

        Args:
            state: Result of `state_dict`, among other keys.
        """


def check_rule(rule: Any) -> None:
    """Raises TypeError for what is no rule, no dataclass, or has no proper names of state."""
    if not isinstance(rule, Rule):
        remedy = f": give {rule.__name__}()" if isinstance(rule, type) else ", such as a dataclass that is one"
        raise TypeError(f"rule is {rule!r}, expected an instance of a Rule{remedy}")
    if is_dataclass(rule):
        check_settings(type(rule), Rule, dataclass="@dataclass")
    names = {"anchors": rule.anchors, "momenta": rule.momenta, "own": rule.own}
    wrong = [f"{name} = {held!r}" for name, held in names.items() if not isinstance(held, tuple)]
    faults = {
        "is no dataclass: put @dataclass above it, so that ranks compare its settings": not is_dataclass(rule),
        f"has {', '.join(wrong)}, expected tuples of names, such as ('anchor',)": wrong,
        "has no anchors, of which the first one is the model: give anchors = ('anchor',), which boundary() moves; or "
        "mean_is_model = True where the mean over ranks is the model": not rule.anchors and not rule.mean_is_model,
        f"has one name twice in its anchors and momenta, {names}": not wrong and len(set(rule.kept)) < len(rule.kept),
        f"has own = {rule.own}, expected some of its anchors and momenta": not wrong and {*rule.own} - {*rule.kept},
    }
    if said := [fault for fault, found in faults.items() if found]:
        raise TypeError(f"{type(rule).__name__} {said[0]}")
