"""Lightning on scikit-learn's handwritten digits, with the gradients exchanged sparsely.

    pip install lightning scikit-learn
    torchrun --nproc-per-node 2 examples/lightning/digits.py

Without Lightning's callback it is plain DDP; the line that makes it sparse is marked.
"""

import torch
from data_parallel.integrations.lightning import SparseGradients
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, RATE = 20, 16, 0.1


class Digits(LightningModule):
    """A perceptron; classifies 8×8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without momentum, which is the callback's."""
        return torch.optim.SGD(self.parameters(), lr=RATE)


def main() -> None:
    """1,437 images to train on, 360 to test with."""
    seed_everything(0)
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=BATCH, shuffle=True, drop_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SparseGradients(density=0.01, momentum=0.9)],  # the line
    )
    model = Digits()
    trainer.fit(model, loader)
    with torch.no_grad():
        accuracy = float((model.network(images[test]).argmax(dim=1) == labels[test]).float().mean())
    if trainer.is_global_zero:
        print(f"test accuracy {accuracy:.1%} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
