"""Where the files of a data set lie."""

from pathlib import Path

from thinwire_trainer.errors import RunError


def folder_with(name: str, *, data_dir: Path, places: tuple[str, ...], source: str) -> Path:
    """The first of the places in data_dir that has such a file or folder; RunError that says where it was looked for.

    source: where it is from.
    """
    for place in places:
        if (data_dir / place / name).exists():
            return data_dir / place
    looked = ", ".join(str(data_dir / place / name) for place in places)
    raise RunError(f"there is no {looked}: get it from {source}, and name its folder with --data-dir")
