"""Facts of one rank: its place in the launch, versions, and where gloo listens."""

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

PACKAGES = (
    *("thinwire-communicators", "thinwire-replicas", "sparse-compress", "sparse-collectives", "data-parallel"),
    *("local-sgd", "partial-collectives", "slow-link", "thinwire"),
)
BY_TORCH = "WORLD_SIZE"
VARIABLES = (
    ("RANK", BY_TORCH),
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # not SLURM_NTASKS: a batch script has it, which is one process
)
LOOPBACK = ("127.", "::1")
SIOCGIFADDR = 0x8915

Facts = dict[str, Any]


class Launched(NamedTuple):
    """Place of this process among those that its launcher started. variable: tells their number, `size`."""

    variable: str
    rank: int
    size: int

    @property
    def by_torch(self) -> bool:
        """Whether ranks meet by torch's variables, then exchange over gloo; else by MPI."""
        return self.variable == BY_TORCH


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Place of this process by the launcher's variables; None for one that is alone."""
    for rank, size in VARIABLES:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            found = Launched(size, int(environ[rank]), int(environ[size]))
            return found if found.size > 1 else None
    return None


def versions(get: Callable[[str], str] = version) -> dict[str, str]:
    """Version of each of thinwire's distributions; "" for one that is not installed."""
    found = dict.fromkeys(PACKAGES, "")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = get(name)
    return found


def facts() -> Facts:
    """Host of this process, versions, and where gloo listens."""
    interface, address = gloo_listens(os.environ, interfaces(), own_addresses())
    has = {"torch": str(torch.__version__), **versions()}
    return {"host": socket.gethostname(), "interface": interface, "address": address, "versions": has}


def gloo_listens(
    environ: Mapping[str, str], interfaces: Mapping[str, str], addresses: Sequence[str]
) -> tuple[str, str | None]:
    """Interface and address that torch's gloo takes; None where $GLOO_SOCKET_IFNAME names no interface.

    interfaces: IPv4 address by interface. addresses: of the host name, which this machine has; without any it is
    127.0.0.1.
    """
    if wanted := environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return wanted, interfaces.get(wanted)
    address = next(iter(addresses), "127.0.0.1")
    local = "lo" if address.startswith(LOOPBACK) else "?"
    return next((name for name, its in interfaces.items() if its == address), local), address


def interfaces() -> dict[str, str]:
    """IPv4 address of each network interface; "" for one without."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            found[name] = ""
            with suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses() -> list[str]:
    """Addresses of the host name on which this machine can listen, in the resolver's order."""
    found, resolved = [], []
    with suppress(OSError):
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in resolved:
        with suppress(OSError), socket.socket(family, kind, protocol) as listening:
            listening.bind((where[0], 0))
            found.append(str(where[0]))
    return found


def library_name(said: str) -> str:
    """Name and version of an MPI library, from what MPI_Get_library_version says."""
    return " ".join(said.partition("\n")[0].partition(",")[0].replace(" Version:", "").split())
