"""Two ranks sum their largest entries over gloo: `torchrun --nproc-per-node 2 first_step.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sparse_collectives import sparse_allreduce
from sparse_compress import topk

dist.init_process_group("gloo")
gradients = torch.randint(-99, 100, (dist.get_world_size(), 1000), generator=torch.Generator().manual_seed(0)).float()
mine = topk(gradients[dist.get_rank()], 10)
total = sparse_allreduce(mine, dist.group.WORLD, k=10, algorithm="topk-allgather").total.to_dense()
assert torch.equal(total, torch.stack([topk(gradient, 10).to_dense() for gradient in gradients]).sum(0))
dist.destroy_process_group()
