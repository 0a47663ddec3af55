"""Switch between the ranks: a star of TUN devices, with the rate and the delay of the emulated links.

    python switch.py BYTES_PER_SECOND SECONDS FLIP_EVERY FD...

It runs as a process of its own, with the standard library only. FD are open TUN devices in rank order; FD i has the
address x.x.0.i + 1. It ends when its standard input closes: at the latest with the process that started it.

A packet of L bytes that comes in at time t has left its sender when all packets before it have, plus L/rate; its last
bit arrives `SECONDS` later, and not before L/rate have passed since the packet before it arrived there:

    left    = max(t, left of the sender's packet before) + L / rate
    arrival = max(left + delay, arrival of the receiver's packet before + L / rate)

With FLIP_EVERY = n > 0 every n-th large packet arrives with one bit of its data flipped, which TCP's checksum does not
show: the receiver's device computes it, as when a real switch or network card recomputes it.

So nothing is ever faster than the link, and a late wake-up of this process delays packets without changing the rate.
"""

import contextlib
import gc
import heapq
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

VNET_BYTES = 10
"""struct virtio_net_hdr, before each packet: checksum and segmentation left to the receiver."""

LARGE_BYTES = 1000
"""Smallest packet that may be corrupted: it carries data, not only the transport's own messages."""
HEADERS_BYTES = 128
"""Leading bytes of a packet that are never corrupted."""

MOST_BYTES = VNET_BYTES + 65536
READS = 8
"""Packets read from one port before other ports and due deliveries get their turn."""

SPIN_SECONDS = 100e-6
"""Time spent polling the clock before a packet that travels alone is due: timers are late by as much."""

REALTIME_PRIORITY = 10


class Switch:
    """Packets on their way. ports: file descriptors of TUN devices. flip_every: FLIP_EVERY above; 0: none."""

    def __init__(self, ports: Sequence[int], *, bytes_per_second: float, seconds: float, flip_every: int = 0) -> None:
        self._ports = list(ports)
        self._seconds_per_byte, self._delay = 1 / bytes_per_second, seconds
        self._left = [0.0] * len(ports)
        self._arrived = [0.0] * len(ports)
        self._travelling: list[tuple[float, int, int, bytes]] = []  # arrival, order, port, packet
        self._taken = 0
        self._flip_every, self._large = flip_every, 0

    def serve(self, until: int) -> None:
        """Carries packets until the file descriptor `until` becomes readable, or is closed at its other end."""
        rank_of = {port: rank for rank, port in enumerate(self._ports)}
        watched = [*self._ports, until]
        while True:
            ready, _, _ = select.select(watched, [], [], self._deliver())  # its time-out counts microseconds
            if until in ready:
                return
            for port in ready:
                self._drain(rank_of[port], port)

    def take(self, source: int, packet: bytes, now: float) -> None:
        """Accepts a packet from rank `source` at `now`; a packet for no rank here is lost."""
        target = receiver(packet)
        if not 0 <= target < len(self._ports):
            return
        duration = wire_bytes(packet) * self._seconds_per_byte
        left = self._left[source] = max(now, self._left[source]) + duration
        arrival = self._arrived[target] = max(left + self._delay, self._arrived[target] + duration)
        self._taken += 1
        heapq.heappush(self._travelling, (arrival, self._taken, self._ports[target], packet))

    def _drain(self, source: int, port: int) -> None:
        for _ in range(READS):
            try:
                packet = os.read(port, MOST_BYTES)
            except BlockingIOError:
                return
            self.take(source, packet, time.monotonic())

    def _deliver(self) -> float | None:
        """Delivers packets that are due; returns the seconds until the next one is, None without a next one."""
        travelling = self._travelling
        while travelling:
            wait = travelling[0][0] - time.monotonic()
            spin = SPIN_SECONDS if len(travelling) == 1 else 0.0
            if wait > spin:
                return wait - spin
            if wait > 0:
                continue
            _, _, port, packet = heapq.heappop(travelling)
            packet = self._corrupted(packet)
            with contextlib.suppress(OSError):  # a full or closed device loses a packet, as a real one would
                os.write(port, packet)
        return None

    def _corrupted(self, packet: bytes) -> bytes:
        if not self._flip_every or len(packet) < LARGE_BYTES:
            return packet
        self._large += 1
        if self._large % self._flip_every:
            return packet
        place = HEADERS_BYTES + self._large * 7919 % (len(packet) - HEADERS_BYTES)
        return packet[:place] + bytes([packet[place] ^ 1 << self._large % 8]) + packet[place + 1 :]


def receiver(packet: bytes) -> int:
    """Rank of an IPv4 packet's destination, by the last byte of its address; -1 for other protocols."""
    return packet[VNET_BYTES + 19] - 1 if packet[VNET_BYTES] >> 4 == 4 else -1


def wire_bytes(packet: bytes) -> int:
    """Bytes of IP on the wire: a segment that the kernel left whole counts as its packets, each with its headers."""
    nbytes, segment = len(packet) - VNET_BYTES, int.from_bytes(packet[4:6], sys.byteorder)
    if segment == 0:
        return nbytes
    headers = 20 + 4 * (packet[VNET_BYTES + 32] >> 4)
    segments = -(-(nbytes - headers) // segment)
    return nbytes + (segments - 1) * headers


def main(argv: Sequence[str]) -> None:
    """Runs the switch for the process's whole life."""
    rate, seconds, flip_every, *ports = argv
    for interruption in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(interruption, signal.SIG_IGN)  # the starter gets it too, and ends us in its own time
    with contextlib.suppress(OSError):  # ranks that busy-wait would hold it up for whole time slices
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    gc.disable()
    link = {"bytes_per_second": float(rate), "seconds": float(seconds)}
    Switch([int(port) for port in ports], flip_every=int(flip_every), **link).serve(0)


if __name__ == "__main__":
    main(sys.argv[1:])
