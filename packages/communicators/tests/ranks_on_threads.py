"""Ranks that are threads of this process, over a transport of queues: what every transport gets, without a network."""

import math
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from communicators.background.transport import SIGNAL_BYTES, Pending, SignalLine, Transport
from communicators.background.transport_communicator import TransportCommunicator


class Network:
    """Queues of messages by (sender, receiver, tag), and of control messages. They take `delay` s."""

    delay = 0.0

    def __init__(self, size):
        self.size = size
        self.messages, self.lock = {}, threading.Lock()
        self.control = [queue.SimpleQueue() for _ in range(size)]
        self.signals = [queue.SimpleQueue() for _ in range(size)]
        self.duplicates = {}

    def duplicate(self, number):
        """The same for every rank that asks."""
        with self.lock:
            return self.duplicates.setdefault(number, type(self)(self.size))

    def queue(self, *key):
        with self.lock:
            return self.messages.setdefault(key, queue.SimpleQueue())


class Threads(Transport):
    """One rank; `nap_error` is raised once, `read_error` always, where they are set."""

    threaded = outlives_ranks = True
    device = torch.device("cpu")

    def __init__(self, network, rank):
        self.network, self.rank, self.size = network, rank, network.size
        self.read_error = self.nap_error = None
        self.is_closed = False

    def post(self, call, action, device):
        for peer, payload in action.sends.items():
            call.stamp(payload)
            self.network.queue(self.rank, peer, call.tag(peer, call.sent)).put(self.sent(payload))
        return Waiting(
            call, {p: self.network.queue(p, self.rank, call.tag(p, call.heard)) for p in action.recvs}, action
        )

    def sent(self, payload):
        return time.monotonic() + self.network.delay, payload.clone()

    def send_control(self, peer, message):
        self.network.control[peer].put(message)

    def read_control(self):
        if self.read_error is not None:
            raise self.read_error
        messages = []
        while not self.network.control[self.rank].empty():
            messages.append(self.network.control[self.rank].get())
        return messages

    def nap(self, seconds):
        if (error := self.nap_error) is not None:
            self.nap_error = None
            raise error
        super().nap(seconds)

    def duplicate(self, patience):
        self.duplicates += 1
        return Threads(self.network.duplicate(self.duplicates), self.rank)

    def signal_line(self):
        self.line = ThreadsSignalLine(self.network, self.rank)
        return self.line

    def close(self):
        self.is_closed = True


class ThreadsSignalLine(SignalLine):
    """A message is sent once its receiver has taken it out of its queue."""

    def __init__(self, network, rank):
        self.network, self.rank, self.in_flight, self.is_closed = network, rank, {}, False

    def send(self, peer, message):
        assert self.sent(peer)
        self.in_flight[peer] = threading.Event()
        self.network.signals[peer].put((self.rank, message.ljust(SIGNAL_BYTES, b"\0"), self.in_flight[peer]))

    def sent(self, peer):
        return peer not in self.in_flight or self.in_flight[peer].is_set()

    def received(self):
        messages = []
        while not self.network.signals[self.rank].empty():
            source, message, taken = self.network.signals[self.rank].get()
            messages.append((source, message))
            taken.set()
        return messages

    def close(self):
        assert not self.is_closed
        self.is_closed = True


class Waiting(Pending):
    def __init__(self, call, queues, action):
        self.call, self.queues, self.action, self.arrivals = call, queues, action, {}
        self.due = {}

    def done(self):
        for peer in self.missing():
            if peer not in self.due and not self.queues[peer].empty():
                self.due[peer] = self.queues[peer].get()
            due, payload = self.due.get(peer, (math.inf, None))
            if time.monotonic() >= due:
                self.arrivals[peer] = payload
        return not self.missing()

    def received(self):
        for peer, payload in self.arrivals.items():
            self.call.accept(peer, payload, self.action.recvs[peer])
        return self.arrivals

    def missing(self):
        return sorted(set(self.queues) - set(self.arrivals))

    def cancel(self):
        pass


def ranks(size):
    network = Network(size)
    return [TransportCommunicator(Threads(network, rank)) for rank in range(size)]


def on_all(comms, call):
    """What call(comm) gives, or raises, on each rank."""

    def caught(comm):
        try:
            return call(comm)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(caught, comms))


def soon(condition):
    """Whether it comes true while the engine's thread goes on."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    return condition()
