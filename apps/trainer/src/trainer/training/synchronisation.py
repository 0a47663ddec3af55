"""How ranks share what they learn, by name: an optimizer for each `--algorithm`.

Momentum has one place. Dense: in SGD, after the exchange. Sparse: in the error feedback, before selection (the
momentum correction of DGC, Lin et al. 2018, with factor masking), because momentum applied to what survives a
selection amplifies the few entries that were sent and learns badly at small densities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.command_line.literals import literal_dict

if TYPE_CHECKING:
    from communicators import Communicator
    from sparse_collectives import DistributedOptimizer
    from torch import nn

    from trainer.command_line.options import Options


def dense(options: Options, model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    """Synchronous SGD: the mean of all gradients."""
    from sparse_collectives import DistributedOptimizer
    from torch.optim import SGD

    inner = SGD(model.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
    return DistributedOptimizer(
        inner,
        model.named_parameters(),
        comm=comm,
        algorithm="dense",
        wire=options.wire,
        nonfinite=options.nonfinite,
        verify=options.verify,
    )


def sparse(options: Options, model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    """Synchronous SGD on the k largest entries, the rest fed back into the next step.

    Weight decay stays out of the exchange and is therefore not amplified by the momentum, which in dense SGD makes
    it 1/(1 − m) times as strong: that factor is put back here.
    """
    from sparse_collectives import DistributedOptimizer
    from sparse_compress import TopK
    from torch.optim import SGD

    inner = SGD(model.parameters(), lr=options.lr, weight_decay=options.weight_decay / (1 - options.momentum))
    return DistributedOptimizer(
        inner,
        model.named_parameters(),
        comm=comm,
        compressor=TopK(options.density),
        algorithm=options.algorithm,
        options={"teams": options.teams} if options.algorithm == "spardl" else None,
        wire=options.wire,
        momentum=options.momentum,
        nonfinite=options.nonfinite,
        verify=options.verify,
    )


Synchronisation = Callable[["Options", "nn.Module", "Communicator"], "DistributedOptimizer"]
SPARSE = tuple(name for name in literal_dict("algorithms/table", "ALGORITHMS") if name != "dense")
DENSE_WIRES = tuple(literal_dict("wire/half", "DENSE_WIRES"))
WIRES = tuple(literal_dict("wire/wire", "WIRES"))
SYNCHRONISATIONS: dict[str, Synchronisation] = {"dense": dense, **dict.fromkeys(SPARSE, sparse)}
