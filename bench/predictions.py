"""Is the advice right? Predicted and measured training steps on real ranks behind an emulated slow link.

    python -m bench predictions [--mbit RATE] [--ms DELAY] [--repeats N] [--full] [--output DIR]

Predicted: from α, β, selecting, merging and computing as measured by the same functions that `advise` uses, on the same
ranks. Measured: forward, backward and the step of a DistributedOptimizer without overlap, every algorithm and density
taking turns; medians over repeats of the slowest rank. The first choice is good if its measured step is within 10 %
of the best measured one; a prediction if it is within 20 %. Of ways that average models a step with an exchange is
shown, which one of `every` steps is; they are no choice here. With --full also 8 ranks (`many` in the .json), which are
gloo's, behind a slower link: MPI's ranks take a core each while they wait, and compute for the others' messages.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from communicators import Communicator, barrier, buckets_of
from data_parallel import DistributedOptimizer
from slow_link import open_link
from slow_link.throttled import behind_link
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction import Handling, measure_handling, measure_traffic, predict, slowest, step_seconds
from sparse_compress import TopK
from thinwire.advice.measuring import slowest_work
from thinwire.advice.own_work import measure_work
from thinwire.advice.ways import BY_NAME, Way
from torch import nn

from bench.real_ranks import found_by, tell
from bench.record import asked, parser_of, record, told, with_quantiles
from bench.turns import in_turns, seconds_of

COLUMNS = ("algorithm", "P", "density", "wire", "compute_ms", "predicted_ms", "measured_ms", "ratio", "every")
FIRST_CHOICE, STEP = 0.10, 0.20
DENSITIES = (0.01, 0.001)
FEWER_BYTES = "bf16-packed"
WIDTH = 1024
SAME = "diloco sync_every=30"  # whose exchange is another's
OTHERS = tuple(name for name, way in BY_NAME.items() if name != SAME and way.code and not way.quorum)
MANY_RANKS, MANY_MBIT, MANY_MS, MANY_LAYERS, MANY_REPEATS = 8, 10.0, 10.0, 1, 2
"""1 Gbit/s and 0.1 ms at a hundredth, and a million parameters."""
MANY_ALGORITHMS = ("dense", "gtopk", "spardl")

Case: TypeAlias = tuple[str, float, str]
"""Algorithm, density, wire."""
ALONE = ("alone", 1.0, "fp32")

AGAINST = "what advise predicts from α, β and the measured cost of selecting and merging"


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the tables; the exit status is 1 where a first choice is not good."""
    parser = parser_of("predictions", __doc__, full="8 layers instead of 2: 8.4 million parameters; and 8 ranks")
    parser.add_argument("--mbit", type=float, default=100.0, help="link rate, default 100")
    parser.add_argument("--ms", type=float, default=1.0, help="one-way delay, default 1")
    parser.add_argument("--repeats", type=int, default=5, help="default 5")
    parser.add_argument("--layers", type=int, help=f"of {WIDTH} × {WIDTH}; default 2, with --full 8")
    options = asked(parser, argv, layers=(2, 8))
    rows: list[dict[str, Any]] = []
    for size in (2, 4):
        with open_link(ranks=size, mbit_per_second=options.mbit, milliseconds=options.ms) as link:
            options.facts["link"] = link.describe()
            rows += found_by(link, on_rank, "mpi", options.repeats, options.layers, [*ALGORITHMS, *OTHERS], mpi=True)
    more: dict[str, Any] = {"many": _many()} if options.full else {}
    record(options, rows, labels=COLUMNS[:4], values=COLUMNS[5:7], against=AGAINST, shown=COLUMNS, **more)
    good = [_judged([row for row in rows if row["P"] == size]) for size in (2, 4)]
    return 0 if all(good) else 1


def _many() -> dict[str, Any]:
    """More ranks than cores: gloo's sleep while they wait, as MPI's do not, and a link so slow that nearly all do."""
    with open_link(ranks=MANY_RANKS, mbit_per_second=MANY_MBIT, milliseconds=MANY_MS) as link:
        rows = found_by(link, on_rank, "gloo", MANY_REPEATS, MANY_LAYERS, MANY_ALGORITHMS, mpi=False)
    link_told = f"{MANY_MBIT:g} Mbit/s and {MANY_MS:g} ms"
    return {"link": link_told, "rows": [with_quantiles(row) for row in told(rows, COLUMNS)], "samples": rows}


def on_rank(by: str, repeats: int, layers: int, names: Sequence[str]) -> None:
    """One rank's part, under mpiexec or in a process group; rank 0 tells each row."""
    if by == "mpi":
        import mpi4py.MPI  # noqa: F401 - what behind_link looks for
    torch.set_num_threads(1)
    comm = behind_link()
    cases = [case for name in names if name in ALGORITHMS for case in _cases(name, ALGORITHMS[name].selects)]
    steps = {ALONE: _alone(layers)} | {case: _training(layers, comm, *case) for case in cases}
    steps |= {(name, 1.0, "fp32"): _by_way(layers, comm, BY_NAME[name]) for name in names if name in BY_NAME}
    measured, taken = _interleaved(steps, comm, repeats)
    compute, numel = measured.pop(ALONE), layers * (WIDTH + 1) * WIDTH
    link = measure_traffic(comm)
    costs: dict[str, Any] = {"numel": numel, "device": torch.device("cpu"), "wires": [FEWER_BYTES]}
    handling = {d: measure_handling(comm, density=d, **costs) for d in DENSITIES}
    shapes = [p.shape for p in _model(layers)[0].parameters()]
    work = slowest_work(measure_work(shapes, torch.device("cpu")), comm)
    for case, seconds in measured.items():
        name, density, wire = case
        if name in BY_NAME:
            predicted = BY_NAME[name].predict(shapes, size=comm.size, link=link, work=work[name])
            step = compute + BY_NAME[name].every * predicted.seconds
        else:
            k, own = TopK(density).entries(numel), handling.get(density, Handling())
            predicted = predict(name, size=comm.size, numel=numel, k=k, link=link, handling=own, wire=wire)
            step = step_seconds(predicted, compute=compute)
        every = BY_NAME[name].every if name in BY_NAME else 1
        row = {"algorithm": name, "P": comm.size, "density": density, "wire": wire, "compute_ms": 1e3 * compute}
        row |= {"predicted_ms": 1e3 * step, "measured_ms": 1e3 * seconds, "ratio": step / seconds, "every": every}
        row |= {"ms_samples": [1e3 * one for one in taken[case]]}
        if comm.rank == 0:
            tell(row)


def _cases(algorithm: str, compresses: bool) -> list[Case]:
    if not compresses:
        return [(algorithm, 1.0, "fp32"), (algorithm, 1.0, "bf16")]
    return [*((algorithm, density, "fp32") for density in DENSITIES), (algorithm, DENSITIES[0], FEWER_BYTES)]


def _training(layers: int, comm: Communicator, algorithm: str, density: float, wire: str) -> Callable[[], None]:
    """A function that takes one step."""
    model, batch = _model(layers)
    settings: dict[str, Any] = {"algorithm": algorithm, "compressor": TopK(density), "wire": wire}
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), comm=comm, **settings)
    return partial(_step, model, batch, optimizer, optimizer.step)


def _by_way(layers: int, comm: Communicator, way: Way) -> Callable[[], None]:
    """A function that takes one step with an exchange."""
    model, batch = _model(layers)
    optimizer: Any = way.make(torch.optim.SGD(model.parameters(), lr=1e-3), model, comm, steps=0, every=1)
    exchange = getattr(optimizer, "average", lambda: None)
    return partial(_step, model, batch, optimizer, lambda: (optimizer.step(), exchange()))


def _alone(layers: int) -> Callable[[], None]:
    """A plain step, and the copies into a bucket and back that every step of a DistributedOptimizer makes."""
    model, batch = _model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    [bucket] = buckets_of(list(model.parameters()))
    flat = torch.empty(bucket.numel)

    def update() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bucket.scatter(bucket.gather(gradients, out=flat), gradients)
        optimizer.step()

    return partial(_step, model, batch, optimizer, update)


def _step(model: nn.Module, batch: torch.Tensor, optimizer: Any, update: Callable[[], object]) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    update()


def _model(layers: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), torch.randn(64, WIDTH)


def _interleaved(
    steps: dict[Case, Callable[[], None]], comm: Communicator, repeats: int
) -> tuple[dict[Case, float], dict[Case, list[float]]]:
    """Median seconds of every step on the slowest rank; all seconds of this one.

    Cases take turns of three steps, of which the first finds other cases' data in the caches and does not count: so it
    is in training.
    """

    def turn(step: Callable[[], None]) -> list[float]:
        return in_turns({"": partial(seconds_of, step)}, 2, before=partial(barrier, comm))[""]

    turns = in_turns({case: partial(turn, step) for case, step in steps.items()}, repeats)
    taken = {case: list(chain.from_iterable(found)) for case, found in turns.items()}
    medians = slowest([statistics.median(times) for times in taken.values()], comm)
    return dict(zip(steps, medians, strict=True)), taken


def _judged(rows: Sequence[dict[str, Any]]) -> bool:
    """Says how good the first choice and the predictions are; whether the first choice is."""
    rows = [row for row in rows if row["every"] == 1]
    first = min(rows, key=lambda row: row["predicted_ms"])
    best = min(rows, key=lambda row: row["measured_ms"])
    behind = first["measured_ms"] / best["measured_ms"] - 1
    within = sum(abs(row["ratio"] - 1) <= STEP for row in rows)
    print(
        f"P = {first['P']}: first choice {_called(first)}, {behind:.0%} behind the best measured, {_called(best)}; "
        f"{within} of {len(rows)} predictions within {STEP:.0%}"
    )
    return bool(behind <= FIRST_CHOICE)


def _called(row: dict[str, Any]) -> str:
    return f"{row['algorithm']} at density {row['density']:g} in {row['wire']}"
