"""Check that the others live while a rank waits: one that computes is slow, but its background engine answers."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection

ASKS = 8
"""Questions in a row without an answer, spread over the time-out, after which a rank counts as unreachable."""
HEARD = -1
"""Questions without an answer, of a peer that was heard of since the last look."""
WIDER = 8
"""Ranks after its own that a waiting rank looks at first; so many times as many at each further look."""

logger = logging.getLogger(__name__)


class Pulse:
    """Counts questions, not seconds: a rank that was stopped itself must not take the others for gone.

    A waiting rank asks the ranks that it needs something from itself, and those after its own number up to the next one
    that waits as well, which asks those after it. So all are asked, by a few messages of each. Who was heard of since
    the last look is not asked: of two ranks that wait, one asks at a time.

    timeout: seconds. ask(peer): sends a question. answered: peers that were heard of since it was emptied last.
    waiting: those of which the last word was that they wait.
    """

    def __init__(
        self, rank: int, timeout: float, ask: Callable[[int], None], answered: set[int], waiting: set[int]
    ) -> None:
        self.seconds = timeout / (ASKS + 2)
        self._rank, self._timeout, self._ask = rank, timeout, ask
        self._answered, self._waiting = answered, waiting
        self._unanswered: defaultdict[int, int] = defaultdict(lambda: HEARD)
        self._felt = 0
        answered.clear()
        waiting.clear()

    def feel(self, peers: Collection[int], needs: Collection[int], waits: str) -> list[int]:
        """Asks silent peers, every `seconds` of a wait; returns those that have not answered for the whole time-out.

        needs: those of the peers without whose own messages this rank cannot go on. waits: who waits for whom, for a
        warning when it takes long.
        """
        self._felt += 1
        heard = set(self._answered)
        self._answered -= heard
        for peer in heard:
            self._unanswered[peer] = HEARD
        silent = [peer for peer in sorted(peers) if self._unanswered[peer] >= ASKS]
        after = self._after(peers)
        self._waiting.intersection_update(after)  # the word of one that is not asked grows old
        for peer in sorted({*after, *needs}.intersection(peers)):
            self._unanswered[peer] += 1
            if self._unanswered[peer] > 0:
                self._ask(peer)
        if not silent and self._felt % (ASKS + 2) == 0:
            logger.warning("%s, for %g s now; all ranks live", waits, self._felt * self.seconds)
        return silent

    def _after(self, peers: Collection[int]) -> list[int]:
        """Peers after this rank, round the ring, up to the first that waits, and answers."""
        after = sorted(peers, key=lambda peer: (peer < self._rank, peer))[: WIDER**self._felt]
        waits = (at for at, peer in enumerate(after, 1) if peer in self._waiting and self._unanswered[peer] <= 1)
        return after[: next(waits, None)]

    def silence(self, peer: int) -> str:
        """Reason for which a peer is not waited for any longer."""
        return (
            f"rank {peer} has not answered for {self._timeout:g} s, not even in the background: its process is "
            "stopped, or cannot be reached"
        )
