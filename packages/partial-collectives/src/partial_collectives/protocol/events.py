"""Headers and signals that ranks tell each other, and actions that the protocol asks for."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Stage(IntEnum):
    """Stage of a rank: it has more steps, waits for all others to meet it, has no more steps, or is gone."""

    RUNNING = 0
    PAUSED = 1
    FINISHED = 2
    GONE = 3


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a rank in a round: what it says of itself to all.

    contributes: it brings gradients. fresh: among them the one that it waits with; others come too late for theirs.
    weight: of what it brings. deposits: how many gradients that is. finite: whether all of them were.
    late, late_round: seconds from the beginning of that round to its arrival there, by its own clock; below 0: it was
        early. late_round is -1 where there is nothing new to say.
    calls: it asks all to meet. settings: hash of what has changed in its settings since all have met; 0 says nothing.
    """

    stage: Stage
    contributes: bool = False
    fresh: bool = False
    weight: float = 0.0
    deposits: int = 0
    finite: bool = True
    late: float = 0.0
    late_round: int = -1
    calls: bool = False
    settings: int = 0


class Kind(IntEnum):
    """Kind of a signal.

    ARRIVED, BEGIN: its sender has come to a round; the round begins. GONE: a rank is gone, whose number stands for that
    of the round. The machine hears no others. OVER, GRACE_OVER: to the rank itself, that a round's collective or a
    grace is over. LIVES, LIVE: a rank that waits asks whether another lives; that it does, and whether it waits too.
    CLOSES: that it closes.
    """

    ARRIVED = 0
    BEGIN = 1
    GONE = 2
    OVER = 4
    GRACE_OVER = 5
    LIVES = 6
    LIVE = 7
    CLOSES = 8


@dataclass(frozen=True, slots=True)
class Signal:
    """Action: tell a peer. May come twice, late or in any order; signals of rounds that are over mean nothing."""

    peer: int
    kind: Kind
    round: int


@dataclass(frozen=True, slots=True)
class Join:
    """Action: take all that has accumulated, and enter the round's collective with it."""

    round: int
    stage: Stage
    contributes: bool
    fresh: bool


@dataclass(frozen=True, slots=True)
class Grace:
    """Action: the quorum is there; say `grace_over` when the round has waited long enough for others."""

    round: int


@dataclass(frozen=True, slots=True)
class Recover:
    """Action: leave the round's collective, and find out with these ranks which rounds are over: see `recovered`.

    lost: rank that is not among them any more.
    """

    members: frozenset[int]
    lost: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Action: the others go on without this rank, which they take for dead."""


Action: TypeAlias = Signal | Join | Grace | Recover | LeftOut
