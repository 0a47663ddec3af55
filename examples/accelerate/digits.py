"""Accelerate on scikit-learn's handwritten digits, with the gradients exchanged sparsely; resumes where it stopped.

    pip install accelerate scikit-learn
    torchrun --nproc-per-node 2 examples/accelerate/digits.py [CHECKPOINT]

The line that makes it sparse is marked. save_state and load_state hold what it keeps, for every rank.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from data_parallel.integrations.accelerate import sparse_gradients
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, RATE = 20, 16, 0.1


def main(checkpoint: str | None) -> None:
    """1,437 images to train on, 360 to test with."""
    set_seed(0)
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    data = TensorDataset(images[train], labels[train])
    accelerator = Accelerator(cpu=True)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=RATE),
        DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True),
    )
    sparse_gradients(accelerator, model, density=0.01, momentum=0.9)  # the line
    if checkpoint is not None and Path(checkpoint).exists():
        accelerator.load_state(checkpoint)
    for _ in range(EPOCHS):
        for batch, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
            optimizer.step()
    if checkpoint is not None:
        accelerator.save_state(checkpoint)
    with torch.no_grad():
        accuracy = float((network(images[test]).argmax(dim=1) == labels[test]).float().mean())
    accelerator.print(f"test accuracy {accuracy:.1%} on {accelerator.num_processes} ranks")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
