"""Exchanges that start while backward goes on: each bucket's as soon as its gradients are ready."""

from collections.abc import Callable, Sequence

from communicators import Bucket
from torch import Tensor

from data_parallel.watching import watch

BUCKET_BYTES = 4 << 20
"""Gradients of so many bytes are selected from and sent together; `bench/overlap` has the measurement."""


class BackwardOrder:
    """Watches a model's gradients; calls `start(position)` for buckets 0, 1, … in this order, on every rank alike.

    Bucket 0 holds the parameters whose gradients come first, those of the last layers. A bucket that is ready early
    waits for its turn, because all ranks must start their exchanges in one order.

    paused: whether gradients are not to be exchanged now.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        start: Callable[[int], None],
        paused: Callable[[], bool],
    ) -> None:
        self._parameters, self._start, self._paused = parameters, start, paused
        self._members = [bucket.members for bucket in buckets]
        self._bucket_of = {member: position for position, members in enumerate(self._members) for member in members}
        self.reset()
        watch(self, dict(enumerate(parameters)), BackwardOrder.ready)

    def reset(self) -> None:
        """Begins a new step, and forgets what backward left unfinished."""
        self._lacking = [set(members) for members in self._members]
        self._started = 0
        self._sent: dict[int, tuple[int, int] | None] = {}

    @property
    def under_way(self) -> bool:
        """Whether something of this step has been started."""
        return self._started > 0

    def start_rest(self) -> None:
        """Starts the buckets that wait for gradients which will not come: of parameters that were not used."""
        while self._started < len(self._members):
            self._start(self._started)
            self._started += 1

    def ready(self, member: int) -> None:
        """Notes that this parameter's gradient is complete."""
        if self._paused():
            return
        lacking = self._lacking[self._bucket_of[member]]
        if member not in lacking:
            discard = "" if self.under_way else "; a backward that is to be thrown away ends with optimizer.zero_grad()"
            raise RuntimeError(
                "a second backward() before step(), while the first one's gradients are under way, or wait for their "
                f"bucket: accumulate inside no_sync(), all but the last backward of a step{discard}"
            )
        lacking.remove(member)
        while self._started < len(self._lacking) and not self._lacking[self._started]:
            self._start(self._started)
            self._sent |= {member: _version(self._parameters[member].grad) for member in self._members[self._started]}
            self._started += 1

    def changed(self) -> list[int]:
        """Members whose gradient was changed since it was sent in backward, which has no effect any more."""
        return [member for member, sent in self._sent.items() if _version(self._parameters[member].grad) != sent]


def _version(gradient: Tensor | None) -> tuple[int, int] | None:
    """Snapshot in which a change shows.

    A view of a larger tensor shares its version with other parameters' gradients, so that only another tensor shows.
    """
    if gradient is None:
        return None
    base = gradient._base
    return id(gradient), gradient._version if base is None or base.numel() == gradient.numel() else 0
