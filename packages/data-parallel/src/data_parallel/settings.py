"""Settings of an exchange: given as keywords, checked once, and fixed from then on."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self, TypedDict, cast

from communicators import Communicator
from sparse_collectives import ALGORITHMS, DENSE_WIRES, Algorithm, resolve
from sparse_compress import Compressor, TopK, WarmUp, arguments

from data_parallel.schemes.dense import DenseCompressor
from data_parallel.schemes.table import COMPRESSORS, known_compressor

DENSITY = 0.01
USUAL_STEPS = 1000
DensitySchedule = Callable[[int], float]
"""Maps the number of steps taken to the fraction of elements that a rank sends in the next one."""


class ExchangeSettings(TypedDict, total=False):
    """Keywords that `DistributedOptimizer`, `UpdateOptimizer`, `SparseHookState` and `sparse_hsdp` have in common.

    The same on every rank, and fixed at construction. Only a compressor's own density may change later, in the same way
    on every rank, unless a schedule sets it.

    Attributes:
        density: The fraction of elements that a rank sends of each bucket (with HSDP of each shard), default 0.01, or a
            schedule: a function of the number of steps taken, such as `sparse_compress.WarmUp`. Density 1 is a dense
            sum, in full precision, or in int8 on a wire of int8. Where nothing is selected density has no effect, so
            that algorithms can be compared by name.
        compressor: Another selection, instead of density; a schedule beside it sets the compressor's own `density` in
            every step, whatever that was, so each optimizer needs a compressor of its own. "oktopk" and "spardl" accept
            only a TopK, and take its k; so does "dense", to no effect.
        algorithm: A name in `ALGORITHMS`, default "gtopk", or an `Algorithm` of your own. "dense" sums dense gradients,
            without compressor and residuals; "powersgd", "dense-int8", or a `DenseCompressor` of your own sends
            something of every element, with residuals, without compressor. "auto" measures the ranks and takes the
            algorithm predicted to be fastest for the model; `choice` says which and why. HSDP has no "auto", nor has an
            `Elastic`.
        options: The algorithm's own settings, such as {"teams": 2} for "spardl"; "auto" chooses them too. With an
            `Elastic`, "spardl" has as many teams as the greatest common divisor of these and the ranks of the step.
        wire: Encoding of the values, default "fp32"; for selections also fewer bytes, see `WIRES`, with rounding errors
            kept in the residual; for "dense" also "bf16" or "fp16", with rounding errors lost.
        momentum: Momentum of DGC's correction, before the selection (see `ErrorFeedback`), default 0. The optimizer's
            own comes after the exchange and learns badly at small densities: give it here and leave that at 0. The
            optimizer's weight decay does not pass through it: divided by 1 − momentum it is as strong as in dense
            training. An `UpdateOptimizer` leaves momentum to the wrapped optimizer, and refuses it here.
        clip_norm: Limits the norm of this rank's own gradient (with HSDP: of the node's), over the whole model, to
            clip_norm · √P before the selection, which keeps the mean's at about clip_norm (DGC's local clipping, see
            `clip_limit`). Where buckets are sent during backward, as by DDP's hook, HSDP and `overlap`, each is clipped
            by itself to √share of that limit, where share is its fraction of the elements. The clipped part is not
            kept. `clip_grad_norm_` after the exchange would clip entries that have accumulated over many steps: that
            part is lost, and the model learns badly. With `momentum`, double the learning rate: momentum is cleared
            where entries are sent, and clipped gradients do not grow to make up for that.
        dense_below: Tensors of fewer elements, such as biases and norms, are summed dense while the selection from the
            others is under way; `density` is a share of all elements. Their momentum is plain. 0, the default: none.
        verify: Number of steps between comparisons of a hash of the parameters across ranks. A difference is a
            CollectiveError on every rank that says who and where; None, the default: never. Unless it is 0, the ranks
            of an optimizer also compare a hash of the parameters in the first exchange, and the groups' settings, such
            as rates, in that of every 100th step (of an `Elastic` in every one), at no extra cost.
    """

    density: float | DensitySchedule | None
    compressor: Compressor | None
    algorithm: str | Algorithm | DenseCompressor
    options: Mapping[str, Any] | None
    wire: str
    momentum: float
    clip_norm: float | None
    dense_below: int
    verify: int | None


@dataclass(frozen=True)
class Settings:
    """Checked `ExchangeSettings`. Raises TypeError or ValueError, as far as possible before the ranks are known.

    compressor: with everything set, the one in use. density: a schedule, else None, since the compressor has it.
    nonfinite: what becomes of a step with a NaN or inf of any rank, "raise" or "skip".
    """

    algorithm: Any = "gtopk"
    options: Any = None
    compressor: Any = None
    wire: Any = "fp32"
    momentum: Any = 0.0
    clip_norm: Any = None
    dense_below: Any = 0
    nonfinite: Any = "raise"
    verify: Any = None
    density: Any = None

    @classmethod
    def of(cls, owner: Callable[..., Any], given: Mapping[str, Any], *, nonfinite: Any = "raise") -> Self:
        """Settings out of an owner's keywords; TypeError for a keyword that it does not have."""
        known = ExchangeSettings.__annotations__
        if unknown := sorted(set(given) - set(known)):
            own = [p.name for p in inspect.signature(owner).parameters.values() if p.kind is p.KEYWORD_ONLY]
            near = "".join(difflib.get_close_matches(unknown[0], [*own, *known], 1))
            hint, names = near and f" (did you mean {near!r}?)", ", ".join([*own, *known])
            raise TypeError(f"{owner.__name__} has no setting {unknown[0]!r}{hint}; it takes {names}")
        return cls(**given, nonfinite=nonfinite)

    def __post_init__(self) -> None:
        schedule = self.density if callable(self.density) else None
        vars(self).update(
            compressor=_compressor(self.compressor, self.density),
            density=schedule,
            momentum=arguments.number(self.momentum, "momentum", "0 ≤ momentum < 1", lambda value: 0 <= value < 1),
            clip_norm=_clip_norm(self.clip_norm),
            dense_below=check_count("dense_below", self.dense_below, "elements", least=0) or 0,
            verify=check_count("verify", self.verify, "steps", least=0),
        )
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite is {self.nonfinite!r}, expected 'raise' or 'skip'")
        self.begin_step(0)  # what a schedule gives is checked at once, and is known before the first step
        selects = self.may_select  # checks that all of it fits the algorithm
        if self.dense_below and not selects:
            raise ValueError(f"dense_below={self.dense_below} is for algorithms that select; this one sends all whole")

    def begin_step(self, taken: int) -> None:
        """Sets the compressor's density to what a schedule gives for a step, TypeError or ValueError for none."""
        if self.density is not None:
            share = arguments.share_of(self.density(taken), "density", expected="the fraction of elements to send")
            try:
                self.compressor.density = share
            except AttributeError as error:
                said = f"density is a schedule, but that of {self.compressor} cannot be set: leave out one of them"
                raise ValueError(said) from error

    @property
    def may_select(self) -> bool:
        """Whether the algorithm selects entries, or may turn out to."""
        return self.entry is None or (isinstance(self.entry, Algorithm) and self.entry.selects)

    @property
    def last_density(self) -> float:
        """Final density if it is known: the `density` of the schedule or of the compressor; else 1."""
        return float(getattr(self.density or self.compressor, "density", 1.0))

    def undoes(self, comm: Communicator) -> bool:
        """Whether a step may be undone among these ranks, so that what it changes is kept as it was."""
        return self.nonfinite == "skip" or comm.elastic

    def said(self, **found: Any) -> str:
        """Settings as text, but for those that are off. found: what was chosen, in place of what was given."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "density"} | found
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, 0))

    @cached_property
    def entry(self) -> Algorithm | DenseCompressor | None:
        """The algorithm with its options, without the wire; None for "auto", which is chosen by measuring the ranks.

        Raises TypeError or ValueError for settings that do not fit the algorithm, or would have no effect.
        """
        if self.algorithm == "auto":
            if self.options not in (None, {}):
                raise ValueError(f'"auto" chooses options too, but {self.options} was given: name their algorithm')
            resolve("gtopk", wire=self.wire)
            self._check_compressor("algorithm='auto' may take one that prescribes its selection")
            return None
        if (dense := known_compressor(self.algorithm)) is not None:
            if self.wire != "fp32":
                raise ValueError(f"{dense.name} has a wire of its own: leave out wire={self.wire!r}")
            self._check_selects_nothing(dense.name)
            return dense.given(self.options)
        if isinstance(self.algorithm, str) and self.algorithm not in ALGORITHMS:
            names = ", ".join([*ALGORITHMS, *COMPRESSORS, "auto"])
            raise ValueError(f"unknown algorithm {self.algorithm!r}; known: {names}")
        entry = resolve(self.algorithm, self.options)
        if entry.name in COMPRESSORS:
            raise ValueError(f"your Algorithm's name is {entry.name!r}, which is another's: give it one of its own")
        if entry.selects:
            if self.momentum and not entry.cuts:
                raise ValueError(
                    f"{entry.name} takes all that has accumulated, so momentum={self.momentum} would never be cleared "
                    "where entries wait: take momentum 0, or an UpdateOptimizer, in whose optimizer it belongs"
                )
            if entry.prescribes:
                self._check_compressor(f"{entry.name} prescribes its selection")
            resolve(entry, wire=self.wire)
            return entry
        self._check_selects_nothing(entry.name)
        if self.wire not in list(DENSE_WIRES):
            raise ValueError(f"wire is {self.wire!r}, expected for a dense sum one of {', '.join(DENSE_WIRES)}")
        return entry

    def _check_selects_nothing(self, name: str) -> None:
        if self.momentum:
            raise ValueError(f"{name} selects nothing, so momentum={self.momentum} belongs into the optimizer")
        if type(self.compressor) is not TopK:
            raise ValueError(f"{name} selects nothing, so {self.compressor} would have no effect: leave it out")

    def _check_compressor(self, why: str) -> None:
        """Raises ValueError for a compressor whose selection would be ignored. Of a TopK only its k counts."""
        if type(self.compressor) is not TopK:
            raise ValueError(f"{why}, so {self.compressor} would have no effect but its k: give TopK(density), or none")


def refuse_elastic(owner: str, group: Any, why: str) -> None:
    """Raises TypeError where a group's ranks may come and go, which the owner cannot follow."""
    if getattr(group, "elastic", False):
        raise TypeError(f"{owner} was given an Elastic, but {why}: see the guide on elastic training")


def check_count(name: str, value: Any, unit: str, *, least: int = 1) -> int | None:
    """A whole number from `least` on, or None; TypeError or ValueError for anything else."""
    expected = f"None or a number of {unit}"
    return None if value is None else arguments.integer(value, name, least=least, expected=expected)


def fixed(owner: object, name: str) -> AttributeError:
    """Error for a setting that is assigned after construction, when it would have no effect."""
    what = type(owner).__name__
    return AttributeError(f"{name} of {what} is fixed when that is made: set now it would do nothing")


def scheduled(
    density: float | DensitySchedule | None, steps: int | None, compressor: Compressor | None
) -> DensitySchedule | None:
    """Density with the recommended warm-up of a training of so many steps, USUAL_STEPS where that is not known.

    density: default that of a given compressor, if it has one.
    """
    if density is None:
        density = DENSITY if compressor is None else getattr(compressor, "density", None)
    if density is None or callable(density):
        return density
    return WarmUp.recommended(density, USUAL_STEPS if steps is None else steps)


def _compressor(given: Any, density: Any) -> Compressor:
    """The given compressor, or TopK of the density; a schedule of densities may come with a compressor that has one."""
    if callable(density):
        given = TopK(1.0) if given is None else given
        if not hasattr(given, "density"):
            raise ValueError(f"density is a schedule, but {given} has no density to be set: leave out one of them")
    elif given is None:
        return TopK(DENSITY if density is None else density)
    elif density is not None:
        raise ValueError(f"density={density} and compressor={given} were given, and both say how much: leave out one")
    arguments.check_compressor(given)
    return cast(Compressor, given)


def _clip_norm(given: Any) -> float | None:
    return None if given is None else arguments.positive(given, "clip_norm", expected="a norm")
