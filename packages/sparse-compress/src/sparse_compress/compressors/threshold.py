"""Selection by a threshold, cut to a bound: a fixed one, and the exact one of an earlier step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_compress.arguments import check_dense, check_keys, flatten, integer, positive
from sparse_compress.compressors.density import Density
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.selection import reaching, topk
from sparse_compress.vector import SparseVector


class Threshold(Density):
    """Selects all elements with |x| ≥ threshold, the k largest of them where they are more.

    Source: Strom, Interspeech 2015. Differs from the paper: values are sent unchanged, not as ± threshold; the bound
    k = max(1, round(density · n)) makes the size on the wire known to all ranks; where no element reaches, the largest
    is sent. Stateless and deterministic.

    Args:
        threshold: A magnitude, > 0 and finite.
        density: The largest share of elements to send, 0 < density ≤ 1.

    Raises:
        TypeError: One of them is no number.
        ValueError: One of them is out of range.
    """

    def __init__(self, threshold: float, density: float = 0.01) -> None:
        super().__init__(density)
        self.threshold = positive(threshold, "threshold", expected="a magnitude")

    def __call__(self, tensor: Tensor) -> SparseVector:
        check_dense(tensor, "tensor")
        return select_at_least(tensor, self.threshold, self.entries(tensor.numel()))


class ThresholdReuse(Density):
    """Selects exact top-k every ``every`` calls of a name; between them the elements that reach its k-th magnitude.

    It sends at most k = max(1, round(density · n)) entries: where more reach, the k largest (Li & Hoefler, PPoPP 2022,
    whose local selection this is, bound theirs likewise). Gradients change slowly, so about k do.
    On a GPU it saves most of the selection, but reads thresholds and counts back.
    State: threshold and number of calls by name.

    Args:
        density: The share of elements to send, 0 < density ≤ 1.
        every: Number of calls after which the threshold is found anew, ≥ 1.

    Raises:
        TypeError: One of them is no number.
        ValueError: One of them is out of range.
    """

    def __init__(self, density: float = 0.01, *, every: int = 32) -> None:
        super().__init__(density)
        self.every = integer(every, "every", least=1, expected="a number of calls")
        self._calls: dict[str, int] = {}
        self._thresholds: dict[str, float] = {}

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        check_dense(tensor, "tensor")
        call, k = self._calls.get(name, 0), self.entries(tensor.numel())
        if call % self.every and self._thresholds[name] > 0:
            selected = select_at_least(tensor, self._thresholds[name], k)
        else:
            selected = topk(tensor, k)
            least = float(selected.values.abs().nan_to_num(float("inf")).amin()) if k else 0.0
            self._thresholds[name] = least if least < float("inf") else 0.0
        self._calls[name] = call + 1
        return selected

    def state_dict(self) -> dict[str, Any]:
        """``{"calls": {name: number}, "thresholds": {name: magnitude}}``."""
        return {"calls": dict(self._calls), "thresholds": dict(self._thresholds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores thresholds and numbers of calls by name; ValueError for another's state."""
        check_keys(state, ("calls", "thresholds"))
        self._calls, self._thresholds = dict(state["calls"]), dict(state["thresholds"])


def select_at_least(x: Tensor, threshold: float, k: int) -> SparseVector:
    """Elements of ``x`` whose magnitude reaches ``threshold``, the k largest of them where they are more.

    NaN and inf reach any threshold. A tensor with a non-zero element never gives an empty vector: the largest is sent
    where none reaches; an all-zero one gives none where ``threshold`` > 0. On a GPU their number is read back.
    """
    flat = flatten(x)
    if not len(flat) or not k:
        return topk(flat, 0)
    selected = reaching(flat, threshold_key(threshold, flat.dtype), k)
    if len(selected):
        return selected
    only = topk(flat, 1)
    return only if bool(only.values.any()) else topk(flat, 0)


def threshold_key(threshold: float, dtype: torch.dtype) -> int:
    """Key of the least magnitude of ``dtype`` that is not below ``threshold``."""
    rounded = torch.tensor(threshold, dtype=dtype, device="cpu")
    return int(magnitude_keys(rounded)) + (float(rounded) < threshold)
