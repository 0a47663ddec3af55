"""Dense collectives as calls on tensors of any shape.

`comm` is whatever `as_communicator` takes; all ranks of it call.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from communicators.communicator import Work, run, start
from communicators.origin import as_communicator
from communicators.schedules import dense


def allreduce(tensor: Tensor, comm: Any, *, average: bool = False, native: bool = True) -> Tensor:
    """The sum (or mean) over ranks, out of place, on every rank the same bits.

    Args:
        tensor: This rank's summand; alike in shape and dtype on all.
        comm: See `as_communicator`; all ranks call.
        average: Gives the mean in place of the sum.
        native: Takes the transport's own allreduce where it has one; it may add in another order, so worlds agree
            within rounding. With native=False our schedule adds: the same bits in every world.
    """
    _check_sum(tensor)
    comm = as_communicator(comm)
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"the mean of {tensor.dtype} is not exact: convert to a float dtype or use average=False")
    facts = _facts("mean by allreduce" if average else "allreduce", tensor)
    total = comm.native_allreduce(tensor, facts=facts) if native else None
    if total is None:
        schedule = dense.allreduce(_flat(tensor), comm.rank, comm.size)
        total = run(schedule, comm, facts=facts, device=tensor.device)
    total = total.view(tensor.shape)
    return total.div_(comm.size) if average else total


def allreduce_async(tensor: Tensor, comm: Any) -> Work[Tensor]:
    """The sum over ranks in the background, by our schedule; `wait()` gives it, 1-D.

    Args:
        tensor: This rank's summand, copied now: what is written into it afterwards is not summed.
        comm: See `as_communicator`; all ranks call.
    """
    _check_sum(tensor)
    comm = as_communicator(comm)
    schedule = dense.allreduce(_flat(tensor).clone(), comm.rank, comm.size)
    return start(schedule, comm, facts=_facts("allreduce", tensor), device=tensor.device)


def broadcast(tensor: Tensor, comm: Any, *, root: int = 0) -> Tensor:
    """The root's tensor on every rank.

    Args:
        tensor: The tensor to send on the root; elsewhere it gives shape and dtype.
        comm: See `as_communicator`; all ranks call.
        root: Rank whose tensor is sent.
    """
    _check(tensor)
    comm = as_communicator(comm)
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is no rank of {comm.size}; expected 0 … {comm.size - 1}")
    schedule = dense.broadcast(_flat(tensor), comm.rank, comm.size, root)
    result = run(schedule, comm, facts=f"{_facts('broadcast', tensor)} from {root}", device=tensor.device)
    return result.view(tensor.shape)


def allgather(tensor: Tensor, comm: Any) -> list[Tensor]:
    """Every rank's tensor as 1-D, in rank order.

    Args:
        tensor: This rank's; numels may differ between ranks, the dtype may not.
        comm: See `as_communicator`; all ranks call.
    """
    _check(tensor)
    comm = as_communicator(comm)
    schedule = dense.allgather(_flat(tensor), comm.rank, comm.size)
    return run(schedule, comm, facts=f"allgather({tensor.dtype})", device=tensor.device)


def barrier(comm: Any) -> None:
    """Returns when every rank has called it.

    Args:
        comm: See `as_communicator`; all ranks call.
    """
    comm = as_communicator(comm)
    run(dense.barrier(comm.rank, comm.size), comm, facts="barrier")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()


def _facts(name: str, tensor: Tensor) -> str:
    return f"{name}(shape={tuple(tensor.shape)}, {tensor.dtype})"


def _check(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"a dense collective takes a torch tensor, got {type(tensor).__name__}; use torch.as_tensor first"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"a dense collective takes a strided tensor, got {tensor.layout}; use .to_dense() first")
    for kind in ("nested", "meta", "quantized"):
        if getattr(tensor, f"is_{kind}"):
            raise TypeError(f"a dense collective takes a plain tensor, that holds its elements, got a {kind} one")


def _check_sum(tensor: Tensor) -> None:
    _check(tensor)
    if not _adds(tensor.dtype, tensor.device):
        wider = torch.float32 if tensor.is_floating_point() else torch.int64
        raise TypeError(f"{tensor.dtype} does not add in torch: give it in another dtype, as by .to({wider})")


@cache
def _adds(dtype: torch.dtype, device: torch.device) -> bool:
    one = torch.zeros(1, dtype=dtype, device=device)
    try:
        one.add_(one)
    except RuntimeError:  # of torch 2.6; its NotImplementedError since
        return False
    return True
