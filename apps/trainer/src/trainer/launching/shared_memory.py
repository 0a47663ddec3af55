"""What MPICH leaves in shared memory when its ranks are killed: a file of some megabytes for each node and launch."""

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PATTERN = "mpich_shm_*"


def remove_left_behind(since: float, folder: Path = SHARED_MEMORY) -> list[Path]:
    """Deletes this user's files that were made from `since` on (a time.time()) and that no process has mapped.

    For after a launch of ours that was ended by force; returns what was deleted. Nothing where there is no /proc.
    """
    found = [path for path in folder.glob(PATTERN) if _is_ours(path, since)] if Path("/proc/self/maps").exists() else []
    mapped = _mapped_files() if found else ""
    left = [path for path in found if str(path) not in mapped]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _is_ours(path: Path, since: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime >= since - 1.0


def _mapped_files() -> str:
    """What all processes have mapped, as far as this one may see it."""
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return "".join(texts)
