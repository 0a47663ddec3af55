"""A sparse allreduce in an MPI program with NumPy arrays: no torch in the program, no optimizer.

    mpiexec -n 4 python examples/mpi_numpy.py

Every rank has measurements b; together they look for the x with the least Σ ½‖x − b‖², which is their mean. A rank
sends k of n entries of its gradient a step; what is not sent waits in its residual.
"""

import numpy as np
from mpi4py import MPI
from sparse_collectives import DenseReduction, sparse_allreduce_array

SHAPE, K, STEPS, RATE = (40, 25), 100, 600, 0.1


def main(comm: MPI.Comm) -> float:
    """The distance from the mean."""
    b = np.random.default_rng(comm.rank).normal(size=SHAPE).astype(np.float32)
    x, residual = np.zeros_like(b), np.zeros_like(b)
    for step in range(STEPS):
        accumulated = residual + (x - b)
        reduced: DenseReduction[np.ndarray] = sparse_allreduce_array(accumulated, comm, k=K, algorithm="spardl")
        residual = reduced.dropped  # all that was not sent, and what was cut on the way
        x -= RATE * (1 - step / STEPS) * reduced.total / comm.size
    return float(np.abs(x - comm.allreduce(b) / comm.size).max())


if __name__ == "__main__":
    distance = main(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{MPI.COMM_WORLD.size} ranks, {K} of {np.prod(SHAPE)} entries a step: off by at most {distance:.4f}")
