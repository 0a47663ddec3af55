"""`--config FILE`: settings by name, as a run's own config.json has them. What the command line says goes before.

A file is read entry by entry through the flags themselves, so that it is checked as the command line is.
"""

import json
from argparse import ArgumentParser
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from thinwire_trainer.command_line.options import PER_RANK
from thinwire_trainer.errors import RunError

# What says where and on what a run was, or what became of it, but not how it trained.
OWN_TO_A_RUN = {"at_least", "backend", "config", "device", "overwrite", "residuals", "resume"}
IGNORED = (PER_RANK - {"nworkers", "tensorboard"}) | OWN_TO_A_RUN
RECORDED = {"app", "choice", "compared", "hardware", "parameters", "python", "torch", "world_size"}
EITHER = ({"algorithm", "compression", "compressor"}, {"lr_schedule", "milestones"})
"""Flags that speak of the same: one of them on the command line takes the place of all in the file."""


def read(path: Path, parser: ArgumentParser, *, known: Mapping[str, Any], explicit: Collection[str]) -> dict[str, Any]:
    """Values of flags in the file, by destination. known: every flag's default; explicit: those on the command line.

    RunError, naming file and entry, for what cannot be read, what no flag is called, and values that are not a flag's.
    """
    overridden = set(explicit).union(*(group for group in EITHER if not group.isdisjoint(explicit)))
    chosen = {}
    for name, value in entries(path).items():
        if name in IGNORED | RECORDED:
            continue
        if name not in known:
            raise RunError(f"--config {path}: no flag is called {name!r}; entries are named as flags, with _ for -")
        if value is not None and name not in overridden:
            chosen[name] = _value(path, name, value, parser, like=known[name])
    return chosen


def entries(path: Path) -> Mapping[str, Any]:
    """Entries of the file as they stand there; RunError where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"--config {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"--config {path} is not JSON ({error}): give the config.json of a run, or one like it"
        ) from None
    if not isinstance(found, dict):
        raise RunError(f"--config {path} holds no settings by name: give the config.json of a run, or one like it")
    return found


def _value(path: Path, name: str, value: Any, parser: ArgumentParser, *, like: object) -> Any:
    """Read a value as the flag does. like: the flag's default."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(like, bool) or isinstance(value, bool):
        if not (isinstance(like, bool) and isinstance(value, bool)):
            expected = "true or false" if isinstance(like, bool) else "a value"
            raise RunError(f"--config {path}: {name} is {json.dumps(value)}, expected {expected}")
        return value
    texts = [value] if not isinstance(value, list) else value
    try:
        if isinstance(value, dict) or not texts or not all(type(text) in (int, float, str) for text in texts):
            raise RunError(f"argument {flag}: given {json.dumps(value)}, expected what the flag takes")
        argv = [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
        read = vars(parser.parse_args(argv))[name]
    except RunError as error:
        raise RunError(f"--config {path}: {error}") from None
    if isinstance(value, list) != isinstance(read, list | tuple) or _quoted(texts, read):
        raise RunError(f"--config {path}: {name} is {json.dumps(value)}, a text or list, where a number is expected")
    return read


def _quoted(texts: list[Any], read: Any) -> bool:
    """Whether a number stands as a text."""
    parsed = read if isinstance(read, list | tuple) else [read]
    return any(isinstance(text, str) and not isinstance(one, str) for text, one in zip(texts, parsed, strict=True))
