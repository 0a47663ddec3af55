"""Trainings by every kind of optimizer, for `check_elastic_laws`.

Each kind's own laws: ranks that come to the end have the same parameters, in all bits; so have all ranks after an
exchange that ends with the same model everywhere; and a sample is in the model once an epoch, or was in the hand of a
rank that died. Where an exchange overlaps the next block, and between two meetings of `EagerSGD`, a sample may also be
lost, or come twice: `docs/guides/elastic.md` says when.
"""

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from communicators import Communicator, Elastic
from communicators.elastic.testing import Life, Training
from data_parallel import DistributedOptimizer, UpdateOptimizer
from local_sgd import BMUF, EASGD, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo, StreamingDiLoCo
from partial_collectives import EagerSGD, PartialAllreduce
from torch import Tensor, nn

SAMPLES, BATCH, EPOCHS, EVERY = 64, 16, 2, 2
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01)


@dataclass(frozen=True)
class Kind:
    """Way to train.

    make: optimizer of a model over a world. alike: whether all ranks hold the same model after each exchange. exact:
    whether every sample is in the model once, or in the hand of a rank that died.
    """

    make: Callable[[nn.Module, Elastic], Any]
    alike: bool = True
    exact: bool = True


def _gradients(model: nn.Module, world: Elastic, **options: Any) -> Any:
    return DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), comm=world, **options)


def _updates(model: nn.Module, world: Elastic, **options: Any) -> Any:
    return UpdateOptimizer(ADAM(model.parameters(), betas=(0.0, 0.99)), model.named_parameters(), comm=world, **options)


def _periodic(make: Callable[..., Any], model: nn.Module, world: Elastic, **options: Any) -> Any:
    return make(SGD(model.parameters()), model=model, sync_every=EVERY, comm=world, **options)


def _eager(model: nn.Module, world: Elastic, **options: Any) -> Any:
    return EagerSGD(SGD(model.parameters()), model.named_parameters(), comm=world, **options)


KINDS = {
    "dense": Kind(partial(_gradients, algorithm="dense")),
    "gtopk": Kind(partial(_gradients, algorithm="gtopk", density=0.2)),
    "spardl": Kind(partial(_gradients, algorithm="spardl", density=0.2)),
    "oktopk": Kind(partial(_gradients, algorithm="oktopk", density=0.2)),
    "topk-allgather updates": Kind(partial(_updates, algorithm="topk-allgather", density=0.2)),
    "local-sgd": Kind(partial(_periodic, LocalSGD)),
    "local-sgd int8": Kind(partial(_periodic, LocalSGD, compress="int8")),
    "bmuf": Kind(partial(_periodic, BMUF)),
    "slowmo": Kind(partial(_periodic, SlowMo)),
    "diloco": Kind(partial(_periodic, DiLoCo)),
    "easgd": Kind(partial(_periodic, EASGD), alike=False, exact=False),
    "cocod": Kind(partial(_periodic, CoCoDSGD), alike=False, exact=False),
    "overlap-local-sgd": Kind(partial(_periodic, OverlapLocalSGD), alike=False, exact=False),
    "streaming-diloco": Kind(partial(_periodic, StreamingDiLoCo, fragments=2, delay=1), alike=False, exact=False),
    "diloco by rounds": Kind(partial(_periodic, DiLoCo, allreduce=PartialAllreduce), alike=False, exact=False),
    "streaming-diloco by rounds": Kind(
        partial(_periodic, StreamingDiLoCo, fragments=2, delay=1, allreduce=partial(PartialAllreduce, compress="int4")),
        alike=False,
        exact=False,
    ),
    "eager": Kind(_eager, exact=False),
}


@dataclass(frozen=True)
class ByOptimizer(Training):
    """Training by one of `KINDS`."""

    name: str
    timeout = 1.0

    def train(self, comm: Communicator, world: Elastic, life: Life) -> None:
        kind, model = KINDS[self.name], nn.Linear(6, 4)
        _draw(model)
        optimizer = kind.make(model, world)
        notes = life.notes = {"held": [], "used": [], "bits": {}, "final": None}
        exchanges = _exchanges(optimizer)
        for samples in world.deal(range(SAMPLES), batch_size=BATCH, epochs=EPOCHS, collate_fn=list):
            life.begin_step(comm, world, amid=bool(notes["held"]) or not kind.alike)
            notes["held"] += samples
            began = world.clock()
            _take_step(model, optimizer, samples, life.step)
            life.seconds.append(world.clock() - began)
            life.step += 1
            if (now := _exchanges(optimizer)) != exchanges:
                exchanges, notes["used"], notes["held"] = now, notes["used"] + notes["held"], []
                if kind.alike:
                    notes["bits"][now] = _bits(model)
        if world.leaving:
            life.end = "left"
            return
        if hasattr(optimizer, "finish"):
            optimizer.finish()
        notes["used"], notes["held"] = notes["used"] + notes["held"], []
        notes["final"], life.end = _bits(model), "done"
        world.close()

    def check(self, lives: list[Life]) -> None:
        finals = {life.notes["final"] for life in lives if life.end == "done"}
        assert len(finals) <= 1, f"agreement: {len(finals)} models at the end"
        bits: dict[int, int] = {}
        for life in lives:
            own = list(life.notes.get("bits", {}).items())
            for number, found in own if life.end in ("done", "left") else own[:-1]:
                assert bits.setdefault(number, found) == found, f"agreement: parameters differ after exchange {number}"
        if KINDS[self.name].exact and finals:
            self._check_samples(lives)

    def _check_samples(self, lives: list[Life]) -> None:
        used = Counter(sample for life in lives for sample in life.notes.get("used", ()))
        held = Counter(sample for life in lives for sample in life.notes.get("held", ()))
        most = max(len(members) for life in lives for _, members in life.groups)
        twice = [sample for sample, count in used.items() if count > EPOCHS]
        assert not twice, f"samples: {twice} are in the model too often"
        lacks = sum(max(0, EPOCHS - used[sample] - held[sample]) for sample in range(SAMPLES))
        assert lacks < EPOCHS * most, f"samples: {lacks} were never taken, more than {most} ranks cannot share"


def _draw(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))


def _take_step(model: nn.Module, optimizer: Any, samples: list[int], step: int) -> None:
    inputs = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(sample)) for sample in samples])
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    if hasattr(optimizer, "average"):
        optimizer.average()
    elif isinstance(optimizer, EagerSGD) and step % EVERY:
        optimizer.synchronize()


def _exchanges(optimizer: Any) -> int:
    """Number of exchanges that stand, alike on all ranks."""
    if isinstance(optimizer, EagerSGD):
        return optimizer.applied
    stats = optimizer.stats()
    return int(stats["boundaries"] if "boundaries" in stats else stats["steps"])


def _bits(model: nn.Module) -> int:
    flat: Tensor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return zlib.crc32(flat.numpy().tobytes())
