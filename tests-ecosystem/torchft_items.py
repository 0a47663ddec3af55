"""torchft: its process groups, which are set up anew when ranks come and go."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from communicators import allreduce, as_communicator
from items import collector
from torch import nn

ITEMS = []
item = collector("torchft", ITEMS)


def groups():
    """A group, three times set up anew, as torchft's manager does where ranks have come or gone."""
    from torchft.process_group import ProcessGroupGloo

    rank, size = dist.get_rank(), dist.get_world_size()
    ports = [None]
    if rank == 0:
        ports = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
        keep.append(ports[0])
        ports = [ports[0].port]
    dist.broadcast_object_list(ports)
    group = ProcessGroupGloo()
    for quorum in range(3):
        group.configure(f"localhost:{ports[0]}/{os.environ['MASTER_PORT']}/{quorum}", f"replica {rank}", rank, size)
        yield group


keep = []  # Stores, while others are connected to them


@item("its groups", "a communicator of the group that is wrapped, anew after each `configure`; no Store is needed")
def as_communicators(folder):
    for group in groups():
        comm = as_communicator(group.parent)  # ours
        assert (comm.rank, comm.size) == (dist.get_rank(), 2)
        assert allreduce(torch.full((3,), 1.0 + comm.rank), comm).tolist() == [3.0] * 3


@item("its groups, not what they wrap", "a TypeError, because such a group calls every rank 0")
def not_what_they_wrap(folder):
    for group in groups():
        assert group.rank() == 0
        for store in (None, dist.HashStore()):
            with pytest.raises(TypeError, match=r"a ProcessGroupGloo says .* as_communicator\(group\.parent\)"):
                as_communicator(group, store=store)


@item("`DistributedOptimizer` on a quorum", "ranks agree bit for bit, before and after `configure`")
def an_optimizer_on_a_quorum(folder):
    from data_parallel import DistributedOptimizer

    model = nn.Linear(20, 10)
    for group in groups():
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=group.parent, density=0.1)  # ours
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
        weights = [None, None]
        dist.all_gather_object(weights, model.weight.detach())
        assert torch.equal(*weights)
