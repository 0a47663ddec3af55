"""A task small enough to be trained hundreds of times in a test."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from trainer.app import App
from trainer.command_line.flags import parse, table_of
from trainer.command_line.options import Options

FEATURES, CLASSES = 4, 3


@dataclass
class Points:
    """Points in three classes, jittered when trained on; the model has batch normalisation."""

    model: nn.Module
    train_size: int = 23
    test_size: int = 11

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.labels = torch.arange(self.train_size + self.test_size) % CLASSES
        centres = torch.randn(CLASSES, FEATURES, generator=drawn)
        self.points = centres[self.labels] + 0.5 * torch.randn(len(self.labels), FEATURES, generator=drawn)

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        jitter = 0.1 * torch.randn(len(indices), FEATURES, generator=generator)
        return cross_entropy(self.model(self.points[indices] + jitter), self.labels[indices])

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
    return Points(nn.Sequential(*layers).to(device))


def owned_by(app: App, algorithm: str) -> set[str]:
    return {flag.name for flag in table_of(app)[algorithm].flags}


@pytest.fixture(scope="session")
def points_app() -> App:
    return App(module="points", models={"plain": "", "dropout": ""}, datasets={"points": ""}, build=build)


@pytest.fixture
def app(points_app: App) -> App:
    return points_app


@pytest.fixture
def options(app: App, tmp_path: Path) -> Callable[..., Options]:
    """Options from flags as keywords: options(lr=0.2, overwrite=True)."""

    def make(**flags: Any) -> Options:
        flags = {"output": tmp_path / "run", "batch_size": 4, "max_epochs": 2, "lr": 0.05} | flags
        if "density" in owned_by(app, flags.get("algorithm", "dense")):
            flags = {"density": 0.2} | flags
        argv = []
        for name, value in flags.items():
            argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return parse(argv, app, world_size=None)

    return make
