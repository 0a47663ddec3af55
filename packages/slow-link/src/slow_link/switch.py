"""Switch between the ranks: a star of TUN devices, with the rates and the delays of the emulated links.

    python switch.py FLIP_EVERY LINES FD...

It runs as a process of its own, with the standard library only. LINES is a JSON object of `Lines`; FD are open TUN
devices in rank order; FD i has the address x.x.0.i + 1. It ends when its standard input closes: at the latest with the
process that started it.

A packet of L bytes that comes in at time t has left its sender when all packets before it have, plus L/up. A delay
later its last bit is at its receiver's port, in the order in which packets of that pair were sent. It arrives there not
before L/down have passed since the packet before it arrived, whoever sent that:

    left    = max(t, left of the sender's packet before) + L / up
    there   = max(left + delay ± jitter, there of the pair's packet before)
    arrival = max(there + max(0, L / down − L / up), arrival of the receiver's packet before + L / down)

With FLIP_EVERY = n > 0 every n-th large packet arrives with one bit of its data flipped, which TCP's checksum does not
show: the receiver's device computes it, as when a real switch or network card recomputes it.

So nothing is ever faster than the link, and a late wake-up of this process delays packets without changing the rate.
"""

import contextlib
import gc
import heapq
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Lines:
    """Lines between ranks. up, down: seconds per byte of each; delay, jitter, loss: [source][target], in seconds."""

    up: Sequence[float]
    down: Sequence[float]
    delay: Sequence[Sequence[float]]
    jitter: Sequence[Sequence[float]]
    loss: Sequence[Sequence[float]]


class Switch:
    """Packets on their way. ports: file descriptors of TUN devices. flip_every: FLIP_EVERY above; 0: none."""

    def __init__(self, ports: Sequence[int], lines: Lines, *, flip_every: int = 0, seed: int = 0) -> None:
        self._ports, self._lines = list(ports), lines
        self._left, self._arrived = [0.0] * len(ports), [0.0] * len(ports)
        self._there = [[0.0] * len(ports) for _ in ports]
        self._travelling: list[tuple[float, int, int, float | None, bytes]] = []  # when, order, target, soonest, packet
        self._taken, self._draw = 0, random.Random(seed).random
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
        target, lines = receiver(packet), self._lines
        if not 0 <= target < len(self._ports):
            return
        nbytes = wire_bytes(packet)
        left = self._left[source] = max(now, self._left[source]) + nbytes * lines.up[source]
        if lines.loss[source][target] and self._draw() < lines.loss[source][target]:
            return
        delay = lines.delay[source][target]
        if jitter := lines.jitter[source][target]:
            delay += jitter * (2 * self._draw() - 1)
        there = self._there[source][target] = max(left + delay, self._there[source][target])
        slower = max(0.0, lines.down[target] - lines.up[source])
        self._push(there, target, there + nbytes * slower, packet)

    def _push(self, when: float, target: int, soonest: float | None, packet: bytes) -> None:
        """Has a packet go on at that time. soonest: when it may arrive; None: it has had its turn at the port."""
        self._taken += 1
        heapq.heappush(self._travelling, (when, self._taken, target, soonest, packet))

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
            if arrived := self.next_arrived():
                _, target, packet = arrived
                with contextlib.suppress(OSError):  # a full or closed device loses a packet, as a real one would
                    os.write(self._ports[target], packet)
        return None

    def next_arrived(self) -> tuple[float, int, bytes] | None:
        """Takes the next event: when, where and what arrives; None for a packet that waits at its receiver's port."""
        when, _, target, soonest, packet = heapq.heappop(self._travelling)
        if soonest is not None:
            duration = wire_bytes(packet) * self._lines.down[target]
            arrival = self._arrived[target] = max(soonest, self._arrived[target] + duration)
            if arrival > when:
                self._push(arrival, target, None, packet)
                return None
        return when, target, self._corrupted(packet)

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
    flip_every, lines, *ports = argv
    for interruption in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(interruption, signal.SIG_IGN)  # the starter gets it too, and ends us in its own time
    with contextlib.suppress(OSError):  # ranks that busy-wait would hold it up for whole time slices
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    gc.disable()
    Switch([int(port) for port in ports], Lines(**json.loads(lines)), flip_every=int(flip_every)).serve(0)


if __name__ == "__main__":
    main(sys.argv[1:])
