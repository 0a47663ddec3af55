"""Real MPI or gloo ranks behind an emulated slow link, on one machine.

    with SlowLink(ranks=2, mbit_per_second=100, milliseconds=1.0) as net:
        done = net.mpiexec([sys.executable, "script.py"], timeout=60)

Every rank lives in a network namespace of its own, joined to the others as by a switch: full duplex ports of one
rate, and one delay between any two. Entering builds it, leaving removes it, whatever happened inside. It needs Linux
and root; `open_link` falls back to a throttled transport where those are missing, and says so.

Nothing here imports torch, so that the tool itself starts at once; `throttled` is for the ranks, and does.
"""

from bench.slow_link.fallback import ThrottledLink, open_link
from bench.slow_link.launcher import Launcher
from bench.slow_link.link import SlowLink
from bench.slow_link.missing import Unavailable, missing
from bench.slow_link.namespaces import sweep

__all__ = ["Launcher", "SlowLink", "ThrottledLink", "Unavailable", "missing", "open_link", "sweep"]
