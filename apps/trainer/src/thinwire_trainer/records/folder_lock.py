"""One run at a time in a folder: rank 0 holds OUTPUT/lock while it writes there.

The operating system's lock (flock, also over NFS) goes with the process that holds it, even by kill −9, so that the
next run starts at once. It does not reach other machines on every file system: the holder also touches the file every
few seconds, and who finds the name of another machine in it watches for such a heartbeat first.
"""

import errno
import fcntl
import json
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from communicators import Communicator

from thinwire_trainer.all_or_none import GO_ON, all_or_none, gather_texts
from thinwire_trainer.errors import RunError
from thinwire_trainer.records.durable import naming

NAME = "lock"
BEAT = 10.0  # seconds
PATIENCE = 2.5  # beats without a sign of life
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # this file system has none


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as the file says."""

    host: str
    pid: int
    since: str

    @property
    def is_here(self) -> bool:
        """Whether that is a process of this machine."""
        return self.host == platform.node()

    @property
    def is_alive_here(self) -> bool:
        """Whether it is a process of this machine that runs."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return True


@contextmanager
def locked(
    folder: Path,
    comm: Communicator,
    *,
    beat: float = BEAT,
    note: Callable[[str], None] = lambda text: None,
    advice: str = GO_ON,
) -> Iterator[None]:
    """Keep other runs out of `folder`, which exists, during the block; on every rank.

    AgreedError says who holds it, or which rank does not see the same folder. note: gets what is waited for.
    advice: on a full disk.
    """
    lock: FolderLock | None = None
    try:
        with all_or_none(comm, advice=advice):
            if comm.rank == 0:
                lock = FolderLock.acquire(folder, beat=beat, note=note)
        record = gather_texts(lock.record if lock else "", comm)[0]
        with all_or_none(comm):
            _require_shared(folder, record)
        yield
    finally:
        if lock:
            lock.release()


@contextmanager
def naming_holder(folder: Path) -> Iterator[None]:
    """An error of the block, which takes no lock, says instead who is at work in `folder`, if one of this machine is:
    what a run finds there then means little."""
    try:
        yield
    except (RunError, OSError):
        holder = None
        with suppress(OSError), (folder / NAME).open("rb") as file:
            holder = _holder(file.fileno())
        if holder and holder.is_here and holder.is_alive_here:
            raise _in_use(folder / NAME, holder) from None
        raise


class FolderLock:
    """A lock that is held; `release` gives it back."""

    def __init__(self, path: Path, descriptor: int, beat: float) -> None:
        holder = Holder(platform.node(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        self.record = json.dumps(asdict(holder))
        self._path, self._descriptor = path, descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.record.encode(), 0)
        os.fsync(descriptor)
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beats, args=(beat,), name="lock heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def acquire(cls, folder: Path, *, beat: float = BEAT, note: Callable[[str], None]) -> "FolderLock":
        """The lock of the folder; RunError that says who holds it."""
        path = folder / NAME
        while True:
            descriptor = _opened(path)
            try:
                exclusive = _flock(descriptor, path)
                if _is_still(path, descriptor):
                    _require_unheld(path, descriptor, exclusive=exclusive, beat=beat, note=note)
                    with naming(path):
                        return cls(path, descriptor, beat)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # given back, and so deleted, between our opening and locking it

    def release(self) -> None:
        """Let others have it."""
        self._released.set()
        self._heart.join()
        with suppress(OSError):  # the run's own outcome matters more
            self._path.unlink()
        os.close(self._descriptor)

    def _beats(self, every: float) -> None:
        while not self._released.wait(every):
            with suppress(OSError):  # such as a server that is away for a while
                os.utime(self._descriptor)


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


def _require_unheld(path: Path, descriptor: int, *, exclusive: bool, beat: float, note: Callable[[str], None]) -> None:
    """RunError if the holder that the file names may be alive in spite of the system's lock."""
    holder = _holder(descriptor)
    if holder is None or (holder.is_here and (exclusive or not holder.is_alive_here)):
        return
    if holder.is_here:
        raise _in_use(path, holder)
    note(f"{path.parent} was in use by {holder.host}: watching for {PATIENCE * beat:g} s whether it still is")
    if _beats_within(path, PATIENCE * beat):
        raise _in_use(path, holder)


def _beats_within(path: Path, seconds: float) -> bool:
    first, end = _touched(path), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(seconds / 20)
        if _touched(path) != first:
            return True
    return False


def _touched(path: Path) -> int:
    """When, by the file server's clock; opened anew, because a network file system then asks the server."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> Holder | None:
    """Who the file names; None for nobody, or for what no run has written."""
    try:
        holder = Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None
    return holder if isinstance(holder.host, str) and isinstance(holder.pid, int) else None


def _in_use(path: Path, holder: Holder | None) -> RunError:
    who = f"process {holder.pid} on {holder.host} since {holder.since}" if holder else "another process"
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
