"""Text files, and what can be wrong with them."""

from pathlib import Path

from trainer.errors import RunError


def read_text(path: Path) -> str:
    """What the file says; RunError, naming it, if it cannot be read, is not UTF-8, or says nothing."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise RunError(f"{path} is empty")
    return text


def folder_with(name: str, *, data_dir: Path, places: tuple[str, ...], source: str) -> Path:
    """The first of the places in data_dir that has such a file or folder; RunError that says where it was looked for.

    source: where it is from.
    """
    for place in places:
        if (data_dir / place / name).exists():
            return data_dir / place
    looked = ", ".join(str(data_dir / place / name) for place in places)
    raise RunError(f"there is no {looked}: get it from {source}, and name its folder with --data-dir")
