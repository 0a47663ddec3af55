"""Selection by an exact threshold that is reused for some steps."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparse_compress.arguments import check_dense, integer
from sparse_compress.compressors.at_least import select_at_least
from sparse_compress.compressors.compressor import Density
from sparse_compress.compressors.saved import by_name
from sparse_compress.topk import topk
from sparse_compress.vector import SparseVector


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

    finds_nonfinite = True

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
        """Restores thresholds and numbers of calls by name."""
        calls, thresholds = by_name(state, "calls", integers=True), by_name(state, "thresholds")
        if set(calls) != set(thresholds):
            raise ValueError(
                f"the state has calls of {list(calls)}, expected those of the thresholds {list(thresholds)}"
            )
        self._calls, self._thresholds = calls, thresholds

    def __repr__(self) -> str:
        return f"ThresholdReuse(density={self.density}, every={self.every})"
