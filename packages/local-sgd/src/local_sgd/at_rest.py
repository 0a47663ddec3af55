"""Parameters at rest, between `average()` and the next step: a flipped bit is seen there though ranks are apart."""

from collections.abc import Mapping

import torch
from communicators import CollectiveError, Communicator, allgather
from replicas import hash_bits
from torch import Tensor


class AtRest:
    """Hashes of tensors while nobody is to write into them.

    Replicas that are apart between two boundaries cannot be compared, and a mean spreads what one of them holds.

    named: the tensors. what: the algorithm, for errors.
    """

    def __init__(self, named: Mapping[str, Tensor], what: str) -> None:
        self._named, self._what = named, what
        self._held: Tensor | None = None
        self._seen: Tensor
        self.forget()

    def begin(self) -> None:
        """Notes the bits, at the end of `average()`."""
        self._held = self._hashes()

    def end(self, step: int) -> None:
        """Looks for changes, before the next step; `step` is the one that was taken last, from 1 on."""
        if self._held is not None:
            changed: Tensor = self._hashes() != self._held
            self._seen = torch.where(changed & (self._seen == 0), step, self._seen)
            self._held = None

    def forget(self) -> None:
        """Forgets all, where others may write: after a drain, or a state that was loaded."""
        self._held = None
        # By tensor the step before its first change.
        self._seen = torch.zeros(len(self._named), dtype=torch.int64, device="cpu")

    def error(self, rank: int) -> CollectiveError | None:
        """Error for what changed on this rank."""
        return self._error({rank: self._seen.tolist()})

    def refuse(self, comm: Communicator) -> None:
        """Raises CollectiveError on every rank for what changed on any; every rank calls it."""
        seen = comm.atomic(lambda: allgather(self._seen, comm))
        if error := self._error({rank: steps.tolist() for rank, steps in enumerate(seen)}):
            raise error

    def _hashes(self) -> Tensor:
        return torch.stack([hash_bits(tensor).cpu() for tensor in self._named.values()])

    def _error(self, seen: Mapping[int, list[int]]) -> CollectiveError | None:
        found = [
            f"rank {rank} in {name!r} after step {step}"
            for rank, steps in seen.items()
            for name, step in zip(self._named, steps, strict=True)
            if step
        ]
        if not found:
            return None
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        return CollectiveError(
            f"{self._what}: parameters changed between average() and the next step, when nothing may write into them: "
            f"{', '.join(found[:3])}{more}. Code of yours writes there and belongs before average(), or a module's "
            "forward does, as nn.Embedding(max_norm=...); else bits were flipped in memory: go on from a checkpoint "
            "before, and leave out a machine that is named again"
        )
