"""Ways to train that select no entries: what each sends, what it costs a rank, how it is made, and what to write.

A way is advised where the record of `python -m bench convergence` knows how it learns, with the settings that stand
here. Those of the periodic ones: MuLoCo (Thérien et al., 2025), Streaming DiLoCo (Douillard et al., 2025), SparseLoCo
(Sarfi et al., 2025), post-local SGD (Lin et al., 2020), Overlap-Local-SGD (Wang et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from communicators import Link
from data_parallel import DistributedOptimizer, SparseHookState, powersgd_sent
from local_sgd import DiLoCo, LocalSGD, OverlapLocalSGD, SparseLoCo, StreamingDiLoCo
from partial_collectives import EagerSGD
from sparse_collectives import Prediction, Traffic, prediction
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Shapes = Sequence[torch.Size]
Sent = Callable[[int, int, Shapes], Traffic]
InDDP = Callable[[DistributedDataParallel, Optimizer, int], Optimizer]
ADAMS, ALL = ("adam", "adamw"), ("sgd", "adam", "adamw", "muon")
WARM_UP = 10
"""A tenth of the steps is dense before PowerSGD begins, and before models are averaged every few steps."""
BETA1 = 0.5
"""Adam's, at most, beside gradients that come late (`python -m bench convergence`: 0.9 learns worse)."""
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
MEAN = partial(torch.optim.SGD, lr=1.0)
"""Outer optimizer that takes the mean as it is."""
CHUNK, SPARSELOCO_DENSITY = 4096, 0.021
BITS = {"int8": 8, "int2": 2}
FRAGMENTS = 4
FIRST_BUCKET = 1 << 20
"""Bytes of DDP's first bucket, where it was given no size."""
TORCH_BF16, TORCH_POWERSGD = "torch-bf16", "torch-powersgd"
SIDE = 1024
MOST_MATRICES = 1024
"""Parameters of which no shapes are known are taken for matrices of so many rows and columns.

Of more than so many matrices larger ones are taken instead: every prediction looks at each.
"""


class Work(NamedTuple):
    """Seconds of a rank's own work in one exchange, per element: fixed, and per rank that takes part."""

    fixed: float = 0.0
    per_rank: float = 0.0


@dataclass(frozen=True)
class Way:
    """One way, with its settings.

    sent: (rank, size, shapes) -> traffic of an exchange. make: (optimizer, model, comm, steps=, every=) -> the wrapped
    optimizer; steps: of the training. code: the same as text, "" where it is for DDP alone: `make` then does the same
    work, as far as that is not torch's sums. in_ddp: (ddp, optimizer, steps) -> the optimizer to step, where DDP has a
    hook for it; hook: the same as text. note: what else it asks of the training, of MEGABYTES of gradients. every:
    steps between two exchanges. density: share of elements that is sent. early: whether buckets travel during backward.
    quorum: arrivals that begin a partial allreduce. gathers: whether a rank gets a message of each other one, so that
    its work grows with the ranks. hides: share of the steps from one exchange to the next during which it goes on.
    fragments: of which each exchange is one. dense_share: share of the steps that are dense first. rate: factor for the
    learning rate of Adam. optimizers: inner ones that it is for.
    """

    algorithm: str
    sent: Sent
    make: Callable[..., Optimizer]
    code: str
    in_ddp: InDDP | None = None
    hook: str = ""
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1
    density: float = 1.0
    early: bool = False
    quorum: str = ""
    gathers: bool = False
    hides: float = 0.0
    fragments: int = 1
    dense_share: float = 0.0
    rate: float = 1.0
    optimizers: tuple[str, ...] = ALL

    @property
    def name(self) -> str:
        """Algorithm and options, as in `Prediction.variant`."""
        return " ".join([self.algorithm, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def ddp_only(self) -> bool:
        """Whether it is a hook of DDP and nothing else: its sums are torch's."""
        return not self.code

    def predict(self, shapes: Shapes, *, size: int, link: Link, work: Work) -> Prediction:
        """A step's share of the exchange, as the busiest rank sees it; backward hides none of its own work.

        link: of torch's sums where it is a hook of DDP.
        """
        numel, ranks = elements(shapes), prediction.ranks_of_interest(size)
        sent = [self.sent(rank, size, shapes) for rank in ranks]
        found = prediction.network_seconds(sent, [0.0] * len(ranks), link)
        beside = min(max(0, each.messages - each.rounds) for each in sent)
        found["latency"] -= beside * prediction.hidden_latency(link)
        return Prediction(
            self.algorithm,
            numel,
            self.density,
            "fp32",
            nbytes=round(found["nbytes"] / self.every),
            rounds=found["rounds"],
            compression=numel * (work.fixed + work.per_rank * size) / self.every,
            options=self.options,
            **{name: found[name] / self.every for name in ("latency", "transfer", "merging")},
        )


def _compressed(algorithm: str, sent: Sent, *, rank: int | None = None, **wire: str) -> Way:
    """A compressor of whole gradients, or their sum; rank: PowerSGD's."""
    options = {} if rank is None else {"rank": rank}

    def settings(steps: int) -> dict[str, Any]:
        warm_up = {"options": options | {"dense_steps": steps // WARM_UP}} if options else {}
        return {"algorithm": algorithm, **warm_up, **wire}

    def make(
        optimizer: Optimizer, model: nn.Module, comm: Any, *, steps: int, every: int, overlap: bool = False
    ) -> Optimizer:
        named, how = model.named_parameters(), settings(steps)
        return DistributedOptimizer(optimizer, named, comm=comm, overlap=overlap, **how)

    def in_ddp(ddp: DistributedDataParallel, optimizer: Optimizer, steps: int) -> Optimizer:
        SparseHookState.for_model(ddp, optimizer, **settings(steps))
        return optimizer

    warm_up = f', options={{"rank": {rank}, "dense_steps": STEPS}}' if options else ""
    code = f'algorithm="{algorithm}"{warm_up}{_code(wire)}'
    whole = f"DistributedOptimizer(OPTIMIZER, model.named_parameters(), {code})"
    hook = f"state = SparseHookState.for_model(ddp, optimizer, {code})"
    dense_share = 0.0 if rank is None else 1 / WARM_UP
    return Way(algorithm, sent, make, whole, in_ddp, hook, options=options, early=True, dense_share=dense_share)


def _torch_powersgd(rank: int) -> Way:
    """Torch's hook, its work taken to be that of ours. One bucket, as below, hides nothing behind backward."""

    def sent(me: int, size: int, shapes: Shapes) -> Traffic:
        """Three sums: vectors and small matrices, P of all other matrices n × m, and Q."""
        matrices = [(shape[0], shape.numel() // shape[0]) for shape in shapes if shape.numel()]
        low = [(n, m) for n, m in matrices if (n + m) * min(n, m, rank) < n * m]
        dense = elements(shapes) - sum(n * m for n, m in low)
        p, q = sum(n * min(n, m, rank) for n, m in low), sum(m * min(n, m, rank) for n, m in low)
        return Traffic.total(*(torch_sum(4 * numel, size) for numel in (dense, p, q)))

    def in_ddp(ddp: DistributedDataParallel, optimizer: Optimizer, steps: int) -> Optimizer:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        _refuse_buckets(ddp)
        how: dict[str, Any] = {"start_powerSGD_iter": max(2, steps // WARM_UP), "min_compression_rate": 1}
        ddp.register_comm_hook(PowerSGDState(ddp.process_group, rank, **how), powerSGD_hook)
        return optimizer

    made = "PowerSGDState(None, matrix_approximation_rank={}, start_powerSGD_iter=STEPS, min_compression_rate=1)"
    hook = f"ddp.register_comm_hook({made.format(rank)}, powerSGD_hook)"
    note = (
        "Both are in torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook. Over gloo make it ddp = "
        "DistributedDataParallel(model, bucket_cap_mb=MEGABYTES): one bucket for all gradients."
    )
    settings: dict[str, Any] = {"options": {"rank": rank}, "dense_share": 1 / WARM_UP}
    return Way(TORCH_POWERSGD, sent, _compressed("powersgd", sent, rank=rank).make, "", in_ddp, hook, note, **settings)


def bucket_of_all(nbytes: int) -> int:
    """DDP's `bucket_cap_mb` with which gradients of so many bytes are one bucket."""
    return nbytes // 2**20 + 1


def _refuse_buckets(ddp: DistributedDataParallel) -> None:
    """Raises ValueError where torch's PowerSGD hook may hang: over gloo each bucket's sums start as others end."""
    nbytes = sum(p.nbytes for p in ddp.parameters() if p.requires_grad)
    most = FIRST_BUCKET if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    if nbytes >= most and dist.get_backend(ddp.process_group) != "nccl":
        raise ValueError(
            f"{nbytes / 2**20:.1f} MB of gradients are several buckets of {most / 2**20:g} MB, whose sums torch's "
            "PowerSGD hook starts in an order of its own on each rank: make it DistributedDataParallel(model, "
            f"bucket_cap_mb={bucket_of_all(nbytes)})"
        )


def _torch_bf16() -> Way:
    """Torch's hook, by another name: torch refuses its own over gloo, where it works."""

    def make(optimizer: Optimizer, model: nn.Module, comm: Any, *, steps: int, every: int) -> Optimizer:
        def rounded(*_: Any) -> None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.copy_(p.grad.bfloat16())

        optimizer.register_step_pre_hook(rounded)
        return optimizer

    def in_ddp(ddp: DistributedDataParallel, optimizer: Optimizer, steps: int) -> Optimizer:
        ddp.register_comm_hook(ddp.process_group, lambda state, bucket: bf16_compress_hook(state, bucket))
        return optimizer

    hook = "ddp.register_comm_hook(ddp.process_group, lambda state, bucket: bf16_compress_hook(state, bucket))"
    note = "It is in torch.distributed.algorithms.ddp_comm_hooks.default_hooks; over gloo torch takes it in a lambda."
    sent = lambda rank, size, shapes: torch_sum(2 * elements(shapes), size)  # noqa: E731
    return Way(TORCH_BF16, sent, make, "", in_ddp, hook, note, early=True)


def _torch_local(ours: Way) -> Way:
    """Torch's post-local SGD: DDP's gradients at first, then averages of models, with the same work as ours."""

    def in_ddp(ddp: DistributedDataParallel, optimizer: Optimizer, steps: int) -> Optimizer:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer  # imported here, since that warns

        group, first = ddp.process_group, steps // WARM_UP
        state = post.PostLocalSGDState(group, None, first, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        ddp.register_comm_hook(state, post.post_localSGD_hook)
        averager = PeriodicModelAverager(period=4, warmup_steps=first, process_group=group)
        return PostLocalSGDOptimizer(optim=optimizer, averager=averager)

    state = "PostLocalSGDState(None, None, STEPS, post_local_gradient_allreduce=False)"
    averager = "PeriodicModelAverager(4, warmup_steps=STEPS)"
    hook = (
        f"ddp.register_comm_hook({state}, post_localSGD_hook); optimizer = PostLocalSGDOptimizer(optimizer, {averager})"
    )
    note = (
        "They are in torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook, .model_averaging.averagers and "
        "torch.distributed.optim. Ranks' models differ between averages: before an evaluation, a checkpoint and at the "
        "end average_parameters(ddp.parameters(), None), of .model_averaging.utils."
    )
    sent = lambda rank, size, shapes: torch_sum(4 * elements(shapes), size)  # noqa: E731
    settings: dict[str, Any] = {"options": ours.options, "every": ours.every, "dense_share": ours.dense_share}
    return Way("torch-local-sgd", sent, ours.make, "", in_ddp, hook, note, **settings)


def for_late_gradients(optimizer: Optimizer) -> None:
    """Sets what learns better, as late gradients act like momentum: Nesterov's form of SGD's, less of Adam's.

    Of Adam's also that which a OneCycleLR sets. Groups for which it was done already stay as they are.
    """
    for group in [group for group in optimizer.param_groups if "for_late_gradients" not in group]:
        group["for_late_gradients"] = True
        if "nesterov" in group:
            group["nesterov"] = bool(group["momentum"] and not group["dampening"])
        if "betas" in group:
            first, *others = group["betas"]
            group["betas"] = (min(first, BETA1), *others)
            for name in {"base_momentum", "max_momentum"} & group.keys():
                group[name] = min(group[name], BETA1)


def _eager(quorum: Literal["solo", "majority"]) -> Way:
    """A partial allreduce of gradients, which does not wait for late ranks."""

    def make(
        optimizer: Optimizer, model: nn.Module, comm: Any, *, steps: int, every: int, scheduler: Any = None
    ) -> Optimizer:
        for_late_gradients(optimizer)
        optimizer.register_load_state_dict_post_hook(for_late_gradients)
        return EagerSGD(optimizer, model.named_parameters(), comm=comm, scheduler=scheduler, quorum=quorum)

    code = f'EagerSGD(OPTIMIZER, model.named_parameters(), quorum="{quorum}")'
    note = (
        "Give a learning-rate scheduler as its scheduler=, or to apply(), and do not step it. Call "
        "optimizer.synchronize() before an evaluation, a checkpoint or any other collective, and optimizer.finish() at "
        f"the end. Late gradients act like momentum: take SGD's with nesterov=True, of Adam a first beta of {BETA1:g}."
    )
    return Way(f"eager-{quorum}", _partial_round_sent, make, code, note=note, quorum=quorum, optimizers=("sgd", *ADAMS))


def _partial_round_sent(rank: int, size: int, shapes: Shapes) -> Traffic:
    """The word that a round begins, all ranks' headers, of a few bytes each, and the sum."""
    word = Traffic.of_bodies(0, 1, 1)
    return Traffic.total(word, Traffic.allgather([0] * size, rank), _model_sent(rank, size, shapes))


def _power_sgd_sent(columns: int, rank: int, size: int, shapes: Shapes) -> Traffic:
    return powersgd_sent(rank, size, shapes, columns)


def _model_sent(rank: int, size: int, shapes: Shapes) -> Traffic:
    return Traffic.allreduce(4 * elements(shapes), rank, size, 4)


def _beside_weights(long: Traffic, rank: int, size: int) -> Traffic:
    """A compressed mean, and the sum of the ranks' weights, which are under way at once."""
    short = Traffic.allreduce(16, rank, size, 8)
    return Traffic(long.nbytes + short.nbytes, long.messages + short.messages, max(long.rounds, short.rounds))


def _averaging(
    algorithm: str,
    kind: Callable[..., Optimizer],
    every: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    compress: str = "",
    sent: Sent | None = None,
    warms_up: bool = False,
    fragments: int = 1,
    **more: Any,
) -> Way:
    """Averages models, or in turn their fragments, after every so many steps; where it warms up, after each at first.

    settings, compress: of the wrapper. sent: by default the mean of a fragment, compressed or not.
    """
    compressed = {"compress": compress} if compress else {}

    def mean_sent(rank: int, size: int, shapes: Shapes) -> Traffic:
        part = [torch.Size((elements(shapes) // fragments,))]
        if not compress:
            return _model_sent(rank, size, part)
        return _beside_weights(Traffic.quantised(elements(part), rank, size, bits=BITS[compress]), rank, size)

    def given(every: int) -> dict[str, Any]:
        streamed = {"fragments": fragments, "delay": every // 2} if fragments > 1 else {}
        return {**streamed, **settings, **compressed}

    def make(optimizer: Optimizer, model: nn.Module, comm: Any, *, steps: int, every: int) -> Optimizer:
        blocks = (lambda step: every if step >= steps // WARM_UP else 1) if warms_up else fragments * every
        return kind(optimizer, model=model, comm=comm, sync_every=blocks, **given(every))

    blocks = f"lambda step: {every} if step >= STEPS else 1" if warms_up else fragments * every
    code = f"{kind.__name__}(OPTIMIZER, model=model, sync_every={blocks}{_code(given(every))})"
    options = {"sync_every": fragments * every, **compressed}
    more["dense_share"] = 1 / WARM_UP if warms_up else 0.0
    return Way(algorithm, sent or mean_sent, make, code, options=options, every=every, fragments=fragments, **more)


def _code(settings: Mapping[str, Any]) -> str:
    """Further arguments of a call, as text."""
    return "".join(f", {name}={_value(given)}" for name, given in settings.items())


def _value(given: Any) -> str:
    if isinstance(given, partial):
        return f"partial(torch.optim.{given.func.__name__}{_code(given.keywords)})"
    return f'"{given}"' if isinstance(given, str) else str(given)


def _sparse_loco_sent(rank: int, size: int, shapes: Shapes) -> Traffic:
    rows, left = divmod(elements(shapes), CHUNK)
    sizes = [(rows, CHUNK), (1, left)] if left else [(rows, CHUNK)]
    kept = [(many, max(1, round(SPARSELOCO_DENSITY * of))) for many, of in sizes]
    block = sum(4 * many + 7 * -(-many * count // 4) for many, count in kept)
    return _beside_weights(Traffic.allgather([block] * size, rank), rank, size)


LOCAL = _averaging("local-sgd", LocalSGD, 4, warms_up=True)
OUTERS: dict[str, Any] = {"optimizers": (*ADAMS, "muon")}
STREAMED: dict[str, Any] = {**OUTERS, "fragments": FRAGMENTS, "hides": 0.5, "rate": 0.5}
SPARSE: dict[str, Any] = {"optimizers": ADAMS, "density": SPARSELOCO_DENSITY, "gathers": True}
WAYS: tuple[Way, ...] = (
    _compressed("dense-int8", lambda rank, size, shapes: Traffic.quantised(elements(shapes), rank, size)),
    *(_compressed("powersgd", partial(_power_sgd_sent, columns), rank=columns) for columns in (2, 4)),
    _torch_bf16(),
    *map(_torch_powersgd, (1, 2, 4, 8)),
    LOCAL,
    _averaging("local-sgd", DiLoCo, 4, {"outer": MEAN}, compress="int8", warms_up=True),
    _torch_local(LOCAL),
    _averaging("overlap-local-sgd", OverlapLocalSGD, 4, hides=1.0),
    _averaging("diloco", DiLoCo, 5, {"outer": OUTER}, **OUTERS),
    _averaging("diloco", DiLoCo, 30, {"outer": OUTER}, rate=0.5, **OUTERS),
    _averaging("diloco", DiLoCo, 30, {"outer": OUTER}, compress="int2", rate=0.5, **OUTERS),
    _averaging("streaming-diloco", StreamingDiLoCo, 8, {"outer": OUTER}, **STREAMED),
    _averaging("streaming-diloco", StreamingDiLoCo, 8, {"outer": OUTER}, compress="int2", **STREAMED),
    _averaging("sparseloco", SparseLoCo, 5, {"density": SPARSELOCO_DENSITY}, sent=_sparse_loco_sent, **SPARSE),
    _eager("solo"),
    _eager("majority"),
)
BY_NAME = {way.name: way for way in WAYS}
DENSE = _compressed("dense", _model_sent)
"""Our sum of whole gradients, of which each rank's work is measured as that of all others."""
MADE = {**BY_NAME, DENSE.name: DENSE, "dense in bf16": _compressed("dense", _model_sent, wire="bf16")}
"""What selects no entries, by the name of its `Prediction`."""
WHOLE = (DENSE.name, TORCH_BF16)
"""What sends whole gradients, rounded at most: no record is asked how it learns."""


def torch_sum(nbytes: int, size: int) -> Traffic:
    """Gloo's ring: twice P - 1 turns of two messages, the word that asks and the bytes; NCCL's has as many bytes."""
    return Traffic(round(2 * nbytes * (size - 1) / size), 4 * (size - 1), 4 * (size - 1))


def elements(shapes: Shapes) -> int:
    """Number of elements of all."""
    return sum(shape.numel() for shape in shapes)


def assumed_shapes(numel: int) -> tuple[torch.Size, ...]:
    """Square matrices, one of the rows that are left, and a vector of the last elements."""
    side = max(SIDE, math.isqrt(numel // MOST_MATRICES))
    matrices, left = divmod(numel, side * side)
    rest = torch.Size((left // side, side)), torch.Size((left % side,))
    return (*[torch.Size((side, side))] * matrices, *(shape for shape in rest if shape.numel()))
