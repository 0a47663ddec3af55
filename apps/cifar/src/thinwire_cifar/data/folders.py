"""Images in folders by class, SPLIT/CLASS/FILE; what is there is kept in an index, for there may be a million files."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire_trainer.errors import RunError

SUFFIXES = (".jpeg", ".jpg")
SETTLED = 2.0  # seconds after which a folder's time tells whether it has changed since


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a split, in the order of classes and names. places: of each image's class in `classes`."""

    root: Path
    classes: list[str]
    names: list[str]
    places: list[int]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, image: int) -> Path:
        """Where it is."""
        return self.root / self.classes[self.places[image]] / self.names[image]


def listing(root: Path, split: str) -> Listing:
    """The images below root/split; RunError if there are none. Only classes that have changed are looked through.

    The index is root/.index-SPLIT.json; where nothing can be written there, every run looks through all folders.
    """
    folder, index = root / split, root / f".index-{split}.json"
    if not folder.is_dir():
        raise RunError(f"{folder} is missing: expected {folder}/CLASS/*.JPEG")
    known, found = _read(index), dict[str, tuple[int, list[str]]]()
    with os.scandir(folder) as entries:
        classes = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_dir())
    for name, changed in classes:
        before = known.get(name)
        found[name] = before if before and before[0] == changed else (_settled(changed), _images(folder / name))
    if found != known:
        _write(index, found)
    names = [(place, image) for place, (_, images) in enumerate(found.values()) for image in images]
    if not names:
        raise RunError(f"{folder} has no images: expected {folder}/CLASS/*.JPEG, sorted into a folder a class")
    return Listing(
        root=folder,
        classes=list(found),
        names=[image for _, image in names],
        places=[place for place, _ in names],
    )


def _images(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES))


def _settled(changed: int) -> int:
    """The folder's time in ns, or 0 where a change in this very moment would leave it as it is."""
    return changed if time.time() - changed / 1e9 > SETTLED else 0


def _read(index: Path) -> dict[str, tuple[int, list[str]]]:
    """What it says, or nothing if it cannot be trusted: a name is a file in its class's folder, nowhere else."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return {
            name: (int(changed), [_plain(image) for image in images]) for name, (changed, images) in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _plain(image: Any) -> str:
    if not isinstance(image, str) or "/" in image or not image.lower().endswith(SUFFIXES):
        raise ValueError(image)
    return image


def _write(index: Path, found: Mapping[str, tuple[int, list[str]]]) -> None:
    """At once, by each rank that looked: they all found the same."""
    aside = index.with_name(f"{index.name}.{os.getpid()}")
    with suppress(OSError):
        aside.write_text(json.dumps(found), encoding="utf-8")
        aside.replace(index)
