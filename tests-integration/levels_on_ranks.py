"""Two levels on four real ranks, against the simulated world: python levels_on_ranks.py mpi|gloo, on every rank."""

from __future__ import annotations

import sys
from functools import partial

import torch
from communicators import SimulatedWorld, allgather, as_communicator
from local_sgd import DiLoCo, LocalSGD


def trained(algorithm, comm, pair):
    """The end. pair: a communicator of two ranks, this one and its neighbour."""
    p = torch.nn.Parameter(torch.zeros(3000))
    optimizer = algorithm(torch.optim.Adam([p], lr=0.1), sync_every=[(pair, 2), (comm, 6)])
    for step in range(13 + comm.rank):
        p.grad = torch.randn(3000, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        optimizer.step()
        optimizer.average()
    optimizer.finish()
    return p.detach().clone()


def main(world):
    """Exits with 1 where the bits differ."""
    if world == "mpi":
        from mpi4py import MPI

        comm = as_communicator(MPI.COMM_WORLD)
        pair = MPI.COMM_WORLD.Split(comm.rank // 2)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        comm = as_communicator(None)
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][comm.rank // 2]
    same = True
    for turn, algorithm in enumerate((LocalSGD, partial(DiLoCo, compress="int8"))):
        found = allgather(trained(algorithm, comm, pair), comm)
        if turn == comm.rank:  # one rank simulates
            world = SimulatedWorld(4)
            simulated = world.run(lambda one, a=algorithm: trained(a, one, one.split(one.rank // 2)))
            same = all(map(torch.equal, found, simulated))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main(sys.argv[1])
