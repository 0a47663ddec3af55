"""What compressors with a density share: k, the most entries of a tensor."""

from sparse_compress.arguments import share_of

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
