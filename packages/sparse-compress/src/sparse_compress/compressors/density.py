"""What compressors with a density share: k, the most entries of a tensor."""

from collections.abc import Sequence

from sparse_compress.arguments import integer, share_of

SHARE = "the fraction of elements to send"


class Density:
    """k = max(1, round(density · n)), 0 only for an empty tensor. ``density``: 0 < density ≤ 1, else ValueError.

    It may be set anew; TypeError for what is no number.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    @property
    def density(self) -> float:
        """The fraction of elements to send."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self._density = share_of(density, "density", expected=SHARE)

    def entries(self, numel: int) -> int:
        """k: the most entries that are sent of ``numel`` elements, alike on every rank."""
        return min(numel, max(1, round(self.density * numel)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(density={self.density})"


def warm_up(epoch: int, density: float, stages: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004)) -> float:
    """The density of an epoch (from 0): one of the ``stages`` for each of the first, then ``density``.

    Deep Gradient Compression's exponential warm-up (Lin et al., ICLR 2018, section 3.3): 25 %, 6.25 %, 1.5625 %,
    0.4 %, 0.1 %. Never below ``density``. Set it on every rank at the same step:

        compressor.density = warm_up(epoch, density=0.001)

    TypeError for what is no number, ValueError for a negative epoch and for densities beyond (0, 1].
    """
    epoch, density = (
        integer(epoch, "epoch", expected="the number of the epoch"),
        share_of(density, "density", expected=SHARE),
    )
    stages = [share_of(stage, f"stage {number}", expected=SHARE) for number, stage in enumerate(stages)]
    return max(density, stages[epoch]) if epoch < len(stages) else density
