"""PowerSGD as `algorithm="powersgd"` in a DDP hook beside torch's own `powerSGD_hook`, on two gloo ranks.

    python -m bench powersgd [--mbit RATE] [--ms DELAY] [--repeats N] [--full] [--output DIR]

step_ms: forward, backward and update of 4.2 million parameters (16 layers of 512 × 512), median of interleaved turns,
on this machine and behind an emulated link, where one can be made. MB: what a rank sends in it; ours as counted, with
headers; of torch's hook and plain DDP the elements that they say to reduce, times 2(P − 1)/P as a ring sends them.
loss, accuracy: on the test digits after training the example's perceptron, mean of three seeds. Both compress the same
matrices from the first steps on, and have one bucket: with several, torch's hook starts its second sums as the first
ones end, in another order on each rank, which aborts or hangs over gloo.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slow_link import SlowLink, ThrottledLink, missing
from sparse_collectives import SparseHookState, sparse_hook
from sparse_collectives.prediction.plain_table import table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.form import asked, parser_of
from bench.real_ranks import found_by, process_group, tell, unhindered
from bench.record import record

COLUMNS = ("link", "way", "rank", "step_ms", "MB", "loss", "accuracy")
RANKS, SEEDS, TURN = (1, 2, 4), (0, 1, 2), 3
WAYS = [("plain", 0), *((way, rank) for rank in RANKS for way in ("torch", "ours"))]
EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_digits.py"
BATCH, RATE, MOMENTUM = 16, 0.1, 0.9

DENSE_STEPS = 2  # the fewest that torch's hook takes
AGAINST = "torch's powerSGD_hook, and plain DistributedDataParallel"


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = parser_of("powersgd", __doc__, full="20 epochs of digits instead of 6")
    parser.add_argument("--epochs", type=int, help="of digits; default 6, with --full 20")
    parser.add_argument("--mbit", type=float, default=100.0, help="link rate, default 100")
    parser.add_argument("--ms", type=float, default=1.0, help="one-way delay, default 1")
    parser.add_argument("--repeats", type=int, default=5, help=f"turns of {TURN} steps, default 5")
    options, facts = asked(parser, argv, epochs=(6, 20))
    rows = _launched(unhindered(2), "here", options.repeats, options.epochs)
    if lacking := missing():
        print(f"no link is emulated, so only this machine is measured: {'; '.join(lacking)}")
    else:
        link = SlowLink(ranks=2, mbit_per_second=options.mbit, milliseconds=options.ms)
        rows += _launched(link, f"{options.mbit:g} Mbit/s", options.repeats, 0)
    print(table(COLUMNS, [[_cell(row[name]) for name in COLUMNS] for row in rows]))
    record(options.output, "powersgd", rows, labels=COLUMNS[:3], values=("step_ms",), facts=facts, against=AGAINST)
    return 0


def _launched(link: SlowLink | ThrottledLink, name: str, repeats: int, epochs: int) -> list[dict[str, Any]]:
    """epochs: of digits."""
    with link as ranks:
        return [{"link": name, **row} for row in found_by(ranks, "bench.powersgd", repeats, epochs, mpi=False)]


def on_rank(repeats: int, epochs: int) -> None:
    """One rank's part; rank 0 prints a line of JSON for each row."""
    speeds = _speeds(repeats)
    for (way, rank), (taken, nbytes) in speeds.items():
        seconds = statistics.median(taken)
        row = {"way": way, "rank": rank, "step_ms": 1e3 * seconds, "MB": nbytes / 1e6, "loss": None, "accuracy": None}
        row["ms_samples"] = [1e3 * one for one in taken]
        if epochs:
            found = [_digits(way, rank, seed, epochs) for seed in SEEDS]
            row["loss"], row["accuracy"] = (statistics.mean(values) for values in zip(*found, strict=True))
            row |= {"loss_samples": [one[0] for one in found], "accuracy_samples": [one[1] for one in found]}
        if dist.get_rank() == 0:
            print(f"{way}, rank {rank}: {row['step_ms']:.0f} ms", flush=True)
            tell(row)


def _speeds(repeats: int) -> dict[tuple[str, int], tuple[list[float], float]]:
    """Seconds of all steps, and bytes of one, by way and rank; the ways take turns."""
    trainings = {}
    for way, rank in WAYS:
        torch.manual_seed(0)
        ddp, sent = _hooked(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))), way, rank)
        trainings[way, rank] = _steps(ddp, torch.randn(16, 512)), sent
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in trainings}
    nbytes: dict[tuple[str, int], float] = {}
    for _ in range(repeats + 1):  # in the first turn buckets are cut, and compressing begins
        for key, (steps, sent) in trainings.items():
            for place in range(TURN):
                dist.barrier()
                before, begin = sent(), time.perf_counter()
                next(steps)
                taken[key] += [time.perf_counter() - begin] if place else []  # others' data are in the caches
                nbytes[key] = sent() - before
    return {key: (times[TURN - 1 :], nbytes[key]) for key, times in taken.items()}


def _steps(ddp: DistributedDataParallel, batch: torch.Tensor) -> Iterator[None]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    while True:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        yield


def _hooked(model: nn.Module, way: str, rank: int) -> tuple[DistributedDataParallel, Callable[[], float]]:
    """The module, and how many bytes this rank has sent so far."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=64)
    if way == "ours":
        ours = SparseHookState(algorithm="powersgd", options={"rank": rank, "dense_steps": DENSE_STEPS})
        ddp.register_comm_hook(ours, sparse_hook)
        return ddp, lambda: float(ours.comm.bytes_sent)
    reduced = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4
    steps = iter(range(1, 1 << 40))
    if way == "plain":
        whole = sum(p.numel() for p in model.parameters())
        return ddp, lambda: next(steps) // 2 * whole * reduced  # asked before and after every step
    theirs = PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=DENSE_STEPS,
        min_compression_rate=1,
    )
    ddp.register_comm_hook(theirs, powerSGD_hook)
    return ddp, lambda: float(theirs.total_numel_after_compression) * reduced


def _digits(way: str, rank: int, seed: int, epochs: int) -> tuple[float, float]:
    """Loss and accuracy on the test set."""
    train_set, (images, labels) = (part.tensors for part in runpy.run_path(str(EXAMPLE))["digits"]())
    torch.manual_seed(seed)
    ddp, _ = _hooked(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), way, rank
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=MOMENTUM)
    batches = len(train_set[0]) // (BATCH * dist.get_world_size())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    for epoch in range(epochs):
        order = torch.randperm(len(train_set[0]), generator=torch.Generator().manual_seed(100 * seed + epoch))
        mine = order[dist.get_rank() :: dist.get_world_size()]
        for batch in mine[: batches * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(train_set[0][batch]), train_set[1][batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        logits = ddp.module(images)
    loss, right = nn.functional.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
    return float(loss), float(right)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        with process_group():
            on_rank(int(sys.argv[2]), int(sys.argv[3]))
    else:
        raise SystemExit(main(sys.argv[1:]))
