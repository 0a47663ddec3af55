"""Settings that depend on the step number: the density, and whether replicas are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from communicators import Communicator
from replicas import hash_bits, refuse_unlike
from replicas.group_settings import shared_settings
from sparse_collectives import Algorithm
from sparse_compress import Compressor
from torch import Tensor
from torch.optim import Optimizer

SETTINGS_EVERY = 100
"""Steps between two comparisons of parameter groups' settings, the first of which is in the first step."""
Schedule = Callable[[int], float]
"""From the number of a step, from 0 on, to the share of elements to send in it."""


class Steps:
    """Counts steps, and sets the compressor's density before each if there is a schedule.

    verify: number of steps between comparisons of the ranks' parameters; None or 0: never, but see `shared`.

    Only the count belongs in a checkpoint: the density depends on nothing else, so a resumed run continues with it.
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
        """Final density if it is known: the `density` of the schedule or of the compressor; else 1."""
        return float(getattr(self._schedule or self._compressor, "density", 1.0))

    def density_of(self, entry: Algorithm | None) -> float:
        """Fraction that an algorithm sends now; 1 if it selects nothing, or if the compressor has no density."""
        selects = entry is not None and entry.selects
        return float(getattr(self._compressor, "density", 1.0)) if selects else 1.0

    def selects_from(self, numel: int) -> bool:
        """Whether fewer than all of `numel` elements are sent now."""
        return bool(self._compressor.entries(numel) < numel)

    @property
    def matter(self) -> bool:
        """Whether a resumed run needs the count to continue with the same bits."""
        return self._schedule is not None

    def begin(self) -> None:
        """Sets the density before a step's first selection. Raises the compressor's errors for an invalid one."""
        if self._schedule is not None:
            self._compressor.density = self._schedule(self.taken)

    def resume(self, taken: int) -> None:
        """Resumes after `taken` steps, with parameters that may have been loaded."""
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
        return f" with {shared_settings(optimizer)}{begun}"

    def count(self, parameters: Mapping[str, Tensor], comm: Communicator) -> None:
        """Counts a step. Raises CollectiveError on every rank if a comparison is due and parameters differ."""
        self.taken += 1
        if self._verify and self.taken % self._verify == 0:
            refuse_unlike(parameters, comm)
