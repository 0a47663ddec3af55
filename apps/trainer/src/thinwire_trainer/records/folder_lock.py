"""One run at a time in a folder: rank 0 holds OUTPUT/lock while it writes there.

The operating system's lock (flock, which Linux takes over NFS, too) goes with the process that holds it, even by
kill −9, so that the next run starts at once. The file names the holder. Where a file system has no locks, that name
alone keeps others out, until it is deleted.
"""

import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from communicators import Communicator

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.errors import GO_ON, RunError
from thinwire_trainer.records.durable import naming

NAME = "lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # this file system has none


@contextmanager
def locked(
    folder: Path, comm: Communicator, *, prepare: Callable[[], None] = lambda: None, advice: str = GO_ON
) -> Iterator[None]:
    """Keep other runs out of `folder` during the block; on every rank.

    AgreedError says who holds it, or which rank does not see the same folder. prepare: makes the folder, unless it
    exists; called on every rank. advice: on a full disk.
    Elastic ranks share it, so that it is held as long as one of them lives.
    """
    path, ended = folder / NAME, False
    descriptor: int | None = None

    def take() -> None:
        nonlocal descriptor
        descriptor, before = None, descriptor
        with all_or_none(comm, advice=advice):
            if before is not None:  # of an attempt in which rank 0 died: its successor is to get the lock
                os.close(before)
            prepare()
        record = ""
        with all_or_none(comm, advice=advice):
            if comm.rank == 0:
                descriptor = acquired(path)
                record = _signed(path, descriptor)
                if comm.elastic:
                    _share(descriptor)
        record = gather_texts(record, comm)[0]
        with all_or_none(comm):
            if not comm.joining:
                _require_shared(folder, record)
            if comm.elastic and descriptor is None:
                descriptor = _opened(path)
                _share(descriptor)

    try:
        comm.atomic(take)
        yield
        ended = True
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the run's own outcome matters more
                if not comm.elastic or (ended and comm.rank == 0):
                    path.unlink()
            os.close(descriptor)


def acquired(path: Path) -> int:
    """The lock's file, open, once this process alone holds it; RunError that says who holds it."""
    while True:
        descriptor = _opened(path)
        try:
            if not _flock(descriptor, path) and (holder := _holder(descriptor)):
                ended = f"where it has ended, delete {path}: this file system has no locks"
                raise RunError(f"{_in_use(path, holder)}; {ended}")
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # given back, and so deleted, between our opening and locking it


def _share(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _signed(path: Path, descriptor: int) -> str:
    """Writes this process into the file; returns its content."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    record = json.dumps({"host": platform.node(), "pid": os.getpid(), "since": since})
    with naming(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, record.encode(), 0)
        os.fsync(descriptor)
    return record


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{path} is not a file, but the lock of this folder has to be there: move it away")
    return descriptor


def _flock(descriptor: int, path: Path) -> bool:
    """Whether the system gives us its lock; False where it has none. RunError if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _holder(descriptor)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Who the file names; "" for nobody, or for what no run has written."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        host, pid, since = found["host"], found["pid"], found["since"]
    except (ValueError, TypeError, KeyError):
        return ""
    return f"process {pid} on {host} since {since}" if isinstance(host, str) and isinstance(pid, int) else ""


def _in_use(path: Path, holder: str) -> RunError:
    who = holder or "another process"
    return RunError(
        f"{path.parent} is in use by {who}: wait until it ends, stop it, or give another folder with --output"
    )


def _require_shared(folder: Path, record: str) -> None:
    try:
        found = (folder / NAME).read_text()
    except OSError:
        found = ""
    if found != record:
        raise RunError(f"{folder} is not the folder that rank 0 sees: --output has to be on a shared file system")
    if not os.access(folder, os.W_OK):
        raise RunError(f"{folder} cannot be written to")
