"""FSDP2's shards, as the exchange sees them: one flat gradient for each group of parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from communicators import Bucket
from torch import Tensor, nn

BROKEN = (
    "an exception has broken off the last backward, and FSDP, which did not see its end, would leave out gradients: "
    "call reset_iter_state() of its root module, or, where torch lacks that, go on from a checkpoint in a new model"
)


class Shard:
    """The parameters that one call of `fully_shard` took together, and this rank's part of each.

    name: the module's. positions: of the parameters, by id, in the list of all names.
    """

    def __init__(self, name: str, module: Any, group: Any, positions: dict[int, int]) -> None:
        self.name, self.group, self._module = name, group, module
        self._positions = positions

    @property
    def trained(self) -> list[Any]:
        """FSDP's parameters that learn, in the order in which their gradients lie in the flat one."""
        return [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    def when_reduced(self, hook: Callable[[Tensor], None]) -> None:
        """Calls `hook` with this rank's part of the gradient, the mean over the node, in every backward."""
        unused: Any = getattr(self._module, "set_reduce_scatter_unused_params", None)
        if unused is not None:
            unused(True)  # of a parameter that was not used zeros, so that ranks agree on sizes
        self._module.set_all_reduce_hook(hook)

    @property
    def waits_for_end(self) -> bool:
        """Whether FSDP waits for the end of a backward: outside of one only where it has missed that."""
        context = getattr(self._module._get_fsdp_state(), "_state_ctx", None)
        return bool(getattr(context, "post_backward_final_callback_queued", False))

    @property
    def numel(self) -> int:
        """Number of elements of this rank's part of the trained parameters, padded."""
        return sum(p.padded_sharded_param_size.numel() for p in self.trained)

    def bucket(self, flat: Tensor) -> Bucket:
        """The parameters' padded parts in the flat gradient; RuntimeError where some have none in this backward."""
        members = tuple(self._positions[id(p.sharded_param)] for p in self.trained)
        bucket = Bucket(members, tuple(p.padded_sharded_param_size for p in self.trained), flat.dtype, flat.device)
        if bucket.numel != flat.numel():
            raise RuntimeError(
                f"module {self.name!r}: a gradient of {flat.numel()} elements came, expected {bucket.numel}: use all "
                "its trained parameters in every backward, or freeze them with requires_grad_(False) on every rank"
            )
        return bucket

    def may_wait(self, flat: Tensor) -> bool:
        """Whether p.grad will lie in this very memory, and nobody reads it before backward has ended."""
        return flat.is_cpu and all(
            p.sharded_param.grad is None
            and p.sharded_param.dtype == flat.dtype
            and not p.offload_to_cpu
            and not getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
            for p in self.trained
        )


def shards_of(model: nn.Module) -> tuple[list[Shard], dict[str, nn.Parameter]]:
    """All that `fully_shard` made of a model, and its parameters by name.

    Raises ValueError where it made nothing of it, where parameters are in none, where it sums between nodes
    itself, and where another hook does.
    """
    from torch.distributed.fsdp import FSDPModule  # here, because it takes seconds to import

    named = dict(model.named_parameters())
    positions = {id(p): position for position, p in enumerate(named.values())}
    shards: list[Shard] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if not hasattr(module, "set_all_reduce_hook"):
            raise RuntimeError(f"torch {torch.__version__} lacks FSDPModule.set_all_reduce_hook: take 2.7 or later")
        shards += [Shard(name, module, group, positions) for group in _groups(module)]
    if not shards:
        raise ValueError("no module of this model is sharded: call fully_shard(module, mesh=mesh['inside']) before")
    if any(shard.group._is_hsdp for shard in shards):
        raise ValueError(
            "fully_shard was given a mesh of two dimensions, so it sums whole gradients between nodes by itself: give "
            "it the one inside a node, fully_shard(module, mesh=mesh['inside'])"
        )
    if taken := [shard.name for shard in shards if shard.group._all_reduce_hook is not None]:
        raise ValueError(
            f"module {taken[0]!r} has an all-reduce hook already, of sparse_hsdp or set_all_reduce_hook: "
            "call sparse_hsdp once for a model, and keep what it returns"
        )
    sharded = {id(p.sharded_param) for shard in shards for p in shard.group.fsdp_params}
    if left := [name for name, p in named.items() if id(p) not in sharded and p.requires_grad]:
        raise ValueError(f"parameters that are in no shard, so that nobody would exchange them: {left}; shard the root")
    return shards, named


def refuse_after_break(model: nn.Module, shards: Sequence[Shard]) -> None:
    """Makes forward raise RuntimeError if FSDP has missed the end of a backward, and would go wrong."""

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and any(shard.waits_for_end for shard in shards):
            raise RuntimeError(BROKEN)

    model.register_forward_pre_hook(look, prepend=True)


def _groups(module: Any) -> list[Any]:
    """torch has had a list of them since 2.12."""
    state = module._get_fsdp_state()
    one = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) is not None else []
    return list(getattr(state, "_fsdp_param_groups", one))
