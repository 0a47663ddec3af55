"""What goes by the number of a step: the density, and whether replicas are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from communicators import Communicator, hash_bits, refuse_unlike
from communicators.replicas.group_settings import shared_settings
from sparse_compress import Compressor
from torch import Tensor
from torch.optim import Optimizer

from sparse_collectives.algorithm import Algorithm

SETTINGS_EVERY = 100
"""Steps between two comparisons of parameter groups' settings, the first of which is in the first step."""
Schedule = Callable[[int], float]
"""From the number of a step, from 0 on, to the share of elements to send in it."""


class Steps:
    """Counts steps. Sets a compressor's density before each; without a schedule it leaves that alone.

    verify: every so many steps the ranks' parameters are compared; None or 0: never, but see `shared`.

    Only the count belongs into a checkpoint: a density depends on it alone, so a run that is resumed goes on with it.
    """

    def __init__(self, compressor: Compressor, density: Any, verify: int | None) -> None:
        self._compressor: Any = compressor
        self._schedule: Schedule | None = density if callable(density) else None
        self._verify = verify
        self.taken = 0
        self._begins = True
        self.begin()  # what the schedule gives is checked at once, and is known before the first step

    @property
    def last_density(self) -> float:
        """What it ends at, where that can be told: a compressor's own density, or what a schedule calls its; else 1."""
        return float(getattr(self._schedule or self._compressor, "density", 1.0))

    def density_of(self, entry: Algorithm | None) -> float:
        """What an algorithm sends now, as a share; 1 where it selects nothing, and where a compressor does not tell."""
        selects = entry is not None and entry.selects
        return float(getattr(self._compressor, "density", 1.0)) if selects else 1.0

    def selects_from(self, numel: int) -> bool:
        """Whether less than all of so many elements is sent now."""
        return bool(self._compressor.entries(numel) < numel)

    @property
    def matter(self) -> bool:
        """Whether a run that is resumed needs the count to go on with the same bits."""
        return self._schedule is not None

    def begin(self) -> None:
        """Before a step's first selection. Raises what the compressor raises for what is no density."""
        if self._schedule is not None:
            self._compressor.density = self._schedule(self.taken)

    def resume(self, taken: int) -> None:
        """After so many, with parameters that may have been loaded."""
        self.taken, self._begins = taken, True

    def shared(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> str:
        """Facts of the step that begins, unless `verify` is 0: parameters before the first, and groups' settings."""
        begins, self._begins = self._begins, False
        if self._verify == 0 or not (begins or self.taken % SETTINGS_EVERY == 0):
            return ""
        begun = ""
        if begins:
            digest = int(hash_bits(torch.stack([hash_bits(p).cpu() for p in parameters.values()])))
            begun = f", begun with parameters of hash {digest % 2**64:016x} (load weights on all ranks alike)"
        return f"{begun}, step {self.taken} with {shared_settings(optimizer)}"

    def count(self, parameters: Mapping[str, Tensor], comm: Communicator) -> None:
        """One more. Raises CollectiveError, on every rank, where it is time to compare and parameters differ."""
        self.taken += 1
        if self._verify and self.taken % self._verify == 0:
            refuse_unlike(parameters, comm)
