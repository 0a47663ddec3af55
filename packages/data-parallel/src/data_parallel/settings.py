"""Checks of a user's training settings, once at the edge, the same for the optimizer and the DDP hook."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from sparse_collectives import ALGORITHMS, Algorithm, resolve
from sparse_compress import Compressor, TopK
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from data_parallel.schemes.table import WHOLE, check_whole, known_whole
from data_parallel.schemes.whole_gradients import dense_wire

DENSITY = 0.01


def check_compressor(compressor: Any, density: Any = None) -> Compressor:
    """The given compressor, or TopK of the density. TypeError or ValueError, also if both are given.

    density: a fraction, or a schedule of fractions by step, which may come with a compressor that has a density
    (`Steps` sets it).
    """
    if callable(density):
        compressor = TopK(1.0) if compressor is None else compressor
        if not hasattr(compressor, "density"):
            raise ValueError(f"density is a schedule, but {compressor} has no density to be set: leave out one of them")
        density = None
    if compressor is None:
        if density is not None and (isinstance(density, bool) or not isinstance(density, Real)):
            raise TypeError(f"density is {density!r}, expected the fraction of elements to send, 0 < density ≤ 1")
        return TopK(DENSITY if density is None else float(density))
    if density is not None:
        raise ValueError(
            f"density={density} and compressor={compressor} were given, and both say how much: leave out one"
        )
    if isinstance(compressor, type) or not isinstance(compressor, Compressor):
        raise TypeError(f"compressor is {compressor!r}, expected one such as TopK(0.01)")
    return compressor


def check_selects(compressor: Compressor, entry: Algorithm | None) -> None:
    """Raises ValueError for a compressor whose selection would be ignored. Of a TopK only its k counts everywhere.

    entry: the algorithm, None where "auto" may take any.
    """
    if type(compressor) is TopK or (entry is not None and entry.selects and not entry.prescribes):
        return
    if entry is None:
        raise _no_effect("algorithm='auto' may take one that prescribes its selection", compressor)
    raise _no_effect(f"{entry.name} {'prescribes its selection' if entry.selects else 'selects nothing'}", compressor)


def _no_effect(why: str, compressor: Compressor) -> ValueError:
    return ValueError(f"{why}, so {compressor} would have no effect but its k: give TopK(density), or none")


def check_momentum(momentum: Any) -> float:
    """Momentum of the correction before the selection; TypeError or ValueError unless 0 ≤ momentum < 1."""
    if isinstance(momentum, bool) or not isinstance(momentum, Real):
        raise TypeError(f"momentum is {momentum!r}, expected a number, 0 ≤ momentum < 1")
    if not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum is {momentum}, expected 0 ≤ momentum < 1")
    return float(momentum)


def check_settings(
    algorithm: Any, options: Any, wire: Any, compressor: Compressor, momentum: float, optimizer: str
) -> None:
    """Checks settings as far as possible before the ranks are known. Raises TypeError or ValueError.

    optimizer: the place where momentum belongs when nothing is selected, for the message.
    """
    check_text("wire", wire, "fp32")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options is {options!r}, expected a mapping such as {{'teams': 2}}")
    if algorithm == "auto":
        if options:
            raise ValueError(
                f'algorithm="auto" chooses options too, but {dict(options)} was given: name their algorithm'
            )
        resolve("gtopk", wire=wire)
        check_selects(compressor, None)
        return
    if (whole := known_whole(algorithm)) is not None:
        check_whole(whole, options, wire, momentum, optimizer)
        if type(compressor) is not TopK:
            raise _no_effect(f"{whole.name} selects nothing", compressor)
        return
    if isinstance(algorithm, str) and algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known: {', '.join([*ALGORITHMS, *WHOLE, 'auto'])}")
    entry = resolve(algorithm)
    if entry.name in WHOLE:
        raise ValueError(f"the name of your Algorithm is {entry.name!r}, which is another's: give it one of its own")
    if momentum and not entry.selects:
        raise ValueError(f"{entry.name} selects nothing, so momentum={momentum} belongs into {optimizer}")
    check_selects(compressor, entry)
    if entry.selects:
        resolve(algorithm, wire=wire)
    else:
        dense_wire(wire)


def check_optimizer(optimizer: Any, nonfinite: Any) -> None:
    """Checks the wrapped optimizer and nonfinite; TypeError or ValueError."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    check_text("nonfinite", nonfinite, "raise")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f"nonfinite is {nonfinite!r}, expected 'raise' or 'skip'")


def refuse_sharded(named: Mapping[str, Any]) -> None:
    """Raises TypeError for parameters of which each rank holds a part."""
    if names := [name for name, p in named.items() if hasattr(p, "to_local")]:
        raise TypeError(
            f"parameters {names} are DTensors, of which each rank holds another part, so there is no mean to take over "
            "ranks: exchange between nodes by sparse_hsdp(model, mesh['between']), and step a plain optimizer"
        )


def to_train(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that are exchanged: neither frozen nor empty. ValueError where there are none."""
    trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
    if not trained:
        frozen = sum(not p.requires_grad for p in named.values())
        raise ValueError(
            f"of the {len(named)} parameters given none can be trained, {frozen} frozen, {len(named) - frozen} empty: "
            "call requires_grad_(True) on those to be trained before a DistributedOptimizer is made of them"
        )
    return trained


def check_dense_below(dense_below: Any, algorithm: Any) -> int:
    """Checks dense_below; TypeError or ValueError, also if the algorithm selects nothing anyway."""
    count = check_count("dense_below", dense_below, "elements", least=0) or 0
    if count and algorithm != "auto" and not _selects(algorithm):
        raise ValueError(f"dense_below={count} is for algorithms that select; this one sends all whole: leave it out")
    return count


def check_sends(sends: Any, algorithm: Any, optimizer: Optimizer, *, momentum: float, overlap: bool) -> None:
    """Checks sends; TypeError or ValueError, also for settings that have no effect on updates."""
    check_text("sends", sends, "updates")
    if sends not in ("gradients", "updates"):
        raise ValueError(f"sends is {sends!r}, expected 'gradients' or 'updates'")
    if sends == "gradients":
        return
    if isinstance(optimizer, LBFGS):
        raise TypeError('LBFGS asks for gradients several times in a step, which sends="updates" takes one for')
    if momentum:
        raise ValueError(f'with sends="updates" momentum={momentum} belongs into the wrapped optimizer')
    if overlap:
        raise ValueError('sends="updates" has nothing to send before backward has ended: leave out overlap=True')
    if algorithm != "auto" and not _selects(algorithm):
        raise ValueError('sends="updates" is for algorithms that select; whole gradients need it not: leave it out')


def _selects(algorithm: Any) -> bool:
    return known_whole(algorithm) is None and resolve(algorithm).selects


def check_text(name: str, value: Any, example: str) -> None:
    """Raises TypeError for a setting that is not text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected text such as {example!r}")


def check_count(name: str, value: Any, unit: str, *, least: int = 1) -> int | None:
    """A whole number from `least` on, or None; TypeError or ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected a whole number of {unit}, or None")
    if value < least:
        raise ValueError(f"{name} is {value}, expected {least} or more {unit}, or None")
    return value


def said(owner: str, given: Mapping[str, Any], ranks: str) -> str:
    """The repr of a state: its settings, but for those that are off."""
    settings = [f"{name}={value!r}" for name, value in given.items() if value not in (None, 0)]
    return f"{owner}({', '.join([*settings, ranks])})"


def fixed(owner: str, name: str) -> AttributeError:
    """Error for a setting that is assigned after construction, when it would have no effect."""
    return AttributeError(f"{name} of a {owner} is fixed when that is made: set now it would do nothing")
