"""What should I use? torch's ways to send less beside ours, on real gloo ranks behind the same emulated slow link.

    python -m bench peers [--rate RATE] [--delay DELAY] [--ranks P ...] [--repeats N] [--full] [--output DIR]

step_ms: of forward, backward and update of a million parameters (16 layers of 256 × 256), behind the link: the median
of turns of 4 steps, which the ways take by turns. accuracy: of the example's perceptron on the test digits, after as
many epochs each, without a link, mean of the seeds; one of the 360 images is 0.28 points. Sparse ones have the
settings that docs/guides/optimizers.md recommends: all in the first tenth of the steps, then 1 %, tiny tensors whole,
and momentum before the selection, or updates made ahead; step_ms is after the warm-up, whole_over_ddp with a tenth of
plain DDP's steps. Periodic ones average every 4 steps; PowerSGD has rank 4, and all have one bucket.
"""

import runpy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, UpdateOptimizer, sparse_hook
from local_sgd import LocalSGD, OverlapLocalSGD
from partial_collectives import EagerSGD
from slow_link import SlowLink, ThrottledLink
from slow_link.__main__ import add_link
from sparse_compress import WarmUp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from bench.real_ranks import behind, found_by, named, tell, unhindered
from bench.record import asked, parser_of, record
from bench.turns import in_turns, seconds_of

AGAINST = "torch's DistributedDataParallel, its bf16 and PowerSGD hooks, and PostLocalSGDOptimizer"
COLUMNS = ("way", "library", "P", "step_ms", "over_ddp", "whole_over_ddp", "accuracy")
EVERY, DENSITY, MOMENTUM, RATE, BATCH, LOW_RANK, TINY = 4, 0.01, 0.9, 0.1, 16, 4, 256
WARM_UP = 0.1
"""Of a training's steps, in which the sparse ways send all, as is recommended."""
LAYERS, WIDTH, TEST_IMAGES = 16, 256, 360
EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_digits.py"


class Start(NamedTuple):
    """Model, its optimizer, whose rate falls to nothing, what is to be closed, and how many steps send all."""

    model: nn.Module
    inner: torch.optim.SGD
    falling: LambdaLR
    exits: ExitStack
    warm: int


class Training(NamedTuple):
    """module: to call. zero_grad, updates: before and after backward, a step's rate included. finish: the mean.

    around: what forward and backward go inside.
    """

    module: nn.Module
    zero_grad: Callable[[], None]
    updates: Sequence[Callable[[], object]]
    finish: Callable[[], None] = lambda: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """One training step."""
        self.zero_grad()
        with self.around():
            loss(self.module).backward()  # type: ignore[no-untyped-call]
        for update in self.updates:
            update()


Way = Callable[[Start], Training]


def _by_hook(register: Callable[[DistributedDataParallel, int], None], momentum: float = MOMENTUM) -> Way:
    def way(start: Start) -> Training:
        ddp = DistributedDataParallel(start.model, bucket_cap_mb=64)
        register(ddp, start.warm)
        start.inner.param_groups[0]["momentum"] = momentum
        return Training(ddp, start.inner.zero_grad, (start.inner.step, start.falling.step))

    return way


def _sparse(algorithm: str) -> Way:
    """As docs/guides/optimizers.md has it for SGD under DDP."""

    def register(ddp: DistributedDataParallel, warm: int) -> None:
        names = ddp.module.named_parameters()
        density = WarmUp(DENSITY, steps=warm, stages=(1.0,))
        state = SparseHookState(
            density=density, algorithm=algorithm, momentum=MOMENTUM, dense_below=TINY, named_parameters=names
        )
        ddp.register_comm_hook(state, sparse_hook)

    return _by_hook(register, momentum=0.0)


def _updates(start: Start) -> Training:
    """As docs/guides/optimizers.md has it where DDP is left out."""
    model, density = start.model, WarmUp(DENSITY, steps=start.warm, stages=(1.0,))
    settings: dict[str, Any] = {"algorithm": "gtopk", "density": density, "dense_below": TINY}
    optimizer = UpdateOptimizer(start.inner, model.named_parameters(), **settings)
    return Training(model, optimizer.zero_grad, (optimizer.step, start.falling.step), around=optimizer.ahead)


def in_bf16(ddp: DistributedDataParallel, warm: int = 0) -> None:
    """By another name: torch refuses its hook over gloo, where it works."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        return bf16_compress_hook(state, bucket)

    hook.__annotations__ = {}  # which would have to be torch's own, and are strings here

    ddp.register_comm_hook(None, hook)


def _low_rank(ddp: DistributedDataParallel, warm: int) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=LOW_RANK, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook)


def _our_low_rank(ddp: DistributedDataParallel, warm: int) -> None:
    state = SparseHookState(algorithm="powersgd", options={"rank": LOW_RANK, "dense_steps": 2})
    ddp.register_comm_hook(state, sparse_hook)


def _post_local_sgd(start: Start) -> Training:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer  # importing it warns

    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=start.inner, averager=averager)

    def mean() -> None:
        for parameter in start.model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    return Training(start.model, optimizer.zero_grad, (optimizer.step, start.falling.step), mean)


def _periodic(kind: type[LocalSGD] | type[OverlapLocalSGD]) -> Way:
    def way(start: Start) -> Training:
        optimizer = kind(start.inner, sync_every=EVERY)
        updates = (optimizer.step, optimizer.average, start.falling.step)
        return Training(start.model, optimizer.zero_grad, updates, optimizer.finish)

    return way


def _eager(start: Start) -> Training:
    """Its rate falls by rounds, not by steps, as it asks for."""
    settings: dict[str, Any] = {"quorum": "majority", "scheduler": start.falling}
    optimizer = start.exits.enter_context(EagerSGD(start.inner, start.model.named_parameters(), **settings))
    return Training(start.model, optimizer.zero_grad, (optimizer.step,), optimizer.finish)


def _made(way: Way, model: nn.Module, steps: int, rate: float, exits: ExitStack, warm: int) -> Training:
    """Of so many steps, over which the rate falls to nothing, the first `warm` of them with all sent."""
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    return way(Start(model, inner, LambdaLR(inner, lambda step: max(0.0, 1 - step / steps)), exits, warm))


PLAIN = "plain DDP"
WAYS: dict[str, tuple[str, Way, str]] = {
    PLAIN: ("torch", _by_hook(lambda ddp, warm: None), "the network keeps up"),
    "bf16_compress_hook": ("torch", _by_hook(in_bf16), "half the bytes are few enough: nothing else changes"),
    "PowerSGD hook": (
        "torch",
        _by_hook(_low_rank),
        "most weights are large matrices; torch's needs one bucket",
    ),
    "PostLocalSGDOptimizer": ("torch", _post_local_sgd, "ranks may part for some steps"),
    "gtopk hook": ("thinwire", _sparse("gtopk"), "many ranks, synchronous steps, fewest bytes and rounds"),
    "gtopk updates, no DDP": (
        "thinwire",
        _updates,
        "the same, with Adam or clipping too; nothing overlaps with backward",
    ),
    "powersgd hook": ("thinwire", _by_hook(_our_low_rank), "the same, in any number of buckets"),
    "spardl hook": ("thinwire", _sparse("spardl"), "the same with larger k, where bytes count more than rounds"),
    "LocalSGD": ("thinwire", _periodic(LocalSGD), "ranks may part for some steps; resumable, any inner optimizer"),
    "OverlapLocalSGD": ("thinwire", _periodic(OverlapLocalSGD), "the same, and the exchange is to be hidden"),
    "EagerSGD, majority": ("thinwire", _eager, "ranks take unequal time, not here: it sends whole gradients"),
}


WARMED = {name for name in WAYS if name.startswith(("gtopk", "spardl"))}


def main(argv: Sequence[str] = ()) -> None:
    """Starts the ranks, prints the table."""
    parser = parser_of("peers", __doc__, full="P = 4 too, 20 epochs of 3 seeds instead of 6 of 1")
    add_link(parser)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="P", help="default 2; with --full 2 and 4")
    parser.add_argument("--epochs", type=int, help="of digits; default 6, with --full 20")
    parser.add_argument("--seeds", type=int, help="of digits; default 1, with --full 3")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help=f"turns of {EVERY} steps, default 5")
    options = asked(parser, argv, ranks=([2], [2, 4]), epochs=(6, 20), seeds=(1, 3))
    rows = []
    for size in options.ranks:
        link = behind(size, options.rate, options.delay)
        steps = _launched(link, "steps", options.repeats)
        learnt = _launched(unhindered(size), "learns", options.epochs, options.seeds)
        plain = statistics.median(steps[PLAIN])
        for way, (library, _, use) in WAYS.items():
            median = statistics.median(steps[way])
            warm = WARM_UP if way in WARMED else 0.0
            whole = warm * plain + (1 - warm) * median
            said = named(link, options.rate, options.delay)
            row: dict[str, Any] = {"way": way, "library": library, "use": use, "P": size, "link": said}
            row |= {"step_ms": 1e3 * median, "over_ddp": plain / median, "whole_over_ddp": plain / whole}
            row |= {"accuracy": statistics.mean(learnt[way]), "accuracy_samples": learnt[way]}
            row |= {"ms_samples": [1e3 * one for one in steps[way]]}
            rows.append(row)
    more = {"test_images": TEST_IMAGES, "epochs": options.epochs}
    record(options, rows, labels=("way", "P"), values=("over_ddp",), against=AGAINST, shown=COLUMNS, **more)


def _launched(link: SlowLink | ThrottledLink, part: str, *words: int) -> dict[str, list[float]]:
    with link as ranks:
        [found] = found_by(ranks, on_rank, part, words, mpi=False)
    by_way: dict[str, list[float]] = found
    return by_way


def _steps(repeats: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by way."""
    batch = torch.randn(BATCH, WIDTH)
    with ExitStack() as exits:
        trainings = {}
        for name, (_, way, _) in WAYS.items():
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
            trainings[name] = _made(way, model, EVERY * (repeats + 2), 1e-4, exits, EVERY)

        def turn(training: Training) -> None:
            for _ in range(EVERY):
                training.step(lambda module: module(batch).square().mean())

        calls = {name: partial(seconds_of, partial(turn, training)) for name, training in trainings.items()}
        taken = in_turns(calls, repeats, before=dist.barrier)  # at first buckets are cut, and compressing begins
        for training in trainings.values():
            training.finish()
    return {name: [seconds / EVERY for seconds in turns] for name, turns in taken.items()}


def _learns(epochs: int, seeds: int) -> dict[str, list[float]]:
    """Accuracy of each seed, by way."""
    found: dict[str, list[float]] = {}
    for name, (_, way, _) in WAYS.items():
        for seed in range(seeds):
            with ExitStack() as exits:
                found.setdefault(name, []).append(_accuracy(way, epochs, seed, exits))
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{name}, seed {seed}: {found[name][-1]:.1%}", flush=True)
    return found


def _accuracy(way: Way, epochs: int, seed: int, exits: ExitStack) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    batches = list(_batches(epochs, seed))
    training = _made(way, model, len(batches), RATE, exits, max(1, round(WARM_UP * len(batches))))
    for images, labels in batches:
        training.step(lambda module, x=images, y=labels: nn.functional.cross_entropy(module(x), y))  # type: ignore[misc]
    training.finish()
    test_images, test_labels = runpy.run_path(str(EXAMPLE))["digits"]()[1].tensors
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def _batches(epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's."""
    images, labels = runpy.run_path(str(EXAMPLE))["digits"]()[0].tensors
    count = len(images) // (BATCH * dist.get_world_size())
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100 * seed + epoch))
        mine = order[dist.get_rank() :: dist.get_world_size()]
        yield from ((images[batch], labels[batch]) for batch in mine[: count * BATCH].view(-1, BATCH))


def on_rank(part: str, words: Sequence[int]) -> None:
    """One rank's part; rank 0 tells what was found."""
    found = _steps(*words) if part == "steps" else _learns(*words)
    if dist.get_rank() == 0:
        tell(found)
