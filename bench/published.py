"""What the papers report: bench/published.toml, as it is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from communicators import Link

FILE = Path(__file__).with_name("published.toml")


class Model(NamedTuple):
    """n: parameters. The others: see the file."""

    name: str
    n: int
    batch: int
    alone: float
    dense: float
    topk: float
    gtopk: float

    @property
    def compute(self) -> float:
        """Seconds of a step of one worker alone."""
        return self.batch / self.alone


def published() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads(FILE.read_text())


def gtopk_models() -> list[Model]:
    """Those whose throughput on 32 workers was published."""
    return [Model(**given) for given in published()["scaling"]["models"]]


def gtopk_link() -> Link:
    """1 Gbit/s Ethernet as measured by gTop-k's authors."""
    scaling = published()["scaling"]
    return Link(scaling["alpha"], scaling["beta"])
