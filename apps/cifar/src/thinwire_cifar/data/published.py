"""Files as they were published: where they lie, how they are fetched, and whether those here are the same."""

import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from thinwire_trainer.data import one_at_a_time
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.placement import placement

from thinwire_cifar.data.images import Augment, Loaded


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A published file. checksum: "md5:…" or "sha1:…" of it as it is fetched."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        """Its own name."""
        return self.url.rpartition("/")[2]


def difference(name: str, content: bytes, *, records: int, expected: int, checksum: str) -> str:
    """How a file that could be read differs from the published one, or "" if it does not."""
    if records != expected:
        return f"{name} has {records:,} images instead of {expected:,}"
    kind, _, digest = checksum.partition(":")
    if hashlib.new(kind, content, usedforsecurity=False).hexdigest() != digest:
        return f"{name} has another {kind.upper()}"
    return ""


def warn(folder: Path, differences: Sequence[str]) -> None:
    """One line on standard error, from one rank, if there are any: such files are used, but not in silence."""
    found = [text for text in differences if text]
    if found and placement(os.environ).rank == 0:
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        _say(f"{folder} does not hold the published files, and is used as it is: {found[0]}{others}")


@cache
def _say(text: str) -> None:
    """Once in a process, which may hold many ranks of a simulated world."""
    print(f"cifar: warning: {text}", file=sys.stderr, flush=True)


def fetch(remote: Remote, folder: Path, *, unpacked: str | None = None) -> None:
    """Into `folder`, under its own name; from an archive the folder `unpacked` too, which is then there as a whole.

    A file that is there already, with the right checksum, is not fetched. RunError that says which file to put where.
    """
    if find_spec("pooch") is None:
        raise RunError(f"--download needs the pooch package: pip install pooch, or {_by_hand(remote, folder)}")
    import pooch

    try:
        path = Path(pooch.retrieve(remote.url, known_hash=remote.checksum, fname=remote.name, path=folder))
    except (OSError, ValueError) as error:  # no network, no space, another checksum
        reason = " ".join(str(error).split())
        raise RunError(f"cannot fetch {remote.url} ({reason:.300}): {_by_hand(remote, folder)}") from None
    if unpacked is not None:
        try:
            _unpack(path, folder / unpacked)
        except (OSError, tarfile.TarError) as error:
            raise RunError(f"cannot unpack {path} ({error}): unpack it by hand, as {folder / unpacked}") from None


def _by_hand(remote: Remote, folder: Path) -> str:
    kind, _, digest = remote.checksum.partition(":")
    place = f"{folder / remote.name} ({kind.upper()} {digest})"
    return f"fetch it elsewhere, put it at {place}, and run the same command again"


def _unpack(archive: Path, target: Path) -> None:
    """The archive's folder of this name, renamed into place last."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as aside, tarfile.open(archive) as packed:
        packed.extractall(aside, filter="data")
        (Path(aside) / target.name).rename(target)


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
