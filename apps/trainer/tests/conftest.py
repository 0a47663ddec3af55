"""The small task, and options for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import points
import pytest
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import entries_of, parse
from thinwire_trainer.command_line.options import Options


def owned_by(app: App, algorithm: str) -> set[str]:
    return {flag.name for flag in entries_of(app)[algorithm].flags}


@pytest.fixture(scope="session")
def points_app() -> App:
    return points.APP


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
        if "dense_steps" in owned_by(app, flags.get("algorithm", "dense")):
            flags = {"dense_steps": 1} | flags
        argv = []
        for name, value in flags.items():
            argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return parse(argv, app, world_size=None)

    return make
