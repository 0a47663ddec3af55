"""Ranks with fewer steps than others, under torch's `Join`: who has no more inputs takes part with no gradients."""

from typing import Any

import torch
import torch.distributed as dist
from communicators import allreduce, broadcast, buckets_of
from replicas import default_group
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

    At the end all ranks get the parameters, and the wrapped optimizer's state, of one that joined last: its learning
    rate was scheduled to the end.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._tells = optimizer, True

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
        """Takes over the last joiner's parameters and state, once all ranks have joined."""
        self._tells = False
        comm, inner = self._optimizer.comm, self._optimizer.optimizer
        last = torch.zeros(comm.size, device="cpu")
        last[comm.rank] = float(is_last_joiner)
        source = int(allreduce(last, comm).nonzero()[0])
        tensors = _tensors_of(inner)
        for bucket in buckets_of(tensors):
            bucket.scatter(broadcast(bucket.gather(tensors), comm, root=source), tensors)


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Parameters and state, in one order on all ranks; all have taken the same number of steps."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [optimizer.state[p][name] for p in parameters if p in optimizer.state for name in sorted(optimizer.state[p])]
    return [p.detach() for p in parameters] + [t for t in kept if isinstance(t, Tensor) and t.is_floating_point()]
