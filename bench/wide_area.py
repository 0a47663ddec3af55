"""Unequal links: do real ranks behind them take the time that a simulated world says?

    python -m bench wide-area [--ports NAME ...] [--numel N] [--repeats N] [--full] [--output DIR]

ports: as of `python -m slow_link --rank`; "by 8" has eight connections to each peer. what: an exchange of so many
float32; "one way" is rank 0's to the last rank, and of a path that loses packets it is held against what TCP (Reno)
fills by the formula of Mathis et al. (1997), over 100 ms with ten times as many elements in three repeats; "by rate" is
the dense sum with the shares that `measure_paths` and `shares_by_rate` find. measured: seconds of gloo ranks behind the
emulated links, the median of repeats of the slowest rank; simulated: virtual seconds of the same call with the same
ports, and gloo's handshake where ranks send and receive at once. good: within 15 %, of lossy paths within 40 %, as rare
losses leave much to chance; other congestion controls than Reno, and several connections, are there to be compared.
over_bound: measured over what no dense sum can be faster than, by bytes and rates: everybody's elements must leave him,
the sum must reach him, and all ports together carry 2(P − 1) times all.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from communicators import (
    Communicator,
    Payload,
    Round,
    SimulatedWorld,
    allreduce,
    as_communicator,
    barrier,
    measure_paths,
    run,
    schedules,
    shares_by_rate,
)
from slow_link import Port, SlowLink, missing, ports_of
from slow_link.check import TOLERANCE
from slow_link.simulated import paths_of
from sparse_collectives import sparse_allreduce
from sparse_compress import topk

from bench.real_ranks import found_by, tell
from bench.record import asked, parser_of, record
from bench.turns import seconds_of

RANKS, SPARSE, ROUGH = 4, 100, 0.40
UPLINKS, LONGER, FEWER = "8 uplinks of 5 to 100", 10, 3
FAR = {
    f"100 ms, 0.1 % lost, {name}{by}": (name, connections)
    for name in ("reno", "cubic", "bbr")
    for by, connections in (("", 1), (" by 8", 8))
}
"""Congestion controls, and connections to each peer."""
USUAL = Port(up=100, down=100, delay=1)
PORTS = {
    "equal": [],
    "one slow": ["3:up=5mbit,down=50mbit,delay=30ms"],
    UPLINKS: [f"{rank}:up={5 + 95 * rank / 7:.0f}mbit" for rank in range(8)],
    "homes": ["all:home,loss=0%,jitter=0ms"],
    "two regions": ["all:two-regions"],
    "jitter": ["all:up=20mbit,down=20mbit,delay=20ms,jitter=5ms"],
    "lossy, 50 ms": ["all:delay=50ms,loss=0.1%"],
    "lossy, 20 ms": ["all:delay=20ms,loss=0.5%"],
    **{name: ["all:delay=100ms,loss=0.1%"] for name in FAR},
}
QUICK, DENSE = ("equal", "one slow"), ("dense", "by rate")
COLUMNS = ("ports", "what", "numel", "measured", "simulated", "ratio", "good", "over_bound")
AGAINST = "a simulated world with the same ports, and TCP's formula where packets are lost"


def main(argv: Sequence[str] = ()) -> int:
    """Measures, prints the table; the exit status is 1 where a ratio is not good, 2 where there is no link."""
    parser = parser_of("wide-area", __doc__, full="all ports, a million elements")
    parser.add_argument(
        "--ports", nargs="+", choices=PORTS, metavar="NAME", help=", ".join(map(repr, PORTS)).replace("%", "%%")
    )
    parser.add_argument("--numel", type=int, help="default 100,000; full 1,000,000")
    parser.add_argument("--repeats", type=int, default=5, help="of each exchange; default 5")
    options = asked(parser, argv, ports=(QUICK, list(PORTS)), numel=(100_000, 1_000_000))
    if lacking := missing():
        print(f"no link is emulated here: {'; '.join(lacking)}")
        return 2
    rows: list[dict[str, Any]] = []
    for name in options.ports:
        ports = ports_of(PORTS[name], 8 if name == UPLINKS else RANKS, USUAL)
        lossy = any(port.loss for port in ports)
        congestion, connections = FAR.get(name, ("reno", 1))
        numel, repeats = options.numel, options.repeats
        if name in FAR:
            numel, repeats = LONGER * numel, min(FEWER, repeats)
        with SlowLink(ranks=len(ports), ports=ports, congestion=congestion) as link:
            found = found_by(link, on_rank, numel, repeats, lossy, connections, mpi=False)
        for what in found[0]:
            seconds = [max(turn) for turn in zip(*(one[what] for one in found), strict=True)]
            measured, simulated = statistics.median(seconds), _simulated(ports, what, numel)
            ratio, near = measured / simulated, ROUGH if lossy else TOLERANCE
            row = {"ports": name, "what": what, "numel": numel, "measured": measured, "simulated": simulated}
            row |= {"over_bound": measured / _bound(ports, 4 * numel)} if what in DENSE else {}
            good = abs(ratio - 1) <= near if (congestion, connections) == ("reno", 1) else None
            rows.append(row | {"ratio": ratio, "good": good, "seconds_samples": seconds})
    more: dict[str, Any] = {"lines": PORTS}
    record(options, rows, labels=COLUMNS[:2], values=("ratio",), against=AGAINST, shown=COLUMNS, **more)
    return 1 if any(row["good"] is False for row in rows) else 0


def _calls(comm: Communicator, numel: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(comm.rank)
    x, shares = torch.randn(numel), shares_by_rate(measure_paths(comm).slower)
    sent = topk(x, numel // SPARSE)
    gtopk: Callable[[], object] = partial(sparse_allreduce, sent, comm, algorithm="gtopk", k=numel // SPARSE)
    return {
        "one way": lambda: run(_one_way(comm, x), comm, facts="one way"),
        "dense": partial(allreduce, x, comm, native=False),
        "by rate": lambda: run(schedules.by_rate_allreduce(x, comm.rank, comm.size, shares), comm, facts="by rate"),
        "gtopk": gtopk,
    }


def _one_way(comm: Communicator, x: torch.Tensor) -> Any:
    payload = Payload.of(x.view(torch.uint8))
    if comm.rank == 0:
        yield Round(sends={comm.size - 1: payload})
    if comm.rank == comm.size - 1:
        yield Round(recvs={0: payload.nbytes})


def on_rank(numel: int, repeats: int, lossy: bool, connections: int) -> None:
    """One rank's part, in a process group: seconds of each call. Of lossy paths only that of one message is told."""
    comm = as_communicator(None, connections=connections)
    found: dict[str, list[float]] = {}
    for what, call in _calls(comm, numel).items():
        if not lossy or what == "one way":
            found[what] = [_seconds(comm, call) for _ in range(repeats + 1)][1:]
    tell(found)


def _seconds(comm: Communicator, call: Callable[[], object]) -> float:
    """Of this rank, which the barrier may let go later than others."""
    barrier(comm)
    return seconds_of(call, clock=comm.clock)


def _bound(ports: Sequence[Port], nbytes: int) -> float:
    """Seconds that a dense sum takes at least, headers left out."""
    ways = [[port.up for port in ports], [port.down for port in ports]]
    together = max(2 * (len(ports) - 1) / sum(rates) for rates in ways)
    return 8e-6 * nbytes * max(1 / min(map(min, ways)), together)


def _simulated(ports: Sequence[Port], what: str, numel: int) -> float:
    world = SimulatedWorld(len(ports), paths_of(ports, handshake=what != "one way"))
    return max(world.run(lambda comm: _seconds(comm, _calls(comm, numel)[what])))
