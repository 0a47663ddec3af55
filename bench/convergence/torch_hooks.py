"""torch's own DistributedDataParallel and its communication hooks, on real gloo ranks: they take no simulated ones.

Seeds, batches, rates and clipping are those of the simulated ranks, so the scores are comparable: plain DDP ("torch
DDP") ends with the bits of "dense" on two ranks, since both halve the same sum. On more ranks the order of the sum
differs, and scores agree within rounding.
PowerSGD has the rank that `algorithm="powersgd"` has by default, and its first tenth of the steps dense, as torch's
documentation advises. All have one bucket: with several, torch's PowerSGD hook starts sums in another order on each
rank. Bytes are not counted but reckoned: elements that are reduced, times 2(P − 1)/P in 2(P − 1) messages as a ring
sends them. BatchNorm's running statistics are rank 0's here, which DDP copies to all; with simulated ranks they are
each rank's own. Rank 0 is the one that is scored, and training does not read them, so that makes no difference.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.convergence.rank import Point, Training, curve_of
from bench.convergence.tasks import TASKS
from bench.convergence.ways import MOMENTUM, WARM_UP, Run
from bench.peers import in_bf16
from bench.real_ranks import found_by, tell, unhindered

LOW_RANK = 2
SECONDS = 1800  # that a training may take

Reduced = Callable[[int], tuple[float, int]]
"""Bytes of all that was reduced in so many steps, before a ring multiplies them, and in how many reductions."""


def curves(run: Run) -> list[list[Point]]:
    """Of every rank, each a process on this machine."""
    with unhindered(run.ranks) as ranks:
        found = found_by(ranks, on_rank, asdict(run), mpi=False, timeout=SECONDS)
    return [curve for _, curve in sorted(found)]


def on_rank(asked: dict[str, Any]) -> None:
    """One rank's part, in a process group. asked: the fields of a `Run`."""
    run = Run(**asked)
    torch.manual_seed(run.seed)
    task = TASKS[run.task]
    made = _training(run, task.model(), task.rates[run.optimizer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        curve = curve_of(run, made, rank=dist.get_rank(), size=dist.get_world_size(), clip_after=run.clip)
    tell([dist.get_rank(), curve])


def _training(run: Run, model: nn.Module, rate: float) -> Training:
    inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if run.optimizer == "sgd":
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    ddp, size, taken = DistributedDataParallel(model, bucket_cap_mb=64), dist.get_world_size(), [0]
    numel = sum(p.numel() for p in ddp.parameters())
    reduced = HOOKS[run.way](ddp, run, numel)

    def step() -> None:
        inner.step()
        taken[0] += 1

    def sent() -> tuple[int, int]:
        nbytes, reductions = reduced(taken[0])
        return round(2 * (size - 1) / size * nbytes), 2 * (size - 1) * reductions

    return Training(model, calls=ddp, optimizer=inner, step=step, sent=sent)


def _plain(ddp: DistributedDataParallel, run: Run, numel: int) -> Reduced:
    return lambda steps: (4 * numel * steps, steps)


def _in_bf16(ddp: DistributedDataParallel, run: Run, numel: int) -> Reduced:
    in_bf16(ddp)
    return lambda steps: (2 * numel * steps, steps)


def _low_rank(ddp: DistributedDataParallel, run: Run, numel: int) -> Reduced:
    dense = max(2, run.steps // WARM_UP)
    how: dict[str, Any] = {"start_powerSGD_iter": dense, "min_compression_rate": 1, "random_seed": run.seed}
    state = PowerSGDState(None, matrix_approximation_rank=LOW_RANK, **how)
    ddp.register_comm_hook(state, powerSGD_hook)

    def reduced(steps: int) -> tuple[float, int]:
        whole = min(steps, dense)
        return 4 * numel * whole + 4 * state.total_numel_after_compression, whole + 3 * (steps - whole)

    return reduced


HOOKS: dict[str, Callable[[DistributedDataParallel, Run, int], Reduced]] = {
    "torch DDP": _plain,
    "torch bf16 hook": _in_bf16,
    "torch PowerSGD hook": _low_rank,
}
