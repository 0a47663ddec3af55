"""Parameters that modules replace by others after an optimizer was made of them."""

import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class ReplacedParameters:
    """Parameters that a module has replaced by others since; a look at it costs nothing.

    `load_state_dict(assign=True)` replaces them, and so does `module.weight = nn.Parameter(…)`: an optimizer over the
    old ones would train what nothing uses any more. torch has one hook for all parameters that modules are given: there
    is a single one of ours, and it stays.

    named: by name, kept alive by the holder of this object. owner: the wrapper of their optimizer.
    """

    def __init__(self, named: Mapping[str, Tensor], owner: str) -> None:
        self._names, self._owner = {id(p): name for name, p in named.items()}, owner
        self._gone: dict[int, tuple[str, Tensor]] = {}
        _hooked()
        _WATCHING.add(self)

    def note(self, old: Tensor, new: Tensor) -> None:
        """Notes that a module has `new` in the place of `old` from now on."""
        self._gone.pop(id(new), None)
        if id(old) in self._names and id(new) not in self._names:
            self._gone[id(old)] = self._names[id(old)], old

    def refuse(self) -> None:
        """Raises ValueError where parameters were replaced, before they are stepped.

        One that still gets gradients is in use: another module that shared it has let go of it.
        """
        lost = [name for name, p in self._gone.values() if p.grad is None or not bool(p.grad.any())]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(
                f"the model has other parameters now than this {self._owner} was made of: {lost[0]!r}{more} of "
                f"{len(self._names)} were replaced, as "
                "load_state_dict(..., assign=True) does, so that a step would train what the model no longer uses: "
                f"load with assign=False, or make optimizer and {self._owner} anew, on every rank"
            )


_WATCHING: weakref.WeakSet[ReplacedParameters] = weakref.WeakSet()


@cache
def _hooked() -> Any:
    return register_module_parameter_registration_hook(_registered)


def _registered(module: nn.Module, name: str, new: Tensor) -> None:
    old = module._parameters.get(name)
    if old is not None and old is not new:
        for watching in list(_WATCHING):
            watching.note(old, new)
