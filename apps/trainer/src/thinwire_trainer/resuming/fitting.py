"""A checkpoint's state must be one that this replica could have written after so many steps.

Checksums find damage; this finds files that were exchanged, cut down or made by somebody else, which a load would
take in part, or which would stop training later.
"""

from typing import Any

from torch import Tensor

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import DamagedError
from thinwire_trainer.resuming.likeness import require_keys, require_like
from thinwire_trainer.training import phases
from thinwire_trainer.training.replica import Position, Replica

State = dict[str, Any]
PHASES = [f"{name}_seconds" for name in (*phases.PHASES, "evaluation")]
SINCE = {"since_epoch": 0, "since_step": 0}


def fitted(state: State, replica: Replica, options: Options, *, step: int, steps_per_epoch: int) -> State:
    """`state`, completed by what older versions of a library did not write; DamagedError that names what does not fit.

    replica: one that has taken no step; nothing of it is changed.
    """
    state = fitted_rank(state, replica, options, step=step, steps_per_epoch=steps_per_epoch)
    scheduled = Position(**state["position"]).scheduled(steps_per_epoch)
    return state | replica.synchroniser.fitted(synchronised(state, replica), step=scheduled)


def fitted_rank(state: State, replica: Replica, options: Options, *, step: int, steps_per_epoch: int) -> State:
    """The same, but for what is the synchroniser's."""
    fresh = replica.state_dict()
    require_keys(state, fresh, "the state")
    if isinstance(state["totals"], dict):  # phases were not told apart before
        state = state | {"totals": dict.fromkeys(PHASES, 0.0) | state["totals"]}
    if isinstance(state["position"], dict):  # the number of ranks could not change before
        state = state | {"position": SINCE | state["position"]}
    _allow_another_device(state, fresh)
    for name in fresh.keys() - replica.synchroniser.state_dict().keys():
        require_like(state[name], fresh[name], f"the state/{name}")
    position = Position(**state["position"])
    if position.taken(steps_per_epoch) != step or position.step >= steps_per_epoch:
        raise DamagedError(f"position {state['position']} is not that of step {step}")
    if position.epoch > options.max_epochs:
        raise DamagedError(f"it has more epochs than --max-epochs {options.max_epochs} asks for")
    return state


def synchronised(state: State, replica: Replica) -> State:
    """What is the synchroniser's."""
    return {name: state[name] for name in replica.synchroniser.state_dict()}


def _allow_another_device(state: State, fresh: State) -> None:
    """Where only one of the two runs has a GPU, that one's random numbers are not looked for in the other."""
    then, now = state["cuda_rng"], fresh["cuda_rng"]
    if then is None or (now is None and isinstance(then, Tensor)):
        fresh["cuda_rng"] = then
