"""Writing so that it survives a kill and a power cut."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch


def write_aside(path: Path, text: str) -> None:
    """Replace a file at once: whoever looks sees the old text or the new one, never a part."""
    aside = path.with_name(f"{path.name}.part")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def write_tensors(path: Path, state: dict[str, Any]) -> None:
    """Write what torch.load reads, through a file of ours: by a path, torch.save hides a full disk in RuntimeError."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, without which a renamed file may be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path, *, first: str) -> None:
    """Delete a folder, the file named `first` before all others: without it the rest means nothing."""
    (folder / first).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
