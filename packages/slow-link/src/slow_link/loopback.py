"""Ranks of one machine over TCP on its loopback device: what their software costs where the link costs nothing."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from slow_link.launcher import Launcher

DEVICE = "lo"


class Loopback(Launcher):
    """No link at all. α and β are zero."""

    def __init__(self, *, ranks: int) -> None:
        super().__init__(ranks=ranks, mbit_per_second=float("inf"), milliseconds=0.0)

    def describe(self) -> str:
        """See `Launcher.describe`."""
        return f"TCP over {DEVICE}"

    def prefix(self, rank: int) -> list[str]:
        """See `Launcher.prefix`."""
        return []

    def mpi_environment(self) -> Mapping[str, str]:
        """See `Launcher.mpi_environment`."""
        return mpi_over_tcp(DEVICE)

    def store(self) -> Mapping[str, str]:
        """See `Launcher.store`."""
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": DEVICE}


def mpi_over_tcp(device: str) -> dict[str, str]:
    """Settings of MPICH. Without NOLOCAL it would find that all ranks are on one host, and use its memory."""
    return {
        "MPIR_CVAR_NOLOCAL": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": device,
    }


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
