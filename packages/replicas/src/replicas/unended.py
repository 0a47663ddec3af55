"""Steps after which ranks did not come together: logged when their optimizer goes, too late to ask."""

from __future__ import annotations

import logging
import sys
import weakref

logger = logging.getLogger(__name__)


class Unended:
    """Steps since all ranks held the same, or a rank's state was saved; logged when the owner is collected, or at exit.

    Nothing is logged after an exception, which is why nobody finished. A rank that finishes while others go on without
    finishing is told by an error; ranks with as many steps each would part in silence.
    """

    def __init__(self, owner: object) -> None:
        self.steps = 0
        weakref.finalize(owner, _tell, self, type(owner).__name__)


def _tell(unended: Unended, what: str) -> None:
    if unended.steps and sys.exception() is None and getattr(sys, "last_value", None) is None:
        logger.warning(
            "%d steps of %s since its ranks last came together: their parameters may differ, and what is under way is "
            "lost. End with finish(), which `with` calls, on every rank",
            unended.steps,
            what,
        )
