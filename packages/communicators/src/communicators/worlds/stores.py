"""The Store by which the ranks of a process group met, and how they meet there again for a communicator of ours.

What of it torch has only had since 2.8 or 2.9 is here too.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from communicators.errors import CollectiveError

LONGEST_NAP_SECONDS = 0.05


def store_of(group: dist.ProcessGroup) -> Store:
    """The keys of this group; TypeError for a group that has none, as many that are written in Python."""
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
    """The same keys by a client of our own: a call that blocks holds up every other use of its client."""
    if hasattr(store, "clone"):
        return cast(Store, store.clone())
    prefix = store.compare_set("communicators/elsewhere", "", uuid.uuid4().hex).decode()  # that of who was first
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        other: Store = TCPStore(store.host, store.port, wait_for_workers=False)
    elif isinstance(store, FileStore):
        other = FileStore(cast(Any, store).path)
    else:
        other = store
    return PrefixStore(prefix, other)


def prefix_for(store: Store, rank: int) -> str:
    """Keys for the next communicator of the ranks that meet there. The Store counts: it may outlive groups, processes.

    Raises TypeError for the Store of a fake group, which keeps nothing.
    """
    try:
        return f"communicators/{store.add(f'communicators/made/{rank}', 1)}"
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
        raise TypeError(
            "the Store keeps nothing, as that of a fake process group, so no other rank can be met there: for many "
            "ranks in one process take a SimulatedWorld"
        ) from None


def barrier(store: Store, rank: int, size: int, timeout: float) -> None:
    """Returns when all ranks have come; connecting would wait for a missing one without end, and say nothing.

    Raises CollectiveError after `timeout` seconds.
    """
    begin, nap, keys = time.monotonic(), 1e-3, [f"here/{peer}" for peer in range(size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        if time.monotonic() - begin > timeout:
            missing = [peer for peer in range(size) if not store.check([keys[peer]])]
            store.delete_key(keys[rank])  # whoever comes later shall not connect to this rank
            raise CollectiveError(
                f"timed out after {timeout:g} s: rank {rank} waits for ranks {missing} in the first call with this "
                "process group, which all of its ranks must make"
            )
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)
