"""Several sparse allreduces in flight while the caller computes, and which algorithm is the fastest here.

torchrun --nproc-per-node 2 examples/async_allreduce.py
"""

import torch
import torch.distributed as dist
from communicators import as_communicator
from sparse_collectives import Choice, choose, sparse_allreduce, sparse_allreduce_async
from sparse_compress import topk

NUMEL, K, LAYERS = 100_000, 1000, 4


def main() -> None:
    """Sums a few gradients, those of the last layer first, as backward brings them."""
    comm = as_communicator()  # the default process group; under mpiexec COMM_WORLD
    choice: Choice = choose(comm, numel=NUMEL, k=K, selected=True, dense=False)
    if comm.rank == 0:
        print(choice)
    draw = torch.Generator().manual_seed(comm.rank)
    gradients = [torch.randn(NUMEL, generator=draw) for _ in range(LAYERS)]
    works = []
    for gradient in reversed(gradients):
        # All ranks start their calls in the same order. What is given is copied: it may change at once.
        works.append(sparse_allreduce_async(topk(gradient, K), comm, k=K))
    square = torch.randn(300, 300)
    for _ in range(20):  # what the network hides behind
        square = torch.tanh(square @ square)
    for gradient, work in zip(reversed(gradients), works, strict=True):
        at_once = sparse_allreduce(topk(gradient, K), comm, k=K)
        mean = work.wait().mean(out=gradient)  # over ranks, in the gradient's place
        assert torch.equal(mean, at_once.mean())  # the same bits
    hidden = sum(work.ended - work.began for work in works)
    if comm.rank == 0:
        print(f"{LAYERS} sums of {K} of {NUMEL} entries, {hidden * 1e3:.1f} ms under way in the background")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
