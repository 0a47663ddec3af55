"""The Store by which the ranks of a process group met; what of it torch has only had since 2.8 or 2.9 is here."""

from __future__ import annotations

import uuid
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d


def store_of(group: dist.ProcessGroup) -> Store:
    """The keys of this group."""
    own: Any = getattr(group, "get_group_store", None)
    return cast(Store, own() if own is not None else distributed_c10d._get_process_group_store(group))


def reconnected(group: dist.ProcessGroup) -> Store:
    """Keys of this group by a client of our own: a call that blocks holds up every other use of its client."""
    store: Any = store_of(group)
    if hasattr(store, "clone"):
        return cast(Store, store.clone())
    place = store.compare_set("communicators/elsewhere", "", uuid.uuid4().hex).decode()  # that of who was first
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        other: Store = TCPStore(store.host, store.port, wait_for_workers=False)
    elif isinstance(store, FileStore):
        other = FileStore(cast(Any, store).path)
    else:
        other = store
    return PrefixStore(place, other)
