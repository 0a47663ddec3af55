"""torchft's manager on the ranks of a process group, each of which is a replica group of its own."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

HEARTBEATS, PATIENCE = timedelta(seconds=5), timedelta(seconds=50)
"""Between two of a rank, so that they take nothing from others' steps (torchft's default is 0.1 s), and without any."""


@contextmanager
def manager_of(model: nn.Module) -> Iterator[Any]:
    """A manager, with its lighthouse on rank 0. All ranks enter, and leave together."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, size, host, lighthouse = dist.get_rank(), dist.get_world_size(), _own_address(), None
    if rank == 0:
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=size, heartbeat_timeout_ms=round(1e3 * PATIENCE.total_seconds())
        )
    address = [None if lighthouse is None else f"http://{host}:{lighthouse.address().rpartition(':')[2]}"]
    dist.broadcast_object_list(address, src=0)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"replica {rank}",
        hostname=host,
        heartbeat_interval=HEARTBEATS,
        init_sync=False,  # or one replica loads the other's model at the first boundary, and has no say there
    )
    try:
        yield manager
    finally:
        dist.barrier()
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()


def _own_address() -> str:
    """Address at which other ranks reach this one."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(master) as connection:
        return str(connection.getsockname()[0])
