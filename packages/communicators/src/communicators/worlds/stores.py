"""The Store by which the ranks of a process group met, and how they meet there again for a communicator of ours.

Parts of it that torch has only had since 2.8 or 2.9 are here too.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from communicators.errors import CollectiveError

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


def meet(store: Store, rank: int, size: int, timeout: float) -> str:
    """A name that the ranks which are here share, and none before them had: for keys that are theirs alone.

    Each rank writes a word that is new, and beside it a hash of all words, as it reads them. Where all hashes are alike
    every rank is here, since a rank that is gone has not read the new words. So what others left in the Store does not
    count, nor how often a rank has met others in it.

    Raises CollectiveError after `timeout` seconds: connecting would wait for a missing rank without end or word.
    """
    begin, nap, keys = time.monotonic(), 1e-3, [f"here/{peer}" for peer in range(size)]
    mine, name = uuid.uuid4().hex, ""
    words, names = ("",) * size, ("none yet",) * size
    store.set(keys[rank], f"{mine} ")
    while set(names) != {name}:
        if store.check(keys):
            words, names = zip(*(said.decode().split(" ") for said in store.multi_get(keys)), strict=True)
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
            raise CollectiveError(
                f"timed out after {timeout:g} s: rank {rank} waits for ranks {missing} in the first call with this "
                f"process group, which all of its ranks must make; {REMEDY}"
            )
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)
    return name
