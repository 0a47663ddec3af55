"""Fallback where no link can be emulated: local ranks whose communicator waits as long as the link would take."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from slow_link.launcher import Launcher
from slow_link.link import SlowLink
from slow_link.loopback import free_port
from slow_link.missing import missing

THROTTLE = "SLOW_LINK_THROTTLE"
"""Environment variable with α and β, in seconds and seconds per byte, which `throttled.behind_link` reads."""


class ThrottledLink(Launcher):
    """Starts ranks as a `SlowLink` does, but slows only communicators from `throttled.behind_link`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def describe(self) -> str:
        """Says that only `behind_link` is slowed, with α and β."""
        return (
            f"NOT an emulated link, a throttled transport: each round of a communicator from `behind_link` takes "
            f"{self.alpha * 1e3:g} ms + {self.beta * 1e9:g} ns a byte, and everything else runs at full speed"
        )

    def prefix(self, rank: int) -> list[str]:
        """No words: ranks start directly."""
        return []

    def mpi_environment(self) -> Mapping[str, str]:
        """Passes α and β to the ranks."""
        return {THROTTLE: f"{self.alpha!r},{self.beta!r}"}

    def store(self) -> Mapping[str, str]:
        """Places rank 0 on loopback; passes α and β."""
        return {**self.mpi_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def open_link(*, ranks: int, mbit_per_second: float, milliseconds: float) -> SlowLink | ThrottledLink:
    """Makes a `SlowLink` if this machine allows one, else a `ThrottledLink`; prints which, and anything missing.

    Args:
        ranks: Number of ranks.
        mbit_per_second: Rate of each rank's port, in each direction.
        milliseconds: One-way delay between any two ranks.
    """
    lacking = missing()
    kind = ThrottledLink if lacking else SlowLink
    link = kind(ranks=ranks, mbit_per_second=mbit_per_second, milliseconds=milliseconds)
    for clause in lacking:
        print(f"missing: {clause}")
    print(link.describe(), flush=True)
    return link
