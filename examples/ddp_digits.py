"""DistributedDataParallel on scikit-learn's handwritten digits, with the gradients exchanged sparsely.

    torchrun --nproc-per-node 2 examples/ddp_digits.py

The script is PyTorch's DDP tutorial; the two lines that make it sparse are marked.
"""

import sys

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, sparse_hook
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, RATE, MOMENTUM = 20, 16, 0.1, 0.9


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on, 360 to test with; 8×8 pixels in [0, 1]."""
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(algorithm: str, seed: int = 0, epochs: int = EPOCHS) -> float:
    """Trains on the ranks of the default group; returns the test accuracy."""
    torch.manual_seed(seed)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    before, after = (0.0, MOMENTUM) if algorithm in ("none", "dense") else (MOMENTUM, 0.0)  # the selection
    density = None if algorithm == "dense" else 0.01
    if algorithm != "none":
        state = SparseHookState(density=density, algorithm=algorithm, momentum=before)  # line 1
        ddp.register_comm_hook(state, sparse_hook)  # line 2
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=after)
    sampler = DistributedSampler(train_set, seed=seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            schedule.step()
    images, labels = test_set.tensors
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    accuracy = train(sys.argv[1] if len(sys.argv) > 1 else "gtopk")
    if dist.get_rank() == 0:
        print(f"test accuracy {accuracy:.1%} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()
