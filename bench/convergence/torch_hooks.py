"""torch's own DistributedDataParallel and its communication hooks, on real gloo ranks: they take no simulated ones.

Seeds, batches, rates and clipping are those of the simulated ranks, so the scores are comparable: plain DDP ("torch
DDP") ends with the bits of "dense" on two ranks, since both halve the same sum. On more ranks the order of the sum
differs, and scores agree within rounding.
PowerSGD has its first tenth of the steps dense, as torch's documentation advises, and one bucket: with several, torch's
hook starts sums in another order on each rank. Local SGD is torch's PostLocalSGDOptimizer, a tenth of the steps
synchronous; DiLoCo is torchft's, with the settings of ours, and one sum a parameter, as it does by default. Bytes are
not counted but reckoned: elements that are reduced, times 2(P − 1)/P in 2(P − 1) messages as a ring sends them.
BatchNorm's running statistics are rank 0's here, which DDP copies to all; with simulated ranks they are each rank's
own. Rank 0 is the one that is scored, and training does not read them: that makes no difference.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.convergence import periodic
from bench.convergence.rank import Point, Training, curve_of
from bench.convergence.tasks import DEVICE, TASKS
from bench.convergence.ways import TORCHFT, WARM_UP, Run, inner_of
from bench.real_ranks import found_by, tell, unhindered
from bench.torchft_manager import manager_of

LOW_RANK, LOCAL = "torch PowerSGD hook", "torch PostLocalSGD"
PERIODS = {LOCAL: 4, TORCHFT: periodic.TAU}
"""Steps between two averages."""
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
    made = training(run, task.model().to(DEVICE), task.rates[run.optimizer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        curve = curve_of(run, made, rank=dist.get_rank(), size=dist.get_world_size(), clip_after=run.clip)
    tell([dist.get_rank(), curve])


def training(run: Run, model: nn.Module, rate: float) -> Training:
    """One rank's, in the default process group."""
    if run.way == TORCHFT:
        return _diloco(run, model, rate)
    inner = inner_of(run, model, rate)
    if run.way == LOCAL:
        return _post_local_sgd(run, model, inner)
    one_bucket: dict[str, Any] = {"bucket_cap_mb": 64} if run.way.startswith(LOW_RANK) else {}
    ddp = DistributedDataParallel(model, **one_bucket)
    return _reckoned(model, ddp, inner, inner.step, HOOKS[run.way](ddp, run, _numel(model)))


def _reckoned(
    model: nn.Module,
    calls: nn.Module,
    optimizer: torch.optim.Optimizer,
    take_step: Callable[[], object],
    reduced: Reduced,
    **more: Any,
) -> Training:
    """A training whose steps are counted, and what a ring sends for as many."""
    size, taken = dist.get_world_size(), [0]

    def step() -> None:
        take_step()
        taken[0] += 1

    def sent() -> tuple[int, int]:
        nbytes, reductions = reduced(taken[0])
        return round(2 * (size - 1) / size * nbytes), 2 * (size - 1) * reductions

    return Training(model, calls=calls, optimizer=optimizer, step=step, sent=sent, **more)


def _post_local_sgd(run: Run, model: nn.Module, inner: torch.optim.Optimizer) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer  # importing it warns

    warm = run.steps // WARM_UP
    ddp = DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, warm, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
    ddp.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(optim=inner, averager=PeriodicModelAverager(PERIODS[LOCAL], warmup_steps=warm))

    def reduced(steps: int) -> tuple[float, int]:
        rounds = min(steps, warm) + max(0, steps - warm) // PERIODS[LOCAL]
        return 4 * _numel(model) * rounds, rounds

    return _reckoned(model, ddp, inner, optimizer.step, reduced, **_averaged(model))


def _diloco(run: Run, model: nn.Module, rate: float) -> Training:
    """Has the outer optimizer and the share of the rate that ours has. What its manager sends is not reckoned."""
    from torchft.local_sgd import DiLoCo

    inner, outer = inner_of(run, model, periodic.SHARES[run.optimizer] * rate), periodic.OUTER(model.parameters())
    exits = ExitStack()
    exits.callback(_take_mean, model)  # once torchft's parts are closed
    manager = exits.enter_context(manager_of(model))
    exits.enter_context(DiLoCo(manager, [model], inner, outer, sync_every=PERIODS[TORCHFT], pin_memory=False))

    def reduced(steps: int) -> tuple[float, int]:
        rounds = steps // PERIODS[TORCHFT]
        return 4 * _numel(model) * rounds, rounds

    return _reckoned(model, model, inner, inner.step, reduced, **_averaged(model) | {"finish": exits.close})


def _numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _averaged(model: nn.Module) -> dict[str, Any]:
    """What agrees on a model where every rank has one of its own."""
    return {"agreed": partial(_mean_for_now, model), "finish": partial(_take_mean, model)}


def _take_mean(model: nn.Module) -> None:
    """Replaces the parameters by the mean of all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@contextmanager
def _mean_for_now(model: nn.Module) -> Iterator[None]:
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    _take_mean(model)
    yield
    for parameter, before in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(before)


def _plain(ddp: DistributedDataParallel, run: Run, numel: int) -> Reduced:
    return lambda steps: (4 * numel * steps, steps)


def _in_bf16(ddp: DistributedDataParallel, run: Run, numel: int) -> Reduced:
    """In a lambda: torch refuses its hook itself over gloo, where it works."""
    ddp.register_comm_hook(ddp.process_group, lambda state, bucket: bf16_compress_hook(state, bucket))
    return lambda steps: (2 * numel * steps, steps)


def _low_rank(ddp: DistributedDataParallel, run: Run, numel: int, *, rank: int) -> Reduced:
    dense = max(2, run.steps // WARM_UP)
    how: dict[str, Any] = {"start_powerSGD_iter": dense, "min_compression_rate": 1, "random_seed": run.seed}
    state = PowerSGDState(None, matrix_approximation_rank=rank, **how)
    ddp.register_comm_hook(state, powerSGD_hook)

    def reduced(steps: int) -> tuple[float, int]:
        whole = min(steps, dense)
        return 4 * numel * whole + 4 * state.total_numel_after_compression, whole + 3 * (steps - whole)

    return reduced


HOOKS: dict[str, Callable[[DistributedDataParallel, Run, int], Reduced]] = {
    "torch DDP": _plain,
    "torch bf16 hook": _in_bf16,
    LOW_RANK: partial(_low_rank, rank=2),
    **{f"{LOW_RANK} rank {rank}": partial(_low_rank, rank=rank) for rank in (1, 4, 8)},
}
