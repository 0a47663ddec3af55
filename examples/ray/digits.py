"""Ray Train on scikit-learn's handwritten digits: what its workers exchange is sparse, or rare.

    pip install "ray[train]" scikit-learn
    python examples/ray/digits.py hook       # DDP, with a sparse exchange of gradients
    python examples/ray/digits.py updates    # Adam's updates, exchanged sparsely, without DDP
    python examples/ray/digits.py diloco     # models, every 10 steps, without DDP

The lines that are not Ray's or PyTorch's are marked.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray.train
import torch
from data_parallel import SparseHookState, UpdateOptimizer, sparse_hook
from local_sgd import DiLoCo
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH, WORKERS = 300, 16, 2


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8×8 pixels in [0, 1], in an order that is the same everywhere, and their labels."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(bunch.data, dtype=torch.float32) / 16)[order], torch.tensor(bunch.target)[order]


def network() -> nn.Module:
    """A perceptron, alike on all workers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def with_hook(settings: dict[str, Any]) -> None:
    """One worker, with DDP."""
    del settings
    ddp = prepare_model(network())
    state = SparseHookState(density=0.01, momentum=0.9)  # line 1
    ddp.register_comm_hook(state, sparse_hook)  # line 2
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for images, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    report(ddp.module)


def with_updates(settings: dict[str, Any]) -> None:
    """One worker, whose Adam says what to exchange."""
    del settings
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.002)
    optimizer = UpdateOptimizer(adam, model.named_parameters(), density=0.01)  # line 1
    for images, labels in batches():
        with optimizer.ahead():  # line 2
            nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    report(model)


def with_diloco(settings: dict[str, Any]) -> None:
    """One worker, which meets the others now and then."""
    del settings
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.002)
    with DiLoCo(inner, sync_every=10, model=model) as optimizer:  # line 1
        for images, labels in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.average()  # line 2
    report(model)


def batches() -> Any:
    """Of this worker's share of what is trained on."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    images, labels = (tensor[:1437][rank::size] for tensor in digits())
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=draw)
        yield images[chosen], labels[chosen]


def report(model: nn.Module) -> None:
    """Accuracy and weights go to Ray, which keeps metrics beside a checkpoint only."""
    images, labels = (tensor[1437:] for tensor in digits())
    with torch.no_grad():
        accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    context = ray.train.get_context()
    with TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        kept = Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
        ray.train.report({"accuracy": accuracy, "workers": context.get_world_size()}, checkpoint=kept)


def main(way: str) -> None:
    """Trains on so many workers, each with half a core."""
    trainer = TorchTrainer(
        {"hook": with_hook, "updates": with_updates, "diloco": with_diloco}[way],
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=way, storage_path=str(Path("runs/ray").resolve())),
    )
    metrics = trainer.fit().metrics
    print(f"{way}: test accuracy {metrics['accuracy']:.1%} on {metrics['workers']} workers")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "hook")
