"""Error feedback: the residual, which is not sent now, is added to what is sent later."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor

from sparse_compress.accumulator import Accumulator, read_state, write_state
from sparse_compress.arguments import WIRE_DTYPES, check_compressor, check_dense, integer, number
from sparse_compress.compressors.compressor import Compressor, StatefulCompressor
from sparse_compress.native.library import kernels
from sparse_compress.selection import all_finite
from sparse_compress.vector import SparseVector, check_entries

KIND = attrgetter("shape", "dtype", "device", "layout")


class _Known(dict[str, Accumulator]):
    """Accumulators by name; KeyError that lists the names for another one."""

    def __missing__(self, name: str) -> Accumulator:
        raise KeyError(f"no residual of {name!r}; known: {list(self)}")


class ErrorFeedback:
    """Residuals of named tensors, and the compression that they correct.

    For every gradient g of a name, with residual v (Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018):

        v ← v + g;  send s = C(v);  v ← v − s

    and with ``momentum`` m > 0 Deep Gradient Compression's correction with factor masking (Lin et al., ICLR 2018):

        u ← m·u + g;  v ← v + u;  send s = C(v);  u, v ← 0 where sent

    A step that sends all elements leaves u, and is momentum as without compression, because nothing waits to be masked.
    What a collective drops comes back by ``restore``, so that nothing is lost: sent + residual = accumulated, also of a
    compressor that sends values of its own, such as signs with a scale.

    Memory: 4 bytes a parameter, 8 with momentum (float64 gradients: twice that), whatever the gradient's dtype.

    Args:
        compressor: C, one that is not ``unbiased``.
        momentum: m, 0 ≤ momentum < 1.
        tentative: Every step works on a copy until ``commit`` or ``rollback``, which brings the state before the step
            back bit for bit (subtracting a gradient again would not be exact). Doubles the memory.

    Raises:
        TypeError: The compressor is none, or momentum no number.
        ValueError: momentum is out of range, or the compressor unbiased.
    """

    def __init__(self, compressor: Compressor, *, momentum: float = 0.0, tentative: bool = False) -> None:
        check_compressor(compressor)
        momentum = number(momentum, "momentum", "0 ≤ momentum < 1", lambda given: 0 <= given < 1)
        if getattr(compressor, "unbiased", False):
            raise ValueError(f"{compressor} scales what it sends, so the rest is no residual: use unbiased=False")
        self.compressor = compressor
        self.momentum = momentum
        self.tentative = tentative
        self._known = _Known()
        self._open: set[str] = set()  # tentative: names of which a step is under way
        self._other: dict[str, Accumulator] = {}  # tentative: their state before it; else memory for the next step
        self._compressor_before: dict[str, Any] = {}  # tentative: a stateful compressor's state before the step
        self._checked: dict[str, tuple[Any, ...]] = {}  # kinds of the gradients that fit
        self._finite: dict[str, Tensor] = {}  # of the step: whether what was accumulated is finite, bool, 0-D

    def compress(
        self,
        name: str,
        gradient: Tensor,
        *,
        select: Callable[[Tensor], SparseVector] | None = None,
        withhold: Sequence[slice] = (),
    ) -> SparseVector:
        """Adds ``gradient`` to the residual of ``name``, and takes out the entries to send.

        Args:
            name: Name of the tensor; each has its own residual.
            gradient: Dense, floating, of any shape, the same in every call of a name; it is left as it is.
            select: Replaces the compressor where an algorithm prescribes its own selection: it gets the accumulated
                tensor, 1-D, and returns entries of it with their values. One with a ``step`` is fused with
                accumulating, as compressors are (see ``selection``).
            withhold: Spans of the flat tensor that take no part: they count as zeros in the selection, and their
                residual and velocity stay as they are (the gradient must be zero there, or is lost).

        Returns:
            The entries to send, over the flat tensor.

        Raises:
            TypeError: The gradient is not dense and floating, or the selection no vector.
            ValueError: Its shape, device or accumulation dtype differ from earlier ones of that name, the compressor's
                ``entries`` is 0, or the selection does not fit, or has changed what it was given. Whatever the
                selection raises, the gradient is in the residual by then (tentative: until ``rollback``).
        """
        if not isinstance(gradient, Tensor) or self._checked.get(name) != KIND(gradient):
            self._check(name, gradient)
        numel = gradient.numel()
        if type(k := self.compressor.entries(numel)) is not int or k < min(numel, 1):  # of a density set since, too
            integer(k, f"{self.compressor}.entries({numel})", least=min(numel, 1), expected="k")
        before = self._known[name]
        after = self._begin(name) if self.tentative and name not in self._open else before
        if gradient.requires_grad or gradient.is_neg():
            gradient = gradient.detach().resolve_neg()
        chooser: Any = select or self.compressor
        if not withhold and getattr(chooser, "finds_nonfinite", False) and _fuses(chooser.__class__):
            sent: SparseVector = chooser.step(before, gradient, self.momentum, after)
            finite = all_finite(sent)
        else:
            held = before.copies(withhold)
            before.advance(gradient, self.momentum, out=after)
            after.fill(withhold, 0.0)
            sent, finite = self._selected(name, after.residual.view(-1), select)
            after.take_out(sent)
            after.fill(withhold, held)
        again = self.tentative and name in self._finite  # more than once in one step
        self._finite[name] = self._finite[name] & finite if again else finite
        return sent

    def _check(self, name: str, gradient: Tensor) -> None:
        """Checks a gradient of another kind than the last; opens an unknown name."""
        check_dense(gradient, f"gradient of {name!r}")
        if name not in self._known:
            self._known[name] = Accumulator.zeros(gradient, momentum=self.momentum > 0)
        residual, dtype = self._known[name].residual, WIRE_DTYPES[gradient.dtype]
        if (residual.shape, residual.dtype, residual.device) != (gradient.shape, dtype, gradient.device):
            raise ValueError(
                f"gradient of {name!r}: {tuple(gradient.shape)}, accumulated in {dtype} on {gradient.device}, but its "
                f"residual is {tuple(residual.shape)}, {residual.dtype} on {residual.device}: use another name "
                "for another tensor, and load states to the device of the gradients"
            )
        self._checked[name] = KIND(gradient)

    def _begin(self, name: str) -> Accumulator:
        """Begins a tentative step of a name; returns the copy that it writes to."""
        if not self._open and isinstance(self.compressor, StatefulCompressor):
            self._compressor_before = self.compressor.state_dict()
        before = self._known[name]
        self._known[name], self._other[name] = self._other.get(name) or before.clone(), before
        self._open.add(name)  # not before there was memory for it
        return self._known[name]

    def _selected(
        self, name: str, accumulated: Tensor, select: Callable[[Tensor], SparseVector] | None
    ) -> tuple[SparseVector, Tensor]:
        """Entries to send, and whether all is finite."""
        chooser, named = select or self.compressor, {}
        if select is None and isinstance(self.compressor, StatefulCompressor):
            named["name"] = name
        writes = None if accumulated.is_inference() else accumulated._version
        sent = chooser(accumulated, **named)
        if writes is not None and accumulated._version != writes:
            raise ValueError(f"{chooser} changed the tensor of {name!r}, which is the residual: let it change a clone")
        if not isinstance(sent, SparseVector):
            raise TypeError(f"{chooser} returned {type(sent).__name__} for {name!r}, expected a SparseVector")
        if (sent.numel, sent.dtype, sent.device) != (len(accumulated), accumulated.dtype, accumulated.device):
            raise _misfit(f"the selection for {name!r} is {sent},", accumulated)
        if sent.is_cpu:  # from a GPU they would be read back
            try:
                check_entries(sent, 0, sent.numel)
            except ValueError as error:
                raise ValueError(f"{chooser} gave what is no vector for {name!r}: {error}") from None
        finite = all_finite(sent)  # also where it has values of its own
        return sent, finite if getattr(chooser, "finds_nonfinite", False) else finite & all_finite(accumulated)

    def is_suspect(self, name: str) -> bool:
        """Whether `suspects` names a tensor; reads back this one only. False before it was compressed.

        Args:
            name: Name of the tensor.
        """
        finite = self._finite.get(name)
        return finite is not None and not bool(finite)

    def suspects(self) -> list[str]:
        """Names whose accumulated tensor had a NaN or inf when it was compressed last; reads each one's flag back.

        Where the compressor takes the largest magnitudes first only the sent entries were checked. All ranks must react
        alike: raise an error, or skip the step by ``rollback`` (``tentative=True``).
        """
        return [name for name in self._finite if self.is_suspect(name)]

    def drop(self, name: str, spans: Sequence[slice]) -> None:
        """Clears residual and velocity, so that nothing of a gradient that was not finite is sent later.

        Args:
            name: A known one.
            spans: Spans of the flat tensor.

        Raises:
            KeyError: The name is unknown.
        """
        self._known[name].fill(spans, 0.0)

    def adopt(self, name: str, residual: Tensor, velocity: Tensor | None = None) -> None:
        """Starts a name that is not known yet with a copy of a residual (and velocity), as when buckets are cut anew.

        Args:
            name: A new one.
            residual: In the gradient's shape.
            velocity: Likewise, given if, and only if, there is momentum.

        Raises:
            ValueError: The name has a residual already, or the tensors do not fit.
        """
        if name in self._known:
            raise ValueError(f"{name!r} has a residual already; adopt is for new names")
        part = {"residuals": {name: residual}, "velocities": {} if velocity is None else {name: velocity}}
        self._known.update(read_state(part, momentum=self.momentum > 0, known={}))

    def restore(self, name: str, dropped: SparseVector) -> None:
        """Adds what a collective dropped to the residual of ``name``.

        Args:
            name: A known one.
            dropped: Vector over the flat tensor, of the residual's dtype and device.

        Raises:
            KeyError: The name is unknown.
            ValueError: ``dropped`` does not fit.
        """
        residual = self._known[name].residual
        if (dropped.numel, dropped.dtype, dropped.device) != (residual.numel(), residual.dtype, residual.device):
            raise _misfit(f"{dropped} cannot go back to {name!r}:", residual)
        if library := kernels(residual):
            library.sc_add_at(residual.data_ptr(), *dropped.run)
        else:
            residual.view(-1).index_add_(0, dropped.indices, dropped.values)

    def residual(self, name: str) -> Tensor:
        """Residual of ``name`` in the gradient's shape: the live tensor.

        Args:
            name: A known one.

        Raises:
            KeyError: The name is unknown.
        """
        return self._known[name].residual

    def commit(self) -> None:
        """Ends a step: the changes of a tentative one stay, and ``suspects`` are forgotten."""
        self._open.clear()
        self._finite.clear()

    def rollback(self) -> None:
        """Ends a tentative step: residuals and velocities are as before it, bit for bit.

        Raises:
            RuntimeError: Without ``tentative=True``, because then there is nothing to return to.
        """
        if not self.tentative:
            raise RuntimeError("rollback needs ErrorFeedback(..., tentative=True)")
        if self._open and isinstance(self.compressor, StatefulCompressor):
            self.compressor.load_state_dict(self._compressor_before)
        for name in self._open:
            self._known[name], self._other[name] = self._other[name], self._known[name]
        self.commit()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and velocities by name, as references (clone or save them before the next step).

        The state of a stateful compressor is under ``"compressor"``. ``torch.load(weights_only=True)`` loads it.

        Raises:
            RuntimeError: A tentative step is open.
        """
        self._refuse_open_step("state_dict")
        state = write_state(self._known)
        if isinstance(self.compressor, StatefulCompressor):
            state["compressor"] = self.compressor.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all residuals and velocities by copies of those in ``state``, or changes nothing and raises.

        Names that are known keep their device; others stay on the device they were loaded to.

        Args:
            state: Result of ``state_dict``.

        Raises:
            ValueError: It is malformed, fits another ``momentum``, or has other shapes or dtypes than those known.
            RuntimeError: A tentative step is open.
        """
        self._refuse_open_step("load_state_dict")
        if ("compressor" in state) != isinstance(self.compressor, StatefulCompressor):
            raise ValueError(f"the state was saved with another compressor than {self.compressor}, or is incomplete")
        known = _Known(read_state(state, momentum=self.momentum > 0, known=self._known))
        if isinstance(self.compressor, StatefulCompressor):
            self.compressor.load_state_dict(state["compressor"])
        self._known, self._other, self._checked, self._finite = known, {}, {}, {}

    def _refuse_open_step(self, what: str) -> None:
        if self._open:
            raise RuntimeError(f"{what} in mid-step: commit() or rollback() the tentative step first")


@cache
def _fuses(kind: type) -> bool:
    """Whether a selection has a `step` of its own call: a class that redefines the call alone has none."""
    own: set[str] = next(filter(None, (set(vars(one)) & {"__call__", "plan", "step"} for one in kind.__mro__)), set())
    return getattr(kind, "step", None) is not None and own != {"__call__"}


def _misfit(what: str, like: Tensor) -> ValueError:
    return ValueError(f"{what} expected numel={like.numel()}, dtype={like.dtype}, device={like.device}")
