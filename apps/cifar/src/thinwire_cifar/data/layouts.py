"""A data set that is published as several folders of the same images, of which one is enough."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from thinwire_trainer.data import one_at_a_time
from thinwire_trainer.errors import RunError

from thinwire_cifar.data.download import fetch
from thinwire_cifar.data.images import Augment, Loaded
from thinwire_cifar.data.published import Remote, difference, warn


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the folders. train, test: file -> (images, checksum) as published. read: path and content -> images."""

    folder: str
    archive: Remote
    train: Mapping[str, tuple[int, str]]
    test: Mapping[str, tuple[int, str]]
    read: Callable[[Path, bytes], Loaded]

    @property
    def files(self) -> list[str]:
        """All of them."""
        return [*self.train, *self.test]


def load(
    data_dir: Path, layouts: Sequence[Layout], *, page: str, download: bool, augment: Augment
) -> tuple[Loaded, Loaded]:
    """Training and test images from the first of the folders that `data_dir` holds.

    RunError, with what to do, if there is none, or if a file is missing, truncated or not of its format. Files of
    another length or checksum are used, with one warning.
    """
    found = _found(data_dir, layouts)
    if found is None and download:
        with one_at_a_time(data_dir):
            if _found(data_dir, layouts) is None:
                fetch(layouts[0].archive, data_dir, unpacked=layouts[0].folder)
        found = _found(data_dir, layouts)
    if found is None:
        expected = " or ".join(f"{data_dir / layout.folder}/{{{', '.join(layout.files)}}}" for layout in layouts)
        raise RunError(f"missing: {expected}; get one of them from {page} and unpack it there, or give --download")
    folder, layout = found
    differences: list[str] = []
    train = _split(folder, layout, layout.train, differences, augment)
    test = _split(folder, layout, layout.test, differences, None)
    warn(folder, differences)
    return train, test


def _found(data_dir: Path, layouts: Sequence[Layout]) -> tuple[Path, Layout] | None:
    """Below `data_dir`, or that folder itself."""
    for layout in layouts:
        for folder in (data_dir / layout.folder, data_dir):
            if (folder != data_dir or folder.name == layout.folder) and folder.is_dir():
                return folder, layout
    return None


def _split(
    folder: Path,
    layout: Layout,
    files: Mapping[str, tuple[int, str]],
    differences: list[str],
    augment: Augment | None,
) -> Loaded:
    parts = []
    for name, (expected, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"{path} is missing: {folder} is to hold {', '.join(layout.files)}; unpack it again")
        content = path.read_bytes()
        parts.append(layout.read(path, content))
        records = len(parts[-1].labels)
        differences.append(difference(name, content, records=records, expected=expected, checksum=checksum))
    pixels, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("pixels", "labels"))
    return Loaded(pixels=pixels, labels=labels, augment=augment)
