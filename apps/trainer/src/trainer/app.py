"""What an app tells the trainer about itself, without importing anything heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.command_line.options import Options
    from trainer.task import Task


@dataclass(frozen=True, kw_only=True)
class App:
    """An app is what `python -m MODULE` starts: its models, its data sets, and how a task is made of them."""

    module: str
    models: Mapping[str, str]  # name -> "package.module:function", resolved only when used
    datasets: Mapping[str, str]
    build: Callable[[Options, torch.device], Task]  # raises RunError where data are missing or damaged
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the command line, by option name
