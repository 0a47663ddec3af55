"""A task small enough to be trained hundreds of times in a test."""

from dataclasses import dataclass

import torch
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

FEATURES, CLASSES = 4, 3


@dataclass
class Points:
    """Points in three classes, jittered when trained on; the model has batch normalisation."""

    model: nn.Module
    smoothing: float = 0.0
    train_size: int = 23
    test_size: int = 11

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.labels = torch.arange(self.train_size + self.test_size) % CLASSES
        centres = torch.randn(CLASSES, FEATURES, generator=drawn)
        self.points = centres[self.labels] + 0.5 * torch.randn(len(self.labels), FEATURES, generator=drawn)

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        jitter = 0.1 * torch.randn(len(indices), FEATURES, generator=generator)
        return cross_entropy(
            self.model(self.points[indices] + jitter), self.labels[indices], label_smoothing=self.smoothing
        )

    def score(self, indices: Tensor) -> Tensor:
        logits, labels = self.model(self.points[self.train_size + indices]), self.labels[self.train_size + indices]
        loss = cross_entropy(logits.double(), labels, reduction="sum")
        return torch.stack([loss, (logits.argmax(1) == labels).sum().double()])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        loss, right = (sums / self.test_size).tolist()
        return {"test_loss": loss, "test_accuracy": right}


def build(options: Options, device: torch.device) -> Points:
    dropout = 0.2 if options.dnn == "dropout" else 0.0
    layers = [nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, CLASSES)]
    return Points(nn.Sequential(*layers).to(device), options.label_smoothing)


APP = App(
    module="points",
    models={"plain": "", "dropout": ""},
    datasets={"points": ""},
    build=build,
)
