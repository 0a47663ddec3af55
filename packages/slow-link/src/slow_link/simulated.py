"""The same ports in a simulated world: `SimulatedWorld(len(ports), paths_of(ports))`. Needs communicators."""

from collections.abc import Callable, Sequence
from functools import cache

from communicators import Path

from slow_link.ports import Port, between

PAYLOAD_BYTES, PACKET_BYTES = 1448, 1500
"""Of a packet: data, and all that travels."""
RENO = 1.5**0.5
"""Mathis et al. (Computer Communication Review 1997): packets in flight are √(3/2p) where one of 1/p is lost."""


def paths_of(ports: Sequence[Port], *, handshake: bool = False) -> Callable[[int, int], Path]:
    """(source, target) -> what a message costs, for `communicators.SimulatedWorld`.

    Bytes are of data: what headers add is in the rates. Jitter is left out: its mean is 0. Where packets are lost, a
    message goes no faster than TCP (Reno) fills the path. A simulated port has one message at a time: where a rank has
    several under way on long or lossy paths, real ones are sooner.

    Args:
        ports: Of all ranks.
        handshake: Whether a message first waits for word that its receive is posted, as gloo's do: ranks that begin at
            the same time then need a delay more.
    """

    @cache
    def path(source: int, target: int) -> Path:
        delay, _, loss = between(ports, source, target)
        back = between(ports, target, source)[0]
        lossy = (delay + back) * loss**0.5 / (RENO * PAYLOAD_BYTES)
        up, down = (8e-6 / rate * PACKET_BYTES / PAYLOAD_BYTES for rate in (ports[source].up, ports[target].down))
        return Path(delay + back * handshake, max(up, lossy), max(down, lossy))

    return path
