"""What is swept. Published variants are written here and beside, for comparison only: no package has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparse_collectives import Algorithm
from sparse_compress import WarmUp

from bench.convergence.ways import MOMENTUM, WARM_UP, WAYS, Run, Way
from bench.sweeps.delta import Observed
from bench.sweeps.residuals import with_residuals

DENSITIES = (0.1, 0.03, 0.01, 0.003, 0.001)
USUAL, SMALL = 0.01, 0.001


@dataclass(frozen=True)
class Setting:
    """One row. name: of what differs from the others of its sweep."""

    sweep: str
    name: str
    density: float
    way: Way


def _gtopk(**more: Any) -> Way:
    """Ours, with something else."""
    return Way(lambda run: {"algorithm": "gtopk", "density": run.density, "momentum": MOMENTUM, **more})


def _by(algorithm: Algorithm) -> Way:
    return _gtopk(algorithm=algorithm)


def _warmed(run: Run) -> dict[str, Any]:
    density = WarmUp(run.density, steps=run.steps // WARM_UP, stages=(1.0,))
    return {"algorithm": "gtopk", "density": density, "momentum": MOMENTUM}


def observed(watch: Observed) -> Way:
    """Ours, whose steps are looked at."""
    return _by(watch.algorithm)


DENSE = Setting("dense", "dense", 1.0, WAYS["dense"])
OURS = _gtopk()
"""All that is cut returns, momentum before the selection; in more than one sweep, and trained once."""


def settings() -> Iterator[Setting]:
    """All but dense, sweep by sweep."""
    for density in DENSITIES:
        yield Setting("density", "ours", density, OURS)
    for density in (USUAL, SMALL):
        yield Setting("density", "ours, dense for the first tenth", density, Way(_warmed))
        yield from _collecting(density)
        yield Setting("momentum", "before (ours)", density, OURS)
        yield Setting("momentum", "after", density, Way(_gtopk(momentum=0.0).settings, own_momentum=True))
        yield Setting("momentum", "both", density, Way(OURS.settings, own_momentum=True))
        yield Setting("momentum", "updates are sent", density, _gtopk(momentum=0.0, updates=True))
        yield Setting("momentum", "none", density, _gtopk(momentum=0.0))


def _collecting(density: float) -> Iterator[Setting]:
    yield Setting("gTop-k's residuals", "ours", density, OURS)
    for rule, name in (("partial", "as published"), ("local", "nothing returns")):
        yield Setting("gTop-k's residuals", name, density, _by(with_residuals("gtopk", rule)))
    for rule, name in (("global", "GRES (ours)"), ("partial", "PRES"), ("local", "LRES")):
        yield Setting("SparDL's residuals", name, density, _by(with_residuals("spardl", rule)))
