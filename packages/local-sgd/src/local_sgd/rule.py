"""Rule of periodic averaging: the state that an algorithm keeps, and its equation at a boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from local_sgd.parts import Part


class Rule:
    """Base class of rules, which are dataclasses; each says what it keeps, and what happens at a boundary.

        @dataclass
        class Halfway(Rule):
            '''x ← z ← (1 − a)·z + a·x̄'''

            a: float = 0.5
            anchors = ("anchor",)

            def boundary(self, part, x, mean):
                return part["anchor"].lerp_(mean, self.a)

    The fields of the dataclass are settings that ranks must share.

    Attributes:
        anchors: Names of state that begins as x, and equals the model once all is drained; the first one is the model.
        momenta: Names of state that begins at zero.
        overlaps: Whether the mean at a boundary is of what the last boundary returned, which travels meanwhile.
        mean_is_model: Whether the model is the mean over ranks, rather than the first anchor.
        needs_rate: Whether parameter groups must have an "lr", whose mean over ranks is `part.rate`.
    """

    anchors: tuple[str, ...] = ()
    momenta: ClassVar[tuple[str, ...]] = ()
    overlaps: ClassVar[bool] = False
    mean_is_model: ClassVar[bool] = False
    needs_rate: ClassVar[bool] = False

    def prepare(self, size: int) -> None:
        """Fills in settings that depend on the number of ranks.

        Args:
            size: Number of ranks.

        Raises:
            ValueError: A setting does not fit that number.
        """

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
        """Factor by which momentum over blocks multiplies a steady change; 0 without such momentum."""
        return 0.0

    def alike(self) -> str:
        """Text that must be the same on all ranks at every exchange, such as an outer optimizer's rates."""
        return ""

    def shared(self) -> dict[str, Any]:
        """Settings that ranks must share, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}  # type: ignore[arg-type]

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
