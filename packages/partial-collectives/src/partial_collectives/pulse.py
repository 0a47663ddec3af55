"""Check that the others live while a rank waits: one that computes is slow, but its background engine answers."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection

ASKS = 8
"""Questions in a row without an answer, spread over the time-out, after which a rank counts as unreachable."""
HEARD = -1
"""Questions without an answer, of a peer that was heard of since the last look."""

logger = logging.getLogger(__name__)


class Pulse:
    """Counts questions, not seconds: a rank that was stopped itself must not take the others for gone.

    Who was heard of since the last look is not asked: of two ranks that wait, one asks at a time.

    timeout: seconds. ask(peer): sends a question. answered: peers that were heard of since it was emptied last.
    """

    def __init__(self, timeout: float, ask: Callable[[int], None], answered: set[int]) -> None:
        self.seconds = timeout / (ASKS + 2)
        self._timeout, self._ask, self._answered = timeout, ask, answered
        self._unanswered: defaultdict[int, int] = defaultdict(lambda: HEARD)
        self._felt = 0
        answered.clear()

    def feel(self, peers: Collection[int], waits: str) -> list[int]:
        """Asks silent peers, every `seconds` of a wait; returns those that have not answered for the whole time-out.

        waits: who waits for whom, for a warning when it takes long.
        """
        self._felt += 1
        heard = set(self._answered)
        self._answered -= heard
        for peer in heard:
            self._unanswered[peer] = HEARD
        if silent := [peer for peer in sorted(peers) if self._unanswered[peer] >= ASKS]:
            return silent
        for peer in sorted(peers):
            self._unanswered[peer] += 1
            if self._unanswered[peer] > 0:
                self._ask(peer)
        if self._felt % (ASKS + 2) == 0:
            logger.warning("%s, for %g s now; all ranks live", waits, self._felt * self.seconds)
        return []

    def silence(self, peer: int) -> str:
        """Reason for which a peer is not waited for any longer."""
        return (
            f"rank {peer} has not answered for {self._timeout:g} s, not even in the background: its process is "
            "stopped, or cannot be reached"
        )
