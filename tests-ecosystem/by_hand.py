"""The loop that every framework's is compared with, in bits: plain DistributedDataParallel, and our hook by hand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, UpdateOptimizer, sparse_hook
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES, RATE = 16, 12, 0.1
SETTINGS = {"density": 0.05, "momentum": 0.9}
UPDATES = {"steps": 48, "density": 0.05}
AHEAD = "DDP exchanges nothing; same bits as a loop by hand with ahead(), resumed or not"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def images_of(rank):
    """Handwritten digits, 8×8 pixels in [0, 1]; each rank its own."""
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    mine = slice(rank * BATCH * BATCHES, (rank + 1) * BATCH * BATCHES)
    return TensorDataset(images[mine], labels[mine])


def loader():
    """In the same order every time, so that a run that goes on sees what one without a stop sees."""
    return DataLoader(images_of(dist.get_rank()), batch_size=BATCH)


def loss_of(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def all_alike(model):
    """The replicas have not drifted apart."""
    for p in bits(model):
        other = p.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, p)


def step(optimizer, scaler):
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def trained_by_hand(*, epochs=2, accumulate=1, autocast=None, scaler=None, settings=SETTINGS):
    """The parameters that plain DDP with the hook ends with."""
    model = network()
    ddp = DistributedDataParallel(model)
    if settings is not None:
        names = model.named_parameters()
        ddp.register_comm_hook(SparseHookState(named_parameters=names, grad_scaler=scaler, **settings), sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    for _ in range(epochs):
        for number, batch in enumerate(loader(), 1):
            steps = number % accumulate == 0
            with nullcontext() if steps else ddp.no_sync():
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    loss = loss_of(ddp, batch) / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if steps:
                step(optimizer, scaler)
    return bits(model)


def updating(model, **options):
    """Adam, of which ranks exchange what it would do."""
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    return UpdateOptimizer.for_model(adam, model, **UPDATES, **options)


def trained_with_adam(*, epochs=4, accumulate=1, scaler=None):
    """The parameters that a loop of one's own ends with, without DDP: what Adam does is sent, gradients are ahead."""
    model = network()
    optimizer = updating(model) if scaler is None else updating(model, nonfinite="skip")
    for _ in range(epochs):
        for number, batch in enumerate(loader(), 1):
            with optimizer.ahead():
                with nullcontext() if scaler is None else torch.autocast("cpu", torch.float16):
                    loss = loss_of(model, batch) / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if number % accumulate == 0:
                step(optimizer, scaler)
    return bits(model)


def same_as_hook(model, **options):
    """Whether the model is what the loop by hand ends with, in bits."""
    return same(bits(model), trained_by_hand(**options))


def same_as_ahead(model, **options):
    """The same with Adam and gradients ahead."""
    return same(bits(model), trained_with_adam(**options))


def accuracy(model):
    images, labels = images_of(0).tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
