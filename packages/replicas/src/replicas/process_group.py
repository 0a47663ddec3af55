"""The default process group, and DDP in it: whether the ranks that a wrapper found are those that train."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from communicators import Communicator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAID = (
    "{seen}: DistributedDataParallel sums these gradients whole, among the same ranks, before this {owner} has them, "
    "which so saves nothing: give the model without DDP, or put forward and backward of every step into `with "
    "ddp.no_sync():`{instead}. Where that is so already, give ddp.module and its names, and this is not said"
)


def default_group() -> Any:
    """The default process group, None while there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def refuse_alone(what: str) -> None:
    """Raises RuntimeError where there is a default process group of several ranks, for one that found a single rank."""
    group = default_group()
    if group is not None and group.size() > 1:
        raise RuntimeError(
            f"{what} was made before init_process_group(), found one rank, and would train alone, but there are "
            f"{group.size()} ranks now: make it after init_process_group(), or give it comm"
        )


def warn_of_ddp(
    trained: dict[str, Tensor], model: nn.Module | None, given: Any, comm: Communicator, *, owner: str, instead: str
) -> None:
    """Warns where DDP exchanges the gradients of these parameters too, as far as a wrapper is shown that.

    A DDP module is seen as `model`, or within it; without a model by names that all begin with "module.", as DDP's do,
    where the wrapper is among all ranks. DDP inside a node, and the wrapper between nodes, is as it should be.

    given: comm as the user gave it. owner: the wrapper. instead: what else to do.
    """
    if default_group() is None or comm.size == 1:
        return
    modules = [m for m in model.modules() if isinstance(m, DistributedDataParallel)] if model is not None else []
    seen = ""
    if any(_covers(module.process_group, given) and _has(module, trained.values()) for module in modules):
        seen = "model= is in DDP"
    elif model is None and comm.size == dist.get_world_size() and all(name.startswith("module.") for name in trained):
        seen = "the parameters' names all begin with 'module.', as those of a DDP module do; if they are of one"
    if seen:
        warnings.warn(SAID.format(seen=seen, owner=owner, instead=instead), stacklevel=5)


def _has(module: DistributedDataParallel, trained: Iterable[Tensor]) -> bool:
    known, ignored = {id(p) for p in trained}, module.parameters_to_ignore
    return any(id(p) in known and name not in ignored for name, p in module.module.named_parameters())


def _covers(group: Any, given: Any) -> bool:
    """Whether all ranks of a wrapper are in DDP's group; of a communicator without a process group only if all are."""
    if group.size() == dist.get_world_size():
        return bool(group.size() > 1)
    if not isinstance(given, dist.ProcessGroup):
        return False
    return set(dist.get_process_group_ranks(given)) <= set(dist.get_process_group_ranks(group))
