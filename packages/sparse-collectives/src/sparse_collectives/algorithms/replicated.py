"""A vector that several ranks hold alike, and what each of them must drop of it."""

from __future__ import annotations

from communicators import Payload
from sparse_compress import SparseVector, add_all, merge, share

from sparse_collectives.reduction import Reduction
from sparse_collectives.wire import RAW, Wire, blame_rank


class ReplicatedVector:
    """One rank's copy of a vector of min(k, n) entries. What is rounded off or cut of it is shared among its holders.

    member, of: which of how many holders this rank is; entry i of a cut is kept by member i mod `of`.
    """

    def __init__(self, sparse: SparseVector, k: int, wire: Wire) -> None:
        self.vector, self._k, self._wire = sparse, k, wire
        self.nbytes = wire.nbytes(len(sparse), sparse.numel, sparse.dtype)
        self._dropped: list[SparseVector] = []

    def message(self, *, member: int = 0, of: int = 1) -> Payload:
        """Message whose body has `nbytes` bytes, with the vector; all holders continue with its rounded values."""
        if self._wire is not RAW:
            self.vector, rest = self._wire.rounded(self.vector)
            self._dropped.append(share(rest, member=member, of=of))
        return self._wire.message(self.vector)

    def merge(self, message: Payload, giver: int, *, member: int = 0, of: int = 1, after: bool = False) -> None:
        """Adds another rank's vector and keeps the k largest; that rank does the same.

        after: adds this rank's vector second: lower ranks are first everywhere, because NaN payloads do not commute.
        """
        theirs = self._unpacked(message, giver)
        self.vector, cut = merge(theirs, self.vector, self._k) if after else merge(self.vector, theirs, self._k)
        if len(cut):
            self._dropped.append(share(cut, member=member, of=of))

    def replace(self, message: Payload, giver: int) -> None:
        """Replaces this copy by another rank's vector."""
        self.vector = self._unpacked(message, giver)

    def reduction(self) -> Reduction:
        """The vector, and this rank's share of all that was dropped."""
        like = self.vector
        nothing = [] if self._dropped else [SparseVector.empty(like.numel, like.dtype, device=like.device)]
        return Reduction(like, add_all(self._dropped or nothing))

    def _unpacked(self, message: Payload, giver: int) -> SparseVector:
        with blame_rank(giver):
            return self._wire.vector(message, len(self.vector), self.vector)
