"""Real MPI or gloo ranks behind an emulated slow link, on one machine.

    with SlowLink(ranks=2, mbit_per_second=100, milliseconds=1.0) as net:
        done = net.mpiexec([sys.executable, "script.py"], timeout=60)

Every rank lives in a network namespace of its own, joined to the others as by a switch: full duplex ports of one
rate, and one delay between any two, or ports of unequal rates, delays, jitter and loss (`Port`). Entering the block
builds the link; leaving it removes the link, whatever happened inside. It needs Linux, and root or user namespaces: the
command enters them by itself, a program calls `enter_user_namespaces()`. `open_link` falls back to a throttled
transport where those are missing, and says so.

    python -m slow_link --rate 100mbit --delay 1ms -- mpiexec -n 4 python train.py
    python -m slow_link --rate 100mbit --delay 1ms -- torchrun --nproc-per-node 4 train.py
    python -m slow_link --rank all:home --rank 0:datacentre -- torchrun --nproc-per-node 4 train.py
    python -m slow_link check

Limits: the switch shares the cores with the ranks (at 100 Mbit/s, over a whole self-check, it took a seventh of a core
at P = 2 and a fifth at P = 4), and a short TCP message arrives 0.05 ms late. Study 1 Gbit/s and 0.1 ms at a tenth:
100 Mbit/s, 1 ms, and compute slowed ten times. Frames have no Ethernet header, and no packet is lost but by
`Port.loss`. A process that waits for a core is late on the link too: run nothing else, and take low quantiles.

Importing this package does not import torch, so the command starts at once; `throttled`, for the ranks, does.
"""

from slow_link.launcher import Launcher
from slow_link.link import SlowLink, ThrottledLink, open_link
from slow_link.missing import Unavailable, enter_user_namespaces, missing
from slow_link.namespaces import sweep
from slow_link.ports import Port, ports_of
from slow_link.version import __version__

__all__ = [
    "Launcher",
    "Port",
    "SlowLink",
    "ThrottledLink",
    "Unavailable",
    "__version__",
    "enter_user_namespaces",
    "missing",
    "open_link",
    "ports_of",
    "sweep",
]
