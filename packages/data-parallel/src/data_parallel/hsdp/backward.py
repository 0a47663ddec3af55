"""End of a running backward: the call that follows it, and a refusal of forward where FSDP has missed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from data_parallel.hsdp.shards import Shard

BROKEN = (
    "an exception has broken off the last backward, and FSDP, which did not see its end, would leave out gradients: "
    "call reset_iter_state() of its root module, or, where torch lacks that, go on from a checkpoint in a new model"
)


def refuse_after_break(model: nn.Module, shards: Sequence[Shard]) -> None:
    """Makes forward raise RuntimeError if FSDP has missed the end of a backward, and would go wrong."""

    def look(*given: Any) -> None:
        del given
        if torch._C._current_graph_task_id() == -1 and any(shard.waits_for_end for shard in shards):
            raise RuntimeError(BROKEN)

    model.register_forward_pre_hook(look, prepend=True)


def at_the_end() -> Callable[[Callable[[], None]], None]:
    """Function that queues a callback for the end of the running backward; RuntimeError if this torch has none.

    It is private. FSDP2 and DDP use the same; public hooks are on tensors of the graph, which does not contain the
    sharded parameters.
    """
    engine: Any = getattr(Variable, "_execution_engine", None)
    queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
    if queue is None:
        raise RuntimeError(
            f"torch {torch.__version__} lacks Variable._execution_engine.queue_callback, which tells that backward has "
            "ended: take a version that has it, 2.6 to 2.13 do"
        )
    return queue
