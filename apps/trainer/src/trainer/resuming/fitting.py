"""A checkpoint's state must be one that this replica could have written after so many steps.

Checksums find damage; this finds files that were exchanged, cut down or made by somebody else, which a load would
take in part, or which would stop training later.
"""

from typing import Any

from torch import Tensor

from trainer.command_line.options import Options
from trainer.errors import DamagedError
from trainer.resuming.likeness import require_keys, require_like
from trainer.training import phases
from trainer.training.replica import Replica

State = dict[str, Any]
PHASES = [f"{name}_seconds" for name in (*phases.PHASES, "evaluation")]


def fitted(state: State, replica: Replica, options: Options, *, step: int, steps_per_epoch: int) -> State:
    """`state`, completed by what older versions of a library did not write; DamagedError that names what does not fit.

    replica: one that has taken no step; nothing of it is changed.
    """
    fresh, synchronised = replica.state_dict(), replica.synchroniser.state_dict().keys()
    require_keys(state, fresh, "the state")
    if isinstance(state["totals"], dict):  # phases were not told apart before
        state = state | {"totals": dict.fromkeys(PHASES, 0.0) | state["totals"]}
    _allow_another_device(state, fresh)
    for name in fresh.keys() - synchronised:
        require_like(state[name], fresh[name], f"the state/{name}")
    if divmod(step, steps_per_epoch) != (state["position"]["epoch"], state["position"]["step"]):
        raise DamagedError(f"position {state['position']} is not that of step {step}")
    if state["position"]["epoch"] > options.max_epochs:
        raise DamagedError(f"it has more epochs than --max-epochs {options.max_epochs} asks for")
    return state | replica.synchroniser.fitted({name: state[name] for name in synchronised}, step=step)


def _allow_another_device(state: State, fresh: State) -> None:
    """Where only one of the two runs has a GPU, that one's random numbers are not looked for in the other."""
    then, now = state["cuda_rng"], fresh["cuda_rng"]
    if then is None or (now is None and isinstance(then, Tensor)):
        fresh["cuda_rng"] = then
