"""An optimizer round another one: schedulers, scalers and checkpoints take it for an optimizer, which it is."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn, SupportsIndex

from torch.optim import Optimizer


class Wrapping(Optimizer):
    """Shares param_groups, state and defaults with the optimizer that it wraps, so that either may be asked.

    GradScaler treats it as any optimizer: it unscales the gradients, and leaves out `step` where it found an inf.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer to wrap")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self._share()
        optimizer.register_load_state_dict_post_hook(partial(_share_again, weakref.ref(self)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is made; later every rank would have to agree on what is exchanged."""
        if "optimizer" in self.__dict__:
            name = type(self).__name__
            raise RuntimeError(
                f"parameters cannot be added to a {name}: add the group to the wrapped optimizer, "
                f"and make a new {name} of it"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copy and pickle, which would make an optimizer of other parameters than the model's, or of none."""
        del protocol
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save its state_dict(), make another one, and load "
            "that there"
        )

    def _share(self) -> None:
        """Takes the wrapped optimizer's own objects, which it replaces when it loads a state."""
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults


def _share_again(wrapping: weakref.ref[Wrapping], optimizer: Optimizer) -> None:
    """Shares again after the wrapped optimizer loaded a state. It must not keep a wrapper alive that was replaced."""
    del optimizer
    living = wrapping()
    if living is not None:
        living._share()
