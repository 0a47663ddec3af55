"""Ranks with fewer steps than others, under torch's `Join`: who has no more inputs takes part with no gradients."""

from collections.abc import Mapping
from functools import partial
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from communicators import allreduce, broadcast, buckets_of
from replicas import broadcast_state, default_group
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer


def group_for_join(given: Any) -> dist.ProcessGroup:
    """Process group of an optimizer's comm; TypeError if torch's `Join` cannot use it."""
    if getattr(given, "elastic", False):
        raise TypeError(
            "Join counts the ranks of a fixed process group, but those of an Elastic come and go: a rank without "
            "further batches calls world.leave() before its last step, and the others go on without it"
        )
    group = default_group() if given is None else given
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"Join counts ranks by a torch process group, but comm is {type(given).__name__}: give the optimizer the "
            "process group itself, or none for the default one"
        )
    return group


class Shadow(JoinHook):
    """Steps along while others have inputs: means stay over all ranks, and this one's residuals are sent as ever.

    At the end all ranks get the parameters, the wrapped optimizer's state, and its groups' settings that are numbers,
    such as the learning rate, of one that joined last: its rate was scheduled to the end. Schedulers stay each rank's:
    step them per epoch, after `Join`, or equally often on all ranks. State goes by parameter: an `UpdateOptimizer` has
    none of those that this one's inputs never used, such as other ranks' experts, on any rank then. A rank may have no
    input at all.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._tells = optimizer, True

    @property
    def uneven(self) -> bool:
        """Whether a rank may have finished, and so schedules its rate no more."""
        config = self._optimizer._join_config
        return bool(config.enable and not config.throw_on_early_termination)

    def tell(self) -> None:
        """Tells `Join` that a step of this rank begins."""
        if self._tells:
            Join.notify_join_context(self._optimizer)

    def main_hook(self) -> None:
        """Takes part in a step of the others."""
        self._tells = False
        self._optimizer.zero_grad()
        self._optimizer.step(lambda: 0.0)  # a closure: the optimizer calls it where gradients are to be made
        self._optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes over the last joiner's parameters, state and groups' settings, once all ranks have joined."""
        optimizer, comm = self._optimizer, self._optimizer.comm
        optimizer.shadow = None
        last = torch.zeros(comm.size, device="cpu")
        last[comm.rank] = float(is_last_joiner)
        source = int(allreduce(last, comm).nonzero()[0])
        parameters = [p.detach() for p in optimizer.trained.values()]
        for bucket in buckets_of(parameters):
            bucket.scatter(broadcast(bucket.gather(parameters), comm, root=source), parameters)
        inner, named = optimizer.optimizer, optimizer.named
        held = broadcast_state(partial(_held, inner, named), comm, root=source, device=optimizer.join_device)
        _take_over(inner, named, held)


def _held(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """State by the parameter's name, which ranks share, and the groups' settings."""
    state = {name: optimizer.state[p] for name, p in named.items() if optimizer.state.get(p)}
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_numeric(value)}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def _is_numeric(value: Any) -> bool:
    """Whether a setting is a number, a flag or a tensor, or several; what else a group holds stays a rank's."""
    return all(isinstance(one, Number | Tensor) for one in (value if isinstance(value, tuple | list) else (value,)))


def _plain(value: Any) -> Any:
    """The value; a number of NumPy's as Python's, because others cannot be loaded."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def _take_over(optimizer: Optimizer, named: Mapping[str, Tensor], held: Mapping[str, Any]) -> None:
    """Replaces the state by what another rank's optimizer has held, none where that had none; settings that both have.

    Settings are replaced in the groups themselves, which schedulers and wrappers share.
    """
    for group, values in zip(optimizer.param_groups, held["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key in group})
    for name, p in named.items():
        optimizer.state.pop(p, None)
        if name in held["state"]:
            optimizer.state[p] = {key: _beside(p, value) for key, value in held["state"][name].items()}


def _beside(p: Tensor, value: Any) -> Any:
    """The value on the parameter's device, unless it is kept on the CPU."""
    return value.to(p.device) if isinstance(value, Tensor) and value.device.type != "cpu" else value
