"""An algorithm as the rest of the package sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, TypeAlias

import numpy as np
from communicators.schedule import Schedule
from numpy.typing import NDArray
from sparse_compress import SparseVector
from torch import Tensor

from sparse_collectives.prediction.traffic import Traffic
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State

Array: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the rest of the package asks of an algorithm, one of ours or one's own (see CONTRIBUTING).

    Attributes:
        schedule: (sparse, rank, size, k) -> Schedule[Reduction], with sparse of exactly min(k, n) entries; one that has
            `initial_state` takes `state=` too, and one that takes `cost=`, seconds to merge so many entries, yields
            them as `Elapse`, so that a simulated world charges them where they arise: ranks that wait for a merge wait
            then.
        sent: (rank, size, k, numel, dtype) -> Traffic of a call without a state: the exact expression, or, where
            `exact` is False because it depends on what the ranks hold, the most that it can be.
        select: Where the algorithm prescribes what is sent, (like, rank, size, k, state) -> the selection of the next
            call, a function from what has accumulated, 1-D, to a SparseVector; like: a tensor of the gradient's numel
            and dtype. Neither changes the state.
        initial_state: The state before the first call, where there is one.
        check_state: Raises a ValueError for a dict that is no state of it.
        compresses: Whether a gradient is selected from before it is sent, and so leaves a residual; always so in one's
            own. Schedule, sent and typical then take `wire=`, how vectors travel, where that is not as they are.
            Without it, a call or a training with another wire than "fp32" is refused.
        merged: (rank, size, k, numel) -> entries that the rank merges, as `schedule` tells its `cost`; typically, where
            that depends on the data.
        options: Its own settings, with their defaults, whose types they have; schedule, sent and select take them as
            keywords.
        check: (size, **options); raises a ValueError for settings that do not fit.
        variants: (size) -> the settings among which predictions look for the best; default: none but the defaults.
        typical: Where that is something else than `sent`, what a call in the midst of training sends if every rank
            selects at random; predictions are based on it.
        exact: Whether `sent` is what a call sends, not only its bound.
        name: What facts, errors and checkpoints call it; default: the key in `ALGORITHMS`, else the schedule's own
            name.
        reference: (inputs, k, **options) -> total, in NumPy: what a first call returns of every rank's input, dense and
            in rank order, step by step and without any message, bit for bit; for tests.
    """

    schedule: Callable[..., Schedule[Reduction]]
    sent: Callable[..., Traffic]
    select: Callable[..., Callable[[Tensor], SparseVector]] | None = None
    initial_state: Callable[[], State] | None = None
    check_state: Callable[[State], None] | None = None
    compresses: bool = True
    merged: Callable[..., int] | None = None
    typical: Callable[..., Traffic] | None = None
    exact: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[..., None] | None = None
    variants: Callable[[int], Sequence[Mapping[str, Any]]] = lambda size: [{}]
    name: str = ""
    reference: Callable[..., Array] | None = None

    @property
    def settings(self) -> list[str]:
        """The options as text, which all ranks must share."""
        return [f"{key}={value}" for key, value in self.options.items()]

    @property
    def takes_wire(self) -> bool:
        """Whether its schedule can send vectors in another way than as they are."""
        parameters = signature(self.schedule).parameters
        return "wire" in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
