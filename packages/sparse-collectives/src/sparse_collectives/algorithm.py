"""A sparse allreduce: its schedule, its options, what it returns, and what it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from communicators import SLOT_BYTES, Communicator, Schedule, comparable, schedules
from numpy.typing import NDArray
from sparse_compress import Selection, SparseVector, add, arguments, merge
from torch import Tensor

from sparse_collectives.wire import RAW, Wire

Array: TypeAlias = NDArray[np.floating[Any]]

State: TypeAlias = dict[str, Any]
"""Plain values, lists and tensors that an algorithm keeps between calls; changed in place, when a call has succeeded.

One state serves one call at a time: the next call begins when the last has ended. "step" is the number of its calls, if
it has one: ranks with states of unlike age are told.
"""
_KIND = attrgetter("numel", "dtype", "device")


@dataclass(frozen=True, slots=True)
class Reduction:
    """Result of a sparse allreduce. Over all ranks, inputs = total + dropped, so nothing is lost.

    Attributes:
        total: The agreed sum, the same bits on every rank.
        dropped: The part that this rank must add to its residual, in units of the sum; differs between ranks.
        size: Number of ranks in the sum. `sparse_allreduce` sets it; an algorithm leaves it out.
    """

    total: SparseVector
    dropped: SparseVector
    size: int | None = None

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The mean over ranks as a dense tensor: total / size, in one pass over ``out``, which may be the gradient.

        Args:
            out: numel elements of the total's dtype and device, of any shape; contiguous. Default: a new tensor, flat.

        Raises:
            ValueError: ``out`` does not fit, or the size is not known.
        """
        if self.size is None:
            raise ValueError("a mean is over size ranks, which a schedule's own Reduction does not know: give size=")
        if out is None:
            out = torch.empty(self.total.numel, dtype=self.total.dtype, device=self.total.device)
        return self.total.put(out, divisor=self.size)


class Traffic(NamedTuple):
    """Traffic of a rank in one collective.

    Attributes:
        nbytes: Bytes sent, headers included.
        messages: Messages sent.
        rounds: Rounds that the rank takes part in.
    """

    nbytes: int
    messages: int
    rounds: int

    @classmethod
    def of_bodies(cls, nbytes: int, messages: int, rounds: int) -> Traffic:
        """Traffic of messages whose bodies have so many bytes together; each travels behind a slot.

        Args:
            nbytes: Bytes of all bodies.
            messages: Messages sent.
            rounds: Rounds that the rank takes part in.
        """
        return cls(nbytes + messages * SLOT_BYTES, messages, rounds)

    @classmethod
    def total(cls, *parts: Traffic) -> Traffic:
        """Traffic of several collectives, one after the other.

        Args:
            *parts: Traffic of each.
        """
        return cls(*(sum(column) for column in zip(*parts, strict=True)))

    @classmethod
    def allgather(cls, nbytes: Sequence[int], rank: int) -> Traffic:
        """Bruck's all-gather of one block a rank: ⌈log P⌉ messages.

        With distance D = 1, 2, 4, … a rank hands on the min(D, P − D) blocks from its own on.

        Args:
            nbytes: Bytes of each rank's block.
            rank: This rank.
        """
        size = len(nbytes)
        onwards = [*nbytes[rank:], *nbytes[:rank]]
        sent = [sum(onwards[: min(distance, size - distance)]) for distance in schedules.powers_of_two(below=size)]
        return cls.of_bodies(sum(sent), len(sent), len(sent))

    @classmethod
    def quantised(cls, numel: int, rank: int, size: int, bits: int = 8) -> Traffic:
        """`schedules.quantised_allreduce`: all spans but the rank's own, then Bruck's share of the sums.

        Args:
            numel: Elements of the tensor.
            rank: This rank.
            size: P.
            bits: Of an element; the sums have 4 at least.
        """
        if size == 1:
            return cls(0, 0, 0)
        lengths = [high - low for low, high in schedules.quantised_spans(numel, size)]
        given, sums = ([schedules.quantised_nbytes(n, each) for n in lengths] for each in (bits, max(bits, 4)))
        split = cls.of_bodies(sum(given) - given[rank], size - 1, 1)
        return cls.total(split, cls.allgather(sums, rank))

    @classmethod
    def allreduce(cls, nbytes: int, rank: int, size: int, itemsize: int = 1) -> Traffic:
        """`schedules.allreduce`: n log P elements of a short tensor, else 2n(P − 1)/P, or as the blocks fall.

        Doubling: all in each of log Q messages, of Q ranks, the largest power of two in P. Ring: all blocks but the
        next one, then all but the one after it, in 2(P − 1) messages. Halving and doubling, split evenly among Q ranks:
        what is given away of ever shorter spans, then the spans that are kept, in 2 log Q messages. Where P is not Q:
        all once more from a rank with a folded partner, whose own message is its only one.

        Args:
            nbytes: Bytes of the tensor.
            rank: This rank.
            size: P.
            itemsize: Bytes of an element.
        """
        group, short = schedules.largest_power_of_two(size), schedules.doubles(nbytes, size)
        if size != group and nbytes >= schedules.RING_NBYTES:
            lengths = [high - low for low, high in schedules.block_bounds(nbytes // itemsize, size)]
            sent = 2 * nbytes - itemsize * (lengths[(rank + 1) % size] + lengths[(rank + 2) % size])
            return cls.of_bodies(sent, 2 * (size - 1), 2 * (size - 1))
        if rank >= group:
            return cls.of_bodies(nbytes, 1, 2)
        low, high, kept = 0, nbytes // itemsize, 0
        for distance in list(schedules.powers_of_two(below=group))[::-1]:
            middle = (low + high) // 2
            low, high = (middle, high) if rank & distance else (low, middle)
            kept += itemsize * (high - low)
        levels, has_partner = group.bit_length() - 1, rank + group < size
        sent = levels * nbytes if short else nbytes - itemsize * (high - low) + kept
        rounds = levels if short else 2 * levels
        return cls.of_bodies(sent + has_partner * nbytes, rounds + has_partner, rounds + 2 * has_partner)


@dataclass(frozen=True)
class Algorithm(ABC):
    """A sparse allreduce: a subclass is one algorithm, its fields are the options with their defaults.

        class AllToAll(Algorithm):
            name = "all-to-all"

            def schedule(self, sparse, rank, size, k): ...

            def sent(self, rank, size, k, numel, dtype): ...

    A subclass with options is a frozen dataclass. `schedule` and `sent` are all that it must have.

    Attributes:
        name: Its name in facts, errors and checkpoints.
        cuts: Whether each rank's vector is cut to k entries before `schedule`, which else gets it as it is: in training
            all that has accumulated, by a `select` of all elements.
        takes_wire: Whether `schedule` and `sent` heed `wire`; others are for "fp32" only.
        exact: Whether `sent` is what a call sends, not only its bound.
        selects: Whether entries of a gradient are selected before it is sent; always so in one's own.
        prescribes: Whether it has a `select` of its own; set by itself.
        wire: How vectors travel; set by who resolves a user's settings.
    """

    name: ClassVar[str] = ""
    cuts: ClassVar[bool] = True
    takes_wire: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    prescribes: ClassVar[bool] = False
    wire: Wire = field(default=RAW, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.prescribes = cls.select is not Algorithm.select

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.default is not MISSING:
                object.__setattr__(self, one.name, _like(one.default, getattr(self, one.name), one.name))

    def check(self, size: int) -> None:  # noqa: B027 - most have nothing to check
        """Checks that the options fit the number of ranks.

        Args:
            size: P.

        Raises:
            ValueError: They do not.
        """

    def fitted(self, size: int) -> Self:
        """The same algorithm for a number of ranks that has changed, with options that fit it.

        Args:
            size: P.

        Raises:
            ValueError: Options do not fit, and cannot be adapted.
        """
        self.check(size)
        return self

    @abstractmethod
    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        """The rounds of one call on one rank, a generator.

        Args:
            sparse: Exactly min(k, n) entries, or without `cuts` any number, in memory of this call.
            rank: This rank.
            size: P.
            k: The most entries that a rank contributes.
            state: Given where there is an `initial_state`; changed in place, as the last thing that a call does.
        """

    def call(self, own: SparseVector, comm: Communicator, k: int, state: State | None = None) -> Schedule[Reduction]:
        """The schedule of one call, with what is cut before it among the dropped; subclasses leave it as it is.

        Args:
            own: This rank's vector, of any number of entries, in memory of this call.
            comm: The ranks.
            k: The most entries that a rank contributes.
            state: That of the calls before, where there is an `initial_state`.

        Raises:
            TypeError: The algorithm's own `schedule` is no generator, or returns no `Reduction` of such vectors.
        """
        cut = None
        if self.cuts and len(own) != min(k, own.numel):
            own, cut = merge(own, SparseVector.empty(own.numel, own.dtype, device=own.device), k)
        schedule = self.schedule(own, comm.rank, comm.size, k, **({} if state is None else {"state": state}))
        if not isinstance(schedule, Generator):
            raise TypeError(f"the schedule of {self.name} is {schedule!r}, expected a generator that yields Rounds")
        result = yield from schedule
        parts = (result.total, result.dropped) if isinstance(result, Reduction) else (None,)
        if not all(isinstance(part, SparseVector) and _KIND(part) == _KIND(own) for part in parts):
            kind = f"numel={own.numel}, {own.dtype} on {own.device}"
            raise TypeError(f"{self.name} returned {result}, expected a Reduction of SparseVectors of {kind}")
        return Reduction(result.total, result.dropped if cut is None else add(result.dropped, cut), comm.size)

    @abstractmethod
    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """Traffic of a rank in a call without a state: the exact expression, or where not `exact` its bound.

        Args:
            rank: This rank.
            size: P.
            k: The most entries that a rank contributes.
            numel: n.
            dtype: Of the gradient.
        """

    def select(self, like: Tensor, rank: int, size: int, k: int, state: State | None) -> Selection:
        """The selection that the algorithm prescribes for its next call; changes no state.

        Args:
            like: A tensor of the gradient's numel and dtype.
            rank: This rank.
            size: P.
            k: The most entries that are selected.
            state: As it is before the call.
        """
        raise NotImplementedError

    def initial_state(self) -> State | None:
        """The state before the first call; None for an algorithm that keeps none."""
        return None

    def check_state(self, state: State) -> None:
        """Checks that a dict is a state of this algorithm: that no key of `initial_state` is missing, or what it says.

        Args:
            state: As loaded.

        Raises:
            ValueError: It is not.
        """
        if not set(state) >= set(self.initial_state() or ()):
            raise _not_a_state(state, self.initial_state() or ())

    def typical(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """Traffic amid training, if every rank selects at random: the basis of predictions. Arguments as of `sent`."""
        return self.sent(rank, size, k, numel, dtype)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """Entries that a rank of 2 or more merges; unless an algorithm says: a P-th of all, in each level of a tree."""
        return min(k, numel) * (size - 1).bit_length()

    def variants(self, size: int) -> Sequence[Mapping[str, Any]]:
        """Options among which predictions look for the best on so many ranks."""
        del size
        return [{}]

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """The total of a first call, in NumPy and without any message, bit for bit; for tests.

        Args:
            inputs: Of every rank, dense, in rank order.
            k: The most entries that a rank contributes.
        """
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """Its own settings."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "wire"}

    @cached_property
    def settings(self) -> list[str]:
        """The options as text, which all ranks must share; made once, because every call asks."""
        return [f"{key}={comparable(value)}" for key, value in self.options.items()]

    def facts(self, *what: str, state: State | None = None) -> str:
        """All that ranks must share, as text: of the call, the options, a wire of fewer bytes, and the state's age.

        Args:
            *what: Facts of the call.
            state: That of the calls before, of one that keeps any.
        """
        wire = [f"wire={self.wire.name}"] if self.wire is not RAW else []
        return f"{self.name}({', '.join([*what, *self.settings, *wire, *self.age_of(state)])})"

    @staticmethod
    def age_of(state: State | None) -> list[str]:
        """Calls that a state counts as its "step", as a fact; [] for a state that counts none.

        Between powers of two, because a new fact costs ranks an agreement.

        Args:
            state: Of the calls before.
        """
        calls: Any = state.get("step") if isinstance(state, Mapping) else None
        if not is_count(calls):
            return []
        below = 1 << calls.bit_length()
        return [f"state=of {below // 2} to {below - 1} calls" if calls else "state=new"]

    def given(self, options: Mapping[str, Any] | None) -> Self:
        """The same algorithm with these options, in the types of their defaults.

        Args:
            options: By name.

        Raises:
            TypeError: No dict, or a value of another type than the default.
            ValueError: An unknown name.
        """
        return replace(self, **check_options(self.name, self.options, options)) if options is not None else self


def check_options(name: str, defaults: Mapping[str, Any], given: object) -> dict[str, Any]:
    """Options: those given, in the types of their defaults, else the defaults. ValueError or TypeError."""
    if not isinstance(given, Mapping):
        raise TypeError(f"options is {given!r}, expected a dict of the algorithm's own settings")
    if unknown := [str(key) for key in given if key not in defaults]:
        known = ", ".join(defaults) or "none"
        raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}; it takes: {known}")
    return {key: _like(default, given[key], key) if key in given else default for key, default in defaults.items()}


def _like(default: Any, value: Any, key: str) -> Any:
    """The value of an option in the type of its default."""
    if isinstance(default, int) and not isinstance(default, bool):
        return arguments.integer(value, key, least=None, expected=f"as {default}, the default")
    if isinstance(default, float):
        return arguments.number(value, key, f"a number, as {default}, the default", lambda given: given == given)
    if isinstance(default, (str, bool)) and not isinstance(value, type(default)):
        raise TypeError(f"{key} is {value!r}, expected a {type(default).__name__}, as {default!r}, the default")
    return value


def check_values(state: State, fits: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raises ValueError for a state of other keys than `fits`, or with a value that does not fit."""
    if set(state) != set(fits):
        raise _not_a_state(state, fits)
    for key, fit in fits.items():
        if not fit(state[key]):
            raise ValueError(f"the state's {key} is {state[key]!r}, which no call leaves behind: it was damaged")


def _not_a_state(state: State, keys: Iterable[str]) -> ValueError:
    return ValueError(
        f"the state has the keys {sorted(map(str, state))}, expected {sorted(keys)}: it is another algorithm's, or "
        "another version's; begin with the initial_state() of this one"
    )


def is_count(value: Any) -> bool:
    """An integer from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
