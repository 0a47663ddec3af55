"""Means and copies over ranks of any list of tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from communicators import Communicator, buckets_of, run, schedules
from torch import Tensor


def average(tensors: Sequence[Tensor], comm: Communicator, *, facts: str) -> None:
    """Replaces every floating-point tensor by its mean over ranks, computed in 32 bits or more."""
    for bucket in buckets_of(tensors):
        bucket = replace(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
        total = run(
            schedules.allreduce(bucket.gather(tensors), comm.rank, comm.size),
            comm,
            facts=f"{facts}, mean of {bucket.numel} elements, {bucket.dtype}",
            device=bucket.device,
        )
        bucket.scatter(total.div_(comm.size), tensors)


def copy_from_first(tensors: Sequence[Tensor], comm: Communicator, *, facts: str) -> None:
    """Replaces every tensor by rank 0's."""
    for bucket in buckets_of(tensors):
        flat = run(
            schedules.broadcast(bucket.gather(tensors), comm.rank, comm.size),
            comm,
            facts=f"{facts}, rank 0's {bucket.numel} elements, {bucket.dtype}",
            device=bucket.device,
        )
        bucket.scatter(flat, tensors)
