"""Measuring what the cost model needs, on the ranks and the device that will train.

Times are by the communicator's clock, so in a simulated world the link costs what it charges, and work nothing.
Collective; every rank returns the slowest one's.
"""

import statistics
from collections.abc import Callable, Collection, Generator
from typing import Any

import torch
from communicators import Communicator, Link, Payload, Round, Schedule, allgather, barrier, measure_link, run, schedules
from sparse_compress import ErrorFeedback, Largest, SparseVector, TopK
from torch import Tensor

from sparse_collectives.algorithms.table import ALGORITHMS, resolve
from sparse_collectives.prediction.cost import Handling, on_wire

MOST_ELEMENTS = 1 << 22
"""Selecting is measured on at most so many elements: beyond any cache, and the cost of an element is the same."""
MOST_MERGED = 1 << 17
"""Merging is measured on at most so many entries of a rank: the cost of an entry is the same."""
SHORT_ROUNDS = 16
REPEATS = 5


def measure_traffic(comm: Communicator) -> Link:
    """α and β while all ranks send and receive at once, as they do in a collective.

    Each repeat is ⌈log P⌉ rounds in which rank r sends to r + 1, r + 2, r + 4, … (mod P). Where it is slower than
    `measure_link`, whose pairs play ping-pong, ranks share what carries them: a switch, a card, the cores.
    """
    return measure_link(comm, seconds=lambda nbytes: _round_seconds(comm, nbytes))


def measure_handling(
    comm: Communicator,
    *,
    numel: int,
    density: float,
    device: torch.device,
    size: int | None = None,
    wires: Collection[str] = ("fp32",),
) -> Handling:
    """Selecting, by the compressor and as algorithms prescribe it, and merging, while all ranks do it at once.

    size: for how many ranks algorithms select, where that is not the communicator's. wires: on which they merge.
    """
    compressor, size = TopK(density), size or comm.size
    gradient = torch.randn(min(numel, MOST_ELEMENTS), dtype=torch.float32, device=device)
    k = compressor.entries(gradient.numel())

    def compressing(select: Callable[[Tensor], SparseVector] | None) -> float:
        """Seconds per element of a step besides the exchange: select, take back what was dropped, write the mean."""
        feedback, mean = ErrorFeedback(compressor), torch.zeros_like(gradient)
        nothing = SparseVector.empty(gradient.numel(), gradient.dtype, device=device)

        def step() -> None:
            sparse = feedback.compress("gradient", gradient, select=select)
            feedback.restore("gradient", nothing)
            sparse.put(mean, divisor=size)

        return seconds_of(step, comm, device) / gradient.numel()

    prescribed = {
        name: compressing(entry.select(gradient, comm.rank, size, k, entry.initial_state()))
        for name, entry in ALGORITHMS.items()
        if entry.prescribes
    }
    part = gradient[: max(1, int(MOST_MERGED / density))]
    pair, merged = [part, torch.randn_like(part)], compressor.entries(part.numel())
    merge = {
        on_wire(name, wire): _merging(name, wire, pair, merged, comm)
        for name, entry in ALGORITHMS.items()
        for wire in (wires if entry.selects else ())
    }
    return agreed(Handling(compressing(None), prescribed, merge), comm)


def agreed(handling: Handling, comm: Communicator) -> Handling:
    """The slowest rank's costs. All ranks give the same names, in any order."""
    prescribed, merge = dict(sorted(handling.prescribed.items())), dict(sorted(handling.merge.items()))
    costs = iter(slowest([handling.compress, *prescribed.values(), *merge.values()], comm))
    return Handling(next(costs), {name: next(costs) for name in prescribed}, {name: next(costs) for name in merge})


def slowest(values: list[float], comm: Communicator) -> list[float]:
    """The largest of each value over all ranks, so that all ranks compute with the same."""
    gathered = allgather(torch.tensor(values, dtype=torch.float64, device=comm.device), comm)
    largest: list[float] = torch.stack(gathered).max(dim=0).values.tolist()
    return largest


def seconds_of(call: Callable[[], object], comm: Communicator, device: torch.device) -> float:
    """Median seconds of a call that all ranks make at once; a first one warms up."""
    clock = clock_of(comm, device)

    def sample() -> float:
        begin = clock()
        call()
        return clock() - begin

    return _median(sample, comm)


def _median(sample: Callable[[], float], comm: Communicator) -> float:
    """Median of samples that all ranks take at once, in a row; a first one warms up.

    One barrier for all of them: behind a link of 50 ms, one for each would take most of the time of a measurement.
    """
    barrier(comm)
    samples = [sample() for _ in range(REPEATS + 1)]
    return statistics.median(samples[1:])


def clock_of(comm: Communicator, device: torch.device) -> Callable[[], float]:
    """Seconds, read when the device is idle."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return comm.clock()

    return read


def _merging(algorithm: str, wire: str, gradients: list[Tensor], k: int, comm: Communicator) -> float:
    """Seconds per entry that the algorithm merges: what rank 0 of 2 computes in a call amid training.

    gradients: those of the two ranks, 1-D; selection is not counted.
    """
    entry, clock = resolve(algorithm, size=2, wire=wire), clock_of(comm, gradients[0].device)
    states = [entry.initial_state() for _ in gradients]

    def started(rank: int) -> Generator[Any, Any, Any]:
        state, gradient = states[rank], gradients[rank]
        sparse = (entry.select(gradient, rank, 2, k, state) if entry.prescribes else Largest(k))(gradient)
        return entry.schedule(sparse, rank, 2, k, **({} if state is None else {"state": state}))

    seconds = _median(lambda: _seconds_of_first(started(0), started(1), clock), comm)
    return seconds / max(entry.merged(0, 2, k, gradients[0].numel()), 1)


def _seconds_of_first(
    mine: Generator[Any, Any, Any], theirs: Generator[Any, Any, Any], clock: Callable[[], float]
) -> float:
    """Seconds inside the first of two schedules, which exchange as many rounds with each other."""
    seconds, to_me, to_them = 0.0, None, None
    while True:
        begin = clock()
        sent = _step(mine, to_me)
        seconds += clock() - begin
        back = _step(theirs, to_them)
        if sent is None or back is None:
            return seconds
        to_me, to_them = _delivered(back, to=0), _delivered(sent, to=1)


def _step(schedule: Generator[Any, Any, Any], received: dict[int, Payload] | None) -> Any:
    try:
        return schedule.send(received)
    except StopIteration:
        return None


def _delivered(sent: Round, to: int) -> dict[int, Payload]:
    return {1 - to: sent.sends[to].clone()} if to in sent.sends else {}


def _round_seconds(comm: Communicator, nbytes: int) -> float:
    """Median seconds of a round of bodies of nbytes.

    Short ones come in a row, so that it does not matter who leaves the barrier last. Each call has a payload of its
    own: its slot carries the call's number, and the last one may still be on its way.
    """
    distances = list(schedules.powers_of_two(below=comm.size)) * (1 if nbytes else SHORT_ROUNDS)

    def shifts() -> Schedule[None]:
        payload = Payload.of(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
        for distance in distances:
            to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
            yield Round({to: payload}, {source: payload.nbytes})

    seconds = seconds_of(lambda: run(shifts(), comm, facts=f"shifts({nbytes})"), comm, comm.device)
    return seconds / len(distances)
