"""How the ranks of a process group meet in a Store for a communicator of ours.

Parts of a Store that torch has only had since 2.8 or 2.9 are here too.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from communicators.errors import CollectiveError

T = TypeVar("T")
logger = logging.getLogger("communicators")

STORE_SECONDS = 0.5
"""Wait beyond its time-out of a first call whose Store does not answer at all."""
JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
FAKE = ("FakeStore", "Store")
"""Types of a Store that keeps nothing, the second as torch shows it before 2.15 where only C++ holds it."""
LONGEST_NAP_SECONDS = 0.05
REMEDY = (
    "where some are gone, set up the group anew without them or with others, and have its ranks meet in a Store that "
    "all of them reach: as_communicator(group, store=...)"
)


def store_of(group: dist.ProcessGroup) -> Store:
    """The Store of this group; TypeError for a group that has none, as many that are written in Python."""
    own: Any = getattr(group, "get_group_store", None)
    try:
        store: Any = own() if own is not None else distributed_c10d._get_process_group_store(group)
    except KeyError:  # torch does not know the group
        store = None
    if store is None:
        raise TypeError(
            f"the process group, a {type(group).__name__}, has no Store by which its ranks could meet: give them one "
            "that they share, such as a TCPStore, as_communicator(group, store=...)"
        )
    return cast(Store, store)


def reconnected(store: Any) -> Store:
    """The same keys by a client of our own: a call that blocks holds up every other use of its client.

    Raises TypeError for the Store of a fake group, which keeps nothing.
    """
    bottom = store
    while isinstance(bottom, PrefixStore):
        bottom = bottom.underlying_store
    if type(bottom).__name__ in FAKE:
        raise TypeError(
            "the Store keeps nothing, as that of a fake process group, so no other rank can be met there: for many "
            "ranks in one process take a SimulatedWorld"
        )
    if hasattr(store, "clone"):
        return cast(Store, store.clone())
    prefix = store.compare_set("communicators/elsewhere", "", uuid.uuid4().hex).decode()  # that of who was first
    if isinstance(bottom, TCPStore):
        other: Store = TCPStore(bottom.host, bottom.port, wait_for_workers=False)
    elif isinstance(bottom, FileStore):
        other = FileStore(cast(Any, bottom).path)
    else:
        other = bottom
    return PrefixStore(prefix, other)


def job_of(environ: Mapping[str, str]) -> str:
    """Variable and value that tell this job from others; "" where nothing does, as for parts of a Slurm job."""
    named = {variable: environ.get(variable, "") for variable in JOBS}
    if named["TORCHELASTIC_RUN_ID"] in ("", "none"):  # torchrun's default
        del named["TORCHELASTIC_RUN_ID"]
    if "SLURM_HET_SIZE" in environ:
        del named["SLURM_JOB_ID"]
    return next((f"{variable}={value}".replace(" ", "_") for variable, value in named.items() if value), "")


def refuse_two_jobs(words: Sequence[str]) -> None:
    """Raises CollectiveError where ranks are of several torchruns. words: of each rank, as `meet` writes them.

    Jobs of a scheduler may belong together, as workers of Dask or Ray do: a warning says it.
    """
    jobs = [word.partition("/")[2].partition("/")[2] for word in words]
    for rank, job in enumerate(jobs):
        if job and jobs[0] and job != jobs[0] and job.partition("=")[0] == jobs[0].partition("=")[0]:
            told = (
                f"rank 0 is of the job {jobs[0]}, rank {rank} of {job}: two jobs have met at one MASTER_ADDR and "
                "MASTER_PORT; give each a MASTER_PORT of its own, or, where they belong together, "
                "as_communicator(group, store=...)"
            )
            if job.startswith("TORCHELASTIC_RUN_ID"):
                raise CollectiveError(told)
            logger.warning("%s", told)
            return


def refuse_other_numbers(words: Sequence[str]) -> None:
    """Raises CollectiveError where ranks were given unlike numbers of connections. words: as of `refuse_two_jobs`."""
    numbers = [word.partition("/")[2].partition("/")[0] for word in words]
    if len(set(numbers)) > 1:
        given = {number: [rank for rank, own in enumerate(numbers) if own == number] for number in numbers}
        told = ", ".join(f"{number} on ranks {ranks}" for number, ranks in given.items())
        raise CollectiveError(f"connections= is {told}: give the same on all ranks")


def meet(store: Store, rank: int, size: int, timeout: float, job: str = "", connections: int = 1) -> str:
    """A name that the ranks which are here share, and none before them had: for keys that are theirs alone.

    Each rank writes a word that is new, and beside it a hash of all words, as it reads them. Where all hashes are alike
    every rank is here, since a rank that is gone has not read the new words. So what others left in the Store does not
    count, nor how often a rank has met others in it.

    Raises CollectiveError after `timeout` seconds: connecting would wait for a missing rank without end or word.
    """
    begin, nap, keys = time.monotonic(), 1e-3, [f"here/{peer}" for peer in range(size)]
    mine, name = f"{uuid.uuid4().hex}/{connections}/{job}", ""
    words, names = ("",) * size, ("none yet",) * size
    store.set(keys[rank], f"{mine} ")
    while set(names) != {name}:
        if store.check(keys):
            told = (said.decode(errors="replace").partition(" ") for said in store.multi_get(keys))
            words, _, names = zip(*told, strict=True)
            read = hashlib.sha256(" ".join(words).encode()).hexdigest()
            if read != name:
                name = read
                store.set(keys[rank], f"{mine} {name}")
                continue
        if time.monotonic() - begin > timeout:
            store.set(keys[rank], " ")  # whoever comes later shall not connect to this rank
            unlike = [peer for peer, theirs in enumerate(names) if theirs != name]
            missing = [peer for peer in range(size) if not store.check([keys[peer]])]
            missing = missing or [peer for peer in unlike if words[peer]] or unlike  # last those that have given up
            others = [peer for peer in unlike if names[peer] not in ("", "none yet")]
            met = f" (ranks {others} have met another rank {rank} there: give each job a MASTER_PORT of its own)"
            raise CollectiveError(
                f"timed out after {timeout:g} s: rank {rank} waits for ranks {missing} in the first call with this "
                f"process group, which all of its ranks must make{met if others else ''}; {REMEDY}"
            )
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)
    refuse_two_jobs(words)  # only now: of before, ranks that are gone may have left words
    refuse_other_numbers(words)
    return name


class Rendezvous(NamedTuple):
    """Meeting place of ranks: keys of one Store, by a client of our own and by the group's.

    name: the last prefix. job: what all ranks must be of; "": any. connections: to each peer, alike on all.
    """

    rank: int
    size: int
    own: Store
    shared: Store
    name: str = ""
    job: str = ""
    connections: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup, keys: Store, job: str = "") -> Rendezvous:
        """Rendezvous of a group's ranks, among these keys."""
        own, shared = PrefixStore("communicators", reconnected(keys)), PrefixStore("communicators", keys)
        return cls(group.rank(), group.size(), own, shared, job=job)

    def met(self, patience: float) -> Rendezvous:
        """Rendezvous of the same ranks, once all of them are here, under a prefix that is new."""
        return self.elsewhere(meet(self.own, self.rank, self.size, patience, self.job, self.connections))

    def elsewhere(self, prefix: str) -> Rendezvous:
        """Rendezvous of the same ranks, under a further prefix."""
        return self._replace(own=PrefixStore(prefix, self.own), shared=PrefixStore(prefix, self.shared), name=prefix)


NO_ANSWER = (
    "made its first call with this process group, but the group's Store, by which its ranks meet, does not answer; "
    f"{REMEDY}"
)


def in_time(make: Callable[[], T], rank: int, seconds: float, why: str = NO_ANSWER) -> T:
    """Calls `make` in a thread that is left behind where it blocks: the kernel waits for many minutes.

    why: what this rank has done, and what is wrong then.
    """
    try:
        return begun(make).result(seconds + STORE_SECONDS)
    except TimeoutError:
        raise CollectiveError(f"timed out after {seconds:.3g} s: rank {rank} {why}") from None


def begun(make: Callable[[], T]) -> Future[T]:
    """Future of what `make` returns, in a thread that may be left behind at the end of the process."""
    made: Future[T] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="communicators-first-call", daemon=True).start()
    return made
