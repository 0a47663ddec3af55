"""--download: published files, checked by their checksums. Needs the pooch package."""

import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

from thinwire_trainer.errors import RunError

from thinwire_cifar.data.published import Remote


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
