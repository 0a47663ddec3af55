"""Rules that all ranks of a partial allreduce share: when a round begins, and how long a rank may stay away."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

Quorum: TypeAlias = int | Literal["solo", "majority"]

MAX_STALENESS = 8
"""Default number of rounds in a row that a rank may miss."""


@dataclass(frozen=True)
class Rules:
    """Rules of a partial allreduce.

    quorum: "solo" (any rank), "majority" (a rank drawn for the round) or so many ranks.
    max_staleness: rounds in a row that an unfinished rank may miss; 0 is a full allreduce.
    grace: whether a round waits for more arrivals once its quorum is there; for how long is its coordinator's affair.
    seed: of the draws. fragments: how many take turns, round by round.
    """

    quorum: Quorum = "majority"
    max_staleness: int = MAX_STALENESS
    grace: bool = False
    seed: int = 0
    fragments: int = 1

    def drawn(self, round_: int, among: Collection[int]) -> int:
        """The rank that coordinates a round, alike on all ranks; independent of who arrives when."""
        return random.Random(f"coordinator {self.seed}/{round_}").choice(sorted(among))

    def quorum_is_there(self, arrived: Collection[int], running: Collection[int], drawn: int) -> bool:
        """Whether a round may begin. arrived: those of the running ranks; ranks that have ended are not waited for."""
        if self.quorum == "majority":
            return drawn in arrived
        needed = 1 if self.quorum == "solo" else int(self.quorum)
        return len(arrived) >= min(needed, len(running))

    @property
    def alone(self) -> bool:
        """Whether any arrival begins a round, so that nobody need count them."""
        return self.quorum in ("solo", 1) and not self.grace


def check_rules(quorum: Quorum, max_staleness: int, grace: bool, seed: int, size: int, *, fragments: int = 1) -> Rules:
    """The rules as given; TypeError or ValueError where they are none for so many ranks."""
    if isinstance(quorum, bool) or not isinstance(quorum, int | str):
        raise TypeError(f"quorum is {quorum!r}, expected 'solo', 'majority' or a number of ranks")
    if isinstance(quorum, str) and quorum not in ("solo", "majority"):
        raise ValueError(f"quorum is {quorum!r}, expected 'solo', 'majority' or a number of ranks")
    if isinstance(quorum, int) and not 1 <= quorum <= size:
        raise ValueError(f"quorum is {quorum}, expected 1 … {size}: there are {size} ranks")
    for name, number in (("max_staleness", max_staleness), ("seed", seed)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} is {number!r}, expected a whole number")
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}, expected 0 (every round waits for all) or more")
    return Rules(quorum, max_staleness, grace, seed, fragments)


def parsed_grace(grace: float | str) -> tuple[float, float]:
    """Grace as (share of the median, seconds); one of them is 0."""
    text = isinstance(grace, str) and grace.endswith("x")
    try:
        if isinstance(grace, bool):
            raise TypeError
        number = float(grace[:-1]) if text and isinstance(grace, str) else float(grace)
    except (TypeError, ValueError):
        raise ValueError(
            f"grace is {grace!r}, expected seconds, or a share of the rounds' median such as '0.5x'"
        ) from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"grace is {grace!r}, expected 0 or more")
    return (number, 0.0) if text else (0.0, number)


def goes_on_after_death(on_death: str | None, *, outlives_ranks: bool, hasty: bool) -> bool:
    """Whether others go on after a death; ValueError where they cannot, or must: see `communicators.Communicator`."""
    if on_death is None:
        return hasty
    if on_death not in ("error", "shrink"):
        raise ValueError(f"on_death is {on_death!r}, expected 'error' or 'shrink'")
    if on_death == "shrink" and not outlives_ranks:
        raise ValueError(
            "on_death='shrink' needs ranks that outlive one another, over a gloo group or in a simulated world; "
            "under MPI the launcher ends the whole job when a rank dies, so leave on_death='error' there"
        )
    if on_death == "error" and hasty:
        raise ValueError(
            "on_death='error' ends all ranks with the first that dies, but those of an Elastic go on: leave it out, or "
            "give a fixed group"
        )
    return on_death == "shrink"
