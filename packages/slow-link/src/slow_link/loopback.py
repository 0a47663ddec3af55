"""Ranks of one machine over TCP on its loopback device: the cost of their software where the link costs nothing."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from slow_link.launcher import Launcher

DEVICE = "lo"


class Loopback(Launcher):
    """Ranks without a link: α and β are zero."""

    def __init__(self, *, ranks: int) -> None:
        super().__init__(ranks=ranks, mbit_per_second=float("inf"), milliseconds=0.0)

    def describe(self) -> str:
        return f"TCP over {DEVICE}"

    def prefix(self, rank: int) -> list[str]:
        return []

    def mpi_environment(self) -> Mapping[str, str]:
        return mpi_over_tcp(DEVICE)

    def store(self) -> Mapping[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": DEVICE}


def mpi_over_tcp(device: str) -> dict[str, str]:
    """MPICH's settings for TCP on a device; without NOLOCAL it would see one host and use shared memory."""
    return {
        "MPIR_CVAR_NOLOCAL": "1",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": device,
    }


def free_port() -> int:
    """TCP port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
