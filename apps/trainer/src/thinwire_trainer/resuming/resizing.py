"""Going on with another number of ranks: a state for each of them, out of those of all ranks that there were.

Only from an epoch's end: from there on the samples are dealt out anew. What all ranks share (parameters, and SGD's
state) stays as it is; what was each rank's own is shared out by the rules below, and those of the synchroniser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import RunError
from thinwire_trainer.resuming.fitting import State, synchronised
from thinwire_trainer.training.replica import Position, Replica, Totals

OWN = ("generator", "torch_rng", "cuda_rng")


def require_end_of_epoch(state: State, ranks: int) -> None:
    """RunError in the middle of an epoch, whose samples are dealt out already."""
    if state["position"]["step"]:
        raise RunError(
            f"the checkpoint is from the middle of an epoch, whose samples were dealt out to {ranks} ranks: take one "
            f"from an epoch's end (--resume previous may be one), or go on with --nworkers {ranks} until there is one"
        )


def resized(
    states: Sequence[State], replica: Replica, options: Options, *, rank: int, step: int, per_epoch: tuple[int, int]
) -> State:
    """This rank's state, out of `states`: those of all ranks then, in rank order, at an epoch's end after `step` steps.

    per_epoch: steps in an epoch then, and now.
    Floating-point buffers are the means of those of all ranks, as evaluations have them; others are rank 0's. A rank
    that there was goes on with its random numbers, a further one begins with its own. What the task carries from batch
    to batch begins anew. The epoch's totals are empty.
    RunError where the synchroniser cannot.
    """
    fresh, epoch = replica.state_dict(), states[0]["position"]["epoch"]
    own = states[rank] if rank < len(states) else fresh
    parts = replica.synchroniser.resized(
        [synchronised(state, replica) for state in states],
        before=epoch * per_epoch[0],
        after=epoch * per_epoch[1],
        drop=options.residuals == "drop",
    )
    return {
        "model": _model([state["model"] for state in states], replica),
        **parts,
        **{name: fresh[name] for name in ("task",) if name in fresh},
        **{name: own[name] for name in OWN},
        "position": asdict(Position(epoch=epoch, since_epoch=epoch, since_step=step)),
        "totals": asdict(Totals()),
    }


def _model(models: Sequence[dict[str, Any]], replica: Replica) -> dict[str, Any]:
    """Rank 0's parameters, which are those of all."""
    averaged = {name for name, buffer in replica.model.named_buffers() if buffer.is_floating_point()}
    means = {
        name: torch.stack([model[name].double() for model in models]).mean(0).to(models[0][name].dtype)
        for name in averaged & models[0].keys()
    }
    return models[0] | means
