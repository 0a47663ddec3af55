"""Network namespaces, one per rank, and their TUN devices: created, joined, removed.

A name tells its owner (slowlink-OWNER-NUMBER-RANK, OWNER a process), so that leftovers of a killed run are found by
name alone, and nothing else is touched.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

DEVICE = "e0"
"""The rank's only device besides loopback."""

SEGMENT_BYTES = 9000
LEAST_BUFFER, MOST_BUFFER = 1 << 22, 1 << 30
"""Bytes that TCP may keep of a connection in each direction: as Linux has them, and the largest window there is."""
BURST_BYTES = 10_000
"""Burst that `tbf` lets through at once: a little more than one segment. The switch spaces it out.

The rate is set here as well as there, so that packets queue where TCP sees them.
"""
CONGESTION, WINDOW = "reno", ("initcwnd", "100")
"""Reno with a large first window needs no warm-up and, unlike bbr, does not probe for a rate that is given."""
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

TUN = "/dev/net/tun"

_NAME = re.compile(r"slowlink-(\d+)-(\d+)-(\d+)")
_END_SECONDS = 5.0
_SETTINGS = (
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
    "net.ipv6.conf.all.disable_ipv6=1",
)

_SET_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD of linux/if_tun.h
_IP, _NO_INFO, _VNET_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _SEGMENTATION = 1, 2
_NUMBERED = "slowlink%d"  # the kernel puts in the next free number


def open_tun() -> tuple[int, str]:
    """Opens a new device in this namespace: its file descriptor and name; it is gone once the last descriptor closes.

    Checksums and segmentation are skipped: a packet goes from one kernel to the same kernel, and a segment of 9,000
    bytes costs the switch as much as one of 1,500.
    """
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        request = struct.pack("16sH22x", _NUMBERED.encode(), _IP | _NO_INFO | _VNET_HEADER)
        name = fcntl.ioctl(device, _SET_DEVICE, request)[:16].rstrip(b"\0").decode()
        fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUM | _SEGMENTATION)
    except OSError:
        os.close(device)
        raise
    return device, name


def name_of(number: int, rank: int) -> str:
    """Name of the namespace of a rank on this process's link `number`."""
    return f"slowlink-{os.getpid()}-{number}-{rank}"


def address_of(rank: int) -> str:
    """IPv4 address of a rank, in its namespace."""
    return f"10.77.0.{rank + 1}"


def create(
    name: str,
    tun: str,
    *,
    rank: int,
    bits_per_second: float,
    whole: bool = True,
    congestion: str = CONGESTION,
    buffer: int = LEAST_BUFFER,
) -> None:
    """Creates a namespace that holds the TUN device `tun` as `DEVICE`, up, with the rank's address and this rate.

    whole: whether the kernel may hand over segments of several packets, of which none can be lost alone. congestion:
    TCP's congestion control. buffer: most bytes that it keeps of a connection, sent and received.
    """
    call("ip", "netns", "add", name)
    call("ip", "link", "set", tun, "netns", name, "name", DEVICE)
    buffers = f"net.ipv4.tcp_wmem=4096 16384 {buffer}", f"net.ipv4.tcp_rmem=4096 131072 {buffer}"
    call("ip", "netns", "exec", name, tool("sysctl") or "sysctl", "-qw", *_SETTINGS, *buffers)
    inside = ("ip", "-n", name)
    segments = ("gso_max_size", str(SEGMENT_BYTES)) if whole else ("gso_max_segs", "1")
    call(*inside, "link", "set", "lo", "up")
    call(*inside, "link", "set", DEVICE, "mtu", "1500", *segments)
    call(*inside, "address", "add", f"{address_of(rank)}/24", "dev", DEVICE)
    call(*inside, "link", "set", DEVICE, "up")
    call(*inside, "route", "change", "10.77.0.0/24", "dev", DEVICE, "congctl", congestion, *WINDOW)
    shape = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(BURST_BYTES), "limit", str(max(1 << 26, buffer)))
    call("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *shape)


def check_congestion(name: str) -> None:
    """Raises ValueError for a congestion control that this kernel has not."""
    known = AVAILABLE.read_text().split() if AVAILABLE.exists() else [CONGESTION]
    if name not in known:
        raise ValueError(f"congestion control {name!r} is not loaded here, but {', '.join(known)}: modprobe tcp_{name}")


def darken(name: str) -> None:
    """Takes a namespace's device down: connections stay open, and TCP retries for many minutes."""
    call("ip", "-n", name, "link", "set", DEVICE, "down")


def ours(number: int) -> list[str]:
    """Existing namespaces of this process's link `number`."""
    return [name for name, (owner, link) in _all().items() if (owner, link) == (os.getpid(), number)]


def sweep() -> list[str]:
    """Removes the namespaces that killed runs have left, with the processes in them, and returns their names."""
    left = [name for name, (owner, _) in _all().items() if not _runs(owner)]
    for name in left:
        remove(name)
    return left


def remove(name: str) -> None:
    """Ends the processes of a namespace and deletes it, unless another sweep has already done so."""
    try:
        end_processes(name)
        call("ip", "netns", "delete", name)
    except RuntimeError:
        if name in _all():
            raise


def terminate(names: Sequence[str], *, but: set[int], seconds: float) -> None:
    """Sends SIGTERM to every process in the namespaces except `but`; returns when they are gone, or after `seconds`."""
    end = time.monotonic() + seconds
    _signal(set().union(*map(_pids, names)) - but, signal.SIGTERM)
    while set().union(*map(_pids, names)) - but and time.monotonic() < end:
        time.sleep(0.01)


def end_processes(name: str) -> None:
    """Sends SIGKILL to every process in a namespace; returns when they are gone."""
    end = time.monotonic() + _END_SECONDS
    while pids := _pids(name):
        if time.monotonic() > end:
            raise RuntimeError(f"processes {', '.join(map(str, pids))} in namespace {name} survive SIGKILL")
        _signal(pids, signal.SIGKILL)
        time.sleep(0.01)


def tool(name: str) -> str | None:
    """Path of a system tool. Debian keeps `tc` and `sysctl` in a folder that is not on a user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def call(*command: str) -> str:
    """Runs a command and returns its output; RuntimeError with its complaint if it failed, or is not there."""
    if (found := tool(command[0])) is None:
        raise RuntimeError(f"no `{command[0]}` on the PATH (packages iproute2, procps)")
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _all() -> dict[str, tuple[int, int]]:
    """Name -> (owner, number) of all namespaces of slow-link, whichever process made them."""
    names = [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip()]
    matches = {name: _NAME.fullmatch(name) for name in names}
    return {name: (int(match[1]), int(match[2])) for name, match in matches.items() if match}


def _runs(pid: int) -> bool:
    """Whether a process runs: not if it is gone or, killed, a zombie that its parent does not wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"  # a name is any bytes
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in call("ip", "netns", "pids", name).split()]


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
