"""Random-k with a shared seed."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sparse_compress.arguments import check_keys, flatten, integer
from sparse_compress.compressors.density import Density
from sparse_compress.selection import gather
from sparse_compress.vector import SparseVector


class RandomK(Density):
    """Selects k random elements, whatever their values: entry j comes from [⌊jn/k⌋, ⌊(j+1)n/k⌋).

    The choice depends only on seed, name and how often that name was compressed: ranks that share them choose alike
    on any device, so indices need not travel (``indices`` gives them; the values can go through a dense allreduce).

    Differs from the usual choice among all subsets of size k: one element of each stratum of about n/k. Each
    element is as likely, so mean and E‖x − C(x)‖² are the same; indices are distinct and sorted at no cost.
    State: the number of calls by name.

    Args:
        density: The share of elements to send, 0 < density ≤ 1.
        seed: Any integer, the same on all ranks.
        unbiased: Every value is divided by its chance to be chosen, which makes E[C(x)] = x. Error feedback refuses
            it, and takes the biased form (Stich et al., NeurIPS 2018).

    Raises:
        TypeError: An argument is of another type.
        ValueError: density is out of range.
    """

    finds_nonfinite = False

    def __init__(self, density: float = 0.01, *, seed: int = 0, unbiased: bool = False) -> None:
        super().__init__(density)
        if not isinstance(unbiased, bool):
            raise TypeError(f"unbiased is {unbiased!r}, expected True or False")
        self.seed, self.unbiased = integer(seed, "seed", least=None, expected="the same on all ranks"), unbiased
        self._calls: dict[str, int] = {}

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        flat = flatten(tensor)
        call = self._calls.get(name, 0)
        indices = self.indices(len(flat), name=name, call=call)
        self._calls[name] = call + 1
        sparse = gather(flat, indices.to(flat.device))
        if self.unbiased and len(sparse):
            sparse.values.mul_(_strata(len(flat), len(sparse)).diff().to(sparse.values))
        return sparse

    def indices(self, numel: int, *, name: str = "", call: int = 0) -> Tensor:
        """Indices that a call chooses.

        Args:
            numel: Elements of the tensor.
            name: Name under which the tensor is compressed.
            call: Number of the call among those of that name, from 0.

        Returns:
            int64, (k,), increasing, on the CPU.
        """
        generator = torch.Generator().manual_seed(crc32(f"{self.seed} {call} {name}".encode()))
        bounds = _strata(numel, self.entries(numel))
        chosen = torch.rand(len(bounds) - 1, dtype=torch.float64, generator=generator, device="cpu") * bounds.diff()
        return bounds[:-1] + chosen.long()

    def state_dict(self) -> dict[str, Any]:
        """``{"calls": {name: number}}``."""
        return {"calls": dict(self._calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the number of calls by name; ValueError for another's state."""
        check_keys(state, ("calls",))
        self._calls = dict(state["calls"])


def _strata(numel: int, k: int) -> Tensor:
    """Bounds of the strata, ⌊j·numel/k⌋, int64, (k + 1,)."""
    return torch.arange(k + 1, device="cpu") * numel // max(k, 1)
