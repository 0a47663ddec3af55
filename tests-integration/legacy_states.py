"""States that earlier releases saved, and what became of the trainings.

`python tests-integration/legacy_states.py NAME` writes legacy/NAME.zip with this tree's code; others stay as they are.
Numbers are small multiples of powers of two: their sums are exact, so that bits are the same on every machine.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from communicators import CollectiveError, SimulatedWorld, barrier
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, sparse_hook
from local_sgd import DiLoCo, LocalSGD, SparseLoCo, StreamingDiLoCo
from partial_collectives import EagerSGD
from sparse_compress import ErrorFeedback, TopK
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.run import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).with_name("legacy")
RANKS = 2
SAVED, END = 5, 9
STEPS, STORED = 6, 4
"""Steps of a run, and of them those that were stored when it broke off."""


def integers(*shape, seed):
    return ((torch.arange(torch.Size(shape).numel()) * 7 + seed * 11) % 19 - 9.0).reshape(shape)


class Scores(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(5))

    def forward(self, a, b):
        return (self.a * a).sum() + (self.b * b).sum()


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.5, **{"momentum": 0.5, **options})


def outer(parameters):
    return sgd(parameters, nesterov=True)


PERIODIC = {
    "local-sgd": lambda inner, **given: LocalSGD(inner, sync_every=3, **given),
    "diloco": lambda inner, **given: DiLoCo(inner, sync_every=3, outer=outer, **given),
    "streaming-diloco": lambda inner, **given: StreamingDiLoCo(inner, sync_every=4, fragments=2, outer=outer, **given),
    "sparseloco": lambda inner, **given: SparseLoCo(inner, sync_every=3, density=0.25, **given),
}
OPTIMIZERS = {
    "optimizer": lambda inner, named, comm: DistributedOptimizer(
        inner(momentum=0), named, comm=comm, compressor=TopK(0.25), algorithm="gtopk", momentum=0.5
    ),
    "optimizer-spardl": lambda inner, named, comm: DistributedOptimizer(
        inner(), named, comm=comm, compressor=TopK(0.25), algorithm="spardl", options={"teams": 2}
    ),
    "update-optimizer": lambda inner, named, comm: UpdateOptimizer(
        inner(), named, comm=comm, density=0.25, algorithm="topk-allgather"
    ),
    "eager-sgd": lambda inner, named, comm: EagerSGD(inner(), named, comm=comm, quorum="solo"),
}


def stepped(name, comm, saved):
    """One rank's states after END steps, or after SAVED; from what was saved, the steps in between."""
    model = Scores()

    def inner(**options):
        return sgd(model.parameters(), **options)

    if name in PERIODIC:
        optimizer = PERIODIC[name](inner(), comm=comm, model=model)
    else:
        optimizer = OPTIMIZERS[name](inner, model.named_parameters(), comm)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(SAVED, END) if saved is not None else range(SAVED):
        comm.elapse(1e-3 * (1 + comm.rank))
        optimizer.zero_grad()
        model(*(integers(*p.shape, seed=step + 3 * comm.rank) for p in model.parameters())).backward()
        optimizer.step()
        if name in PERIODIC:
            optimizer.average()
    if name == "eager-sgd":
        optimizer.synchronize()
    state = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    barrier(comm)
    if name == "eager-sgd":
        optimizer.close()
    return state


def hooked(saved):
    """Does as `stepped`, with DDP's hook on the one rank of the default group."""
    model = Scores()
    optimizer, ddp = sgd(model.parameters(), momentum=0), DistributedDataParallel(model)
    state = SparseHookState(named_parameters=model.named_parameters(), density=0.25, momentum=0.5)
    ddp.register_comm_hook(state, sparse_hook)
    if saved is not None:
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["hook"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(SAVED, END) if saved is not None else range(SAVED):
        optimizer.zero_grad()
        ddp(*(integers(*p.shape, seed=step) for p in model.parameters())).backward()
        optimizer.step()
    return copied({"model": model.state_dict(), "hook": state.state_dict(), "optimizer": optimizer.state_dict()})


def fed_back(saved):
    """Does as `stepped`, with an ErrorFeedback alone; "model" is the sum of what it sent."""
    feedback = ErrorFeedback(TopK(0.25), momentum=0.5)
    total = torch.zeros(24)
    if saved is not None:
        feedback.load_state_dict(saved["feedback"])
        total = saved["model"]["total"].clone()
    for step in range(SAVED, END) if saved is not None else range(SAVED):
        total += feedback.compress("a", integers(24, seed=step)).to_dense()
    return copied({"model": {"total": total}, "feedback": feedback.state_dict()})


RUNS = {
    "run-dense": "--algorithm dense",
    "run-gtopk": "--algorithm gtopk --density 0.25",
    "run-diloco": "--algorithm diloco --sync-every 3 --outer-rate 0.5 --outer-momentum 0.5",
    "run-eager": "--algorithm eager-solo --no-nesterov",
}
ALONE = {"error-feedback": fed_back, "hook": hooked}
CASES = [*PERIODIC, *OPTIMIZERS, *ALONE, *RUNS]


class StoppedRunError(BaseException):
    """Ends a run in the middle, as kill -9 of all its ranks would."""


class Task:
    """Scores of integer points, of which every step moves the model by exact numbers."""

    train_size, test_size = 24, 8

    def __init__(self, ends):
        self.model = nn.Linear(6, 3)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.points, self.left = integers(32, 6, seed=1), ends

    def loss(self, indices, generator):
        self.left -= 1
        if self.left < 0:
            raise StoppedRunError
        return (self.model(self.points[indices]) * integers(len(indices), 3, seed=2)).sum() / 4

    def score(self, indices):
        return self.model(self.points[self.train_size + indices]).double().sum().reshape(1)

    def metrics(self, sums):
        return {"test_loss": sums.item()}


def trained(name, folder, *, steps=STEPS, resume=False):
    """A run of six steps on two ranks, which breaks off after so many; every second one is stored."""
    app = App(module="scores", models={"linear": ""}, datasets={"points": ""}, build=lambda *_: Task(steps))
    words = f"{RUNS[name]} --output {folder} --batch-size 4 --max-epochs 2 --lr 0.5 --momentum 0.5"
    words += " --lr-schedule constant --checkpoint-every 2 --keep 1" + " --resume" * resume
    options = parse(words.split(), app, world_size=RANKS)
    SimulatedWorld(RANKS, own_generators=True).run(lambda comm: run(app, options, comm))


def copied(state):
    """Saves and loads a state, as plain values and tensors."""
    return torch.load(io.BytesIO(as_file(state)), weights_only=True)


def as_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def continued(name, saved):
    """States of every rank after the last step, from those after SAVED; from the beginning with None."""
    if name in ALONE:
        return [ALONE[name](None if saved is None else saved[0])]
    return SimulatedWorld(RANKS).run(lambda comm: stepped(name, comm, None if saved is None else saved[comm.rank]))


def save(file):
    """Writes what every case saves in the middle, and its models at the end."""
    with (
        zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED) as archive,
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # a run records the name of its own folder
    ):
        for name in CASES:
            if name not in RUNS:
                saved = continued(name, None)
                archive.writestr(f"{name}.pt", as_file(saved))
                archive.writestr(f"{name}-end.pt", as_file([state["model"] for state in continued(name, saved)]))
                continue
            with contextlib.suppress(StoppedRunError, CollectiveError):  # the other ranks notice
                trained(name, Path(name), steps=SAVED)
            for path in sorted(path for path in Path(name).rglob("*") if path.is_file()):
                archive.write(path)
            trained(name, Path(f"{name}-whole"))
            archive.write(f"{name}-whole/model.pt", f"{name}-end.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save(FOLDER / f"{sys.argv[1]}.zip")
    dist.destroy_process_group()
