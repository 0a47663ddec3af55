"""The emulated link: namespaces around the ranks and a switch between them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from slow_link import namespaces, switch, tun
from slow_link.interruption import as_exceptions, held_back
from slow_link.launcher import Launcher
from slow_link.loopback import mpi_over_tcp
from slow_link.missing import Unavailable, missing
from slow_link.ranks import TERMINATION_SECONDS

_numbers = itertools.count(1)


class SlowLink(Launcher):
    """A context manager: entering builds the link (`Unavailable` where that cannot be), leaving removes every trace.

    A signal that would end this process leaves it by an exception meanwhile, so that leaving happens.

    Args:
        ranks: How many.
        mbit_per_second: Of each rank's port, in each direction.
        milliseconds: From any rank to any other.
        flip_every: One bit is flipped in every so many-th large packet, behind TCP's back; 0: none.
    """

    def __init__(self, *, ranks: int, mbit_per_second: float, milliseconds: float, flip_every: int = 0) -> None:
        super().__init__(ranks=ranks, mbit_per_second=mbit_per_second, milliseconds=milliseconds)
        self._flip_every = flip_every
        self._number = next(_numbers)
        self._switch: subprocess.Popen[bytes] | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        if lacking := missing():
            raise Unavailable(f"no emulated link here: {'; '.join(lacking)}")
        namespaces.sweep()
        with ExitStack() as exits:
            exits.enter_context(as_exceptions())
            exits.callback(self._down)
            self._up()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def describe(self) -> str:
        """See `Launcher.describe`."""
        return (
            f"emulated: {self.ranks} network namespaces joined by a switch, full duplex ports of "
            f"{8e-6 / self.beta:g} Mbit/s (IP packets of 1,500 bytes), {self.alpha * 1e3:g} ms one way"
        )

    def prefix(self, rank: int) -> list[str]:
        """See `Launcher.prefix`."""
        return ["ip", "netns", "exec", namespaces.name_of(self._number, rank)]

    def mpi_environment(self) -> Mapping[str, str]:
        """See `Launcher.mpi_environment`."""
        return mpi_over_tcp(namespaces.DEVICE)

    def store(self) -> Mapping[str, str]:
        """See `Launcher.store`. Any port is free: the namespace is new."""
        address = namespaces.address_of(0)
        return {"MASTER_ADDR": address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": namespaces.DEVICE}

    def darken(self, rank: int) -> None:
        """From now on nothing that this rank sends arrives, and nothing reaches it; nobody is told."""
        namespaces.darken(namespaces.name_of(self._number, rank))

    def watch(self) -> None:
        """See `Launcher.watch`."""
        if self._switch is None or self._switch.poll() is not None:
            raise RuntimeError("the switch between the ranks is not running")

    def end(self, processes: Sequence[subprocess.Popen[bytes]], *, launchers: bool) -> None:
        """See `Launcher.end`. A launcher is stopped before its ranks end, so that it prints nothing about that."""
        held = [process for process in processes if launchers and process.poll() is None]
        names = namespaces.ours(self._number)
        try:
            for process in held:
                process.send_signal(signal.SIGSTOP)
            namespaces.terminate(names, but={process.pid for process in held}, seconds=TERMINATION_SECONDS)
        finally:
            for process in held:
                process.kill()
            for name in names:
                namespaces.end_processes(name)
            super().end(processes, launchers=launchers)

    def _up(self) -> None:
        devices: list[int] = []
        try:
            for rank in range(self.ranks):
                device, name = tun.open_tun()
                devices.append(device)
                namespace = namespaces.name_of(self._number, rank)
                namespaces.create(namespace, name, rank=rank, bits_per_second=8 / self.beta)
            self._switch = self._started_switch(devices)
        finally:
            for device in devices:  # the switch has its own, so that the devices end with it
                os.close(device)

    def _started_switch(self, devices: list[int]) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-I", "-S", str(Path(switch.__file__))]
        words += [str(1 / self.beta), str(self.alpha), str(self._flip_every)]
        return subprocess.Popen(
            [*words, *map(str, devices)], stdin=subprocess.PIPE, pass_fds=devices, start_new_session=True
        )

    def _down(self) -> None:
        with held_back():
            if self._switch is not None:
                assert self._switch.stdin is not None
                self._switch.stdin.close()
                self._switch.kill()  # it ends by itself, unless it is stuck; nothing is lost either way
                self._switch.wait()
                self._switch = None
            for name in namespaces.ours(self._number):
                namespaces.remove(name)
