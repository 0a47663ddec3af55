"""Emulated link: a namespace around every rank, and a switch between them; and what stands in for it elsewhere."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from slow_link import namespaces, switch
from slow_link.launcher import TERMINATION_SECONDS, Launcher
from slow_link.missing import Unavailable, missing
from slow_link.ports import Port, between

THROTTLE = "SLOW_LINK_THROTTLE"
"""Environment variable with α and β, in seconds and seconds per byte, which `throttled.behind_link` reads."""

NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Variables that keep NCCL on the link: by itself it copies between GPUs of one machine, whatever their namespaces."""

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_numbers = itertools.count(1)


class SlowLink(Launcher):
    """Emulated link, a context manager: entering builds it (`Unavailable` where that cannot be), leaving removes it.

    SIGTERM, SIGHUP and SIGQUIT become exceptions inside the block, unless they are handled already, so that the link is
    removed then too.

    Args:
        ranks: Number of ranks.
        mbit_per_second: Rate of each rank's port, in each direction.
        milliseconds: One-way delay between any two ranks.
        flip_every: n: flips one bit in every n-th large packet, behind TCP's back; 0: none.
        ports: In place of rate and delay, the port of each rank; `alpha` and `beta` are then the slowest ones'.
        congestion: TCP's congestion control, one of those that this kernel has.

    Raises:
        ValueError: An argument is out of range, or there is not one port a rank.
    """

    device = namespaces.DEVICE

    def __init__(
        self,
        *,
        ranks: int,
        mbit_per_second: float = 100.0,
        milliseconds: float = 1.0,
        flip_every: int = 0,
        ports: Sequence[Port] | None = None,
        congestion: str = namespaces.CONGESTION,
    ) -> None:
        namespaces.check_congestion(congestion)
        if ports is not None:
            if len(ports) != ranks:
                raise ValueError(f"expected one port for each of {ranks} ranks, got {len(ports)}")
            pairs = itertools.permutations(range(ranks), 2)
            mbit_per_second = min((min(port.up, port.down) for port in ports), default=mbit_per_second)
            milliseconds = 1e3 * max((between(ports, *pair)[0] for pair in pairs), default=0.0)
        super().__init__(ranks=ranks, mbit_per_second=mbit_per_second, milliseconds=milliseconds)
        if isinstance(flip_every, bool) or not isinstance(flip_every, int) or flip_every < 0:
            raise ValueError(f"flip_every is {flip_every!r}, expected a whole number of packets, or 0 for none")
        equal = Port(up=mbit_per_second, down=mbit_per_second, delay=milliseconds)
        self._ports = list(ports) if ports is not None else [equal] * ranks
        self._flip_every, self._congestion = flip_every, congestion
        self._number = next(_numbers)
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if lacking := missing():
            raise Unavailable(f"no emulated link here: {'; '.join(lacking)}")
        namespaces.sweep()
        with ExitStack() as exits:
            exits.enter_context(_ending_as_exceptions())
            exits.callback(self._down)
            self._up()
            self._exits = exits.pop_all()
        return self

    def describe(self) -> str:
        """Describes the namespaces, the rates and the delays."""
        other = "" if self._congestion == namespaces.CONGESTION else f", TCP's congestion control {self._congestion}"
        beginning = f"emulated: {self.ranks} network namespaces joined by a switch"
        equal, usual = self._ports[0], Port(up=self._ports[0].up, down=self._ports[0].up, delay=self._ports[0].delay)
        if any(port != usual for port in self._ports):
            told = "; ".join(f"{rank}: {_told(port)}" for rank, port in enumerate(self._ports))
            return f"{beginning}, unequal ports: {told}{other}"
        return (
            f"{beginning}, full duplex ports of {equal.up:g} Mbit/s (IP packets of 1,500 bytes), "
            f"{equal.delay:g} ms one way{other}"
        )

    @property
    def buffer(self) -> int:
        """Most bytes that TCP keeps of a connection in each direction: four times what fills the longest path."""
        paths = [
            min(self._ports[source].up, self._ports[target].down)
            * (between(self._ports, source, target)[0] + between(self._ports, target, source)[0])
            for source, target in itertools.permutations(range(self.ranks), 2)
        ]
        filled = 1e6 / 8 * max(paths, default=0.0)
        return round(min(namespaces.MOST_BUFFER, max(namespaces.LEAST_BUFFER, 4 * filled)))

    def prefix(self, rank: int) -> list[str]:
        """Words that enter the rank's network namespace."""
        return [namespaces.tool("ip") or "ip", "netns", "exec", namespaces.name_of(self._number, rank)]

    def environment(self) -> Mapping[str, str]:
        """NCCL's variables: the link's device; the others as the user has set them, else so that it uses the link."""
        chosen = {name: os.environ.get(name, value) for name, value in NCCL.items()}
        return {**chosen, "NCCL_SOCKET_IFNAME": namespaces.DEVICE}

    def first_address(self) -> tuple[str, int]:
        """Address of rank 0; any port is free, because the namespace is new."""
        return namespaces.address_of(0), 29500

    def darken(self, rank: int) -> None:
        """Cuts a rank off: nothing that it sends arrives, and nothing reaches it; no rank is told."""
        self.watch()
        namespaces.darken(namespaces.name_of(self._number, rank))

    def watch(self) -> None:
        """Raises an error if there is no link yet, or no more, or its switch has stopped."""
        if self._switch is None:
            raise RuntimeError("there is no link outside of its block: enter it by `with`, and start ranks inside")
        if self._switch.poll() is not None:
            raise RuntimeError("the switch between the ranks is not running")

    def end(self, processes: Sequence[subprocess.Popen[bytes]], *, launchers: bool) -> None:
        """Ends the processes started here, and any that ranks have left behind on the link.

        A launcher is stopped before its ranks end, so that it prints nothing about their end.

        Args:
            processes: All that were started, ended or not.
            launchers: Whether they are mpiexec or torchrun, rather than the ranks.
        """
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
        with ExitStack() as ours:  # the switch has descriptors of its own, so that the devices end with it
            for rank in range(self.ranks):
                device, name = namespaces.open_tun()
                ours.callback(os.close, device)
                devices.append(device)
                namespace = namespaces.name_of(self._number, rank)
                how: dict[str, Any] = {"congestion": self._congestion, "buffer": self.buffer}
                rate = 1e6 * self._ports[rank].up
                namespaces.create(namespace, name, rank=rank, bits_per_second=rate, whole=not self._loses(), **how)
            self._switch = self._started_switch(devices)

    def _started_switch(self, devices: list[int]) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-I", "-S", str(Path(switch.__file__))]
        words += [str(self._flip_every), json.dumps(self._lines())]
        return subprocess.Popen(
            [*words, *map(str, devices)], stdin=subprocess.PIPE, pass_fds=devices, start_new_session=True
        )

    def _loses(self) -> bool:
        return any(port.loss for port in self._ports)

    def _lines(self) -> dict[str, list[Any]]:
        """Fields of `switch.Lines`."""
        every = range(self.ranks)
        pairs = [[between(self._ports, source, target) for target in every] for source in every]
        delay, jitter, loss = ([[pair[place] for pair in row] for row in pairs] for place in range(3))
        up, down = [8e-6 / port.up for port in self._ports], [8e-6 / port.down for port in self._ports]
        return {"up": up, "down": down, "delay": delay, "jitter": jitter, "loss": loss}

    def _down(self) -> None:
        with _signals_held_back():
            if self._switch is not None:
                assert self._switch.stdin is not None
                self._switch.stdin.close()
                self._switch.kill()  # it ends by itself, unless it is stuck; nothing is lost either way
                self._switch.wait()
                self._switch = None
            for name in namespaces.ours(self._number):
                namespaces.remove(name)


def _told(port: Port) -> str:
    rates = f"up {port.up:g} Mbit/s, down {port.down:g} Mbit/s, {port.delay:g} ms"
    more = [f"jitter {port.jitter:g} ms"] * (port.jitter > 0) + [f"loss {port.loss:.3g}"] * (port.loss > 0)
    more += [f"region {port.region}, {port.far:g} ms far"] * (port.far > 0)
    return ", ".join([rates, *more])


class ThrottledLink(Launcher):
    """Starts ranks as a `SlowLink` does, but slows only communicators from `throttled.behind_link`."""

    def describe(self) -> str:
        """Says that only `behind_link` is slowed, with α and β."""
        return (
            f"NOT an emulated link, a throttled transport: each round of a communicator from `behind_link` takes "
            f"{self.alpha * 1e3:g} ms + {self.beta * 1e9:g} ns a byte, and everything else runs at full speed"
        )

    def environment(self) -> Mapping[str, str]:
        """Passes α and β to the ranks."""
        return {THROTTLE: f"{self.alpha!r},{self.beta!r}"}

    def mpi_environment(self) -> Mapping[str, str]:
        """Leaves MPI whatever transport it takes by itself."""
        return {}


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


@contextmanager
def _ending_as_exceptions() -> Iterator[None]:
    """Turns SIGTERM, SIGHUP and SIGQUIT into SystemExit in the main thread, unless they are handled already."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    changed = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in changed:
            signal.signal(number, _leave)
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Delays SIGINT and those of `ENDING` until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
