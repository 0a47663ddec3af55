"""Costs and savings of training so far: a dict of plain numbers for any logger, which prints as one line."""

from collections.abc import Mapping
from typing import Self

from communicators.communicator import Communicator


class Stats(dict[str, float]):
    """Numbers of this rank since an optimizer or a hook's state was made, which gives them by `stats()`.

        print(optimizer.stats());  writer.add_scalars("network", optimizer.stats(), step);  json.dumps(state.stats())

    Attributes:
        steps: Steps that were counted; of a state that was loaded, with those before it was saved.
        skipped: Steps among them that were left out because a gradient was not finite.
        bytes_sent: Bytes sent by this rank, headers included.
        bytes_dense: Bytes that an allreduce of dense gradients in every step would have sent at best: 2(P − 1)/P of
            the gradients.
        seconds_exchanging: Seconds in which something was under way.
        seconds_waited: Seconds among them in which nothing else was left to do.
        seconds_hidden: Seconds among them in which this rank computed.
        dense_steps_left: Steps that are still to be summed dense, of an algorithm that begins so.
        rank: Number of this rank among the present ones.
        ranks: Number of ranks.
        generation: Number of their group, which grows where ranks of an elastic one come or go.
        seconds_awaited_of_R: Seconds in which a call lacked messages of peer R, of the present group; one for each
            peer. Waits for several peers at once count for each.
    """

    @classmethod
    def of_group(cls, comm: Communicator, **numbers: float) -> Self:
        """Numbers of an optimizer, with those of its group.

        Args:
            comm: The ranks.
            **numbers: By name.
        """
        awaited = {f"seconds_awaited_of_{peer}": seconds for peer, seconds in sorted(comm.awaited.items())}
        return cls({**numbers, "rank": comm.rank, "ranks": comm.size, "generation": comm.generation, **awaited})

    def __str__(self) -> str:
        """One line, without the numbers that are not known."""
        return ", ".join(filter(None, [_steps(self), _bytes(self), _whole(self), _seconds(self), _rest(self)]))


def _steps(stats: Mapping[str, float]) -> str:
    steps, skipped = stats.get("steps", 0), stats.get("skipped", 0)
    return f"{steps:.0f} step{'s' * (steps != 1)}" + (f" ({skipped:.0f} skipped)" if skipped else "")


def _bytes(stats: Mapping[str, float]) -> str:
    sent, dense = stats.get("bytes_sent", 0), stats.get("bytes_dense", 0)
    saved = f" for {_scaled(dense)} dense ({dense / sent:,.1f}x fewer)" if sent and dense else ""
    return f"{_scaled(sent)} sent{saved}"


def _whole(stats: Mapping[str, float]) -> str:
    left = stats.get("dense_steps_left", 0)
    return f"the next {left:.0f} step{'s are' if left != 1 else ' is'} summed whole" if left else ""


def _seconds(stats: Mapping[str, float]) -> str:
    waited, hidden = stats.get("seconds_waited", 0), stats.get("seconds_hidden", 0)
    return f"{waited:.3g} s waited and {hidden:.3g} s hidden"


def _rest(stats: Mapping[str, float]) -> str:
    known = [f"{name.replace('_', ' ')} {stats[name]:.3g}" for name in ("density", "residual_norm") if name in stats]
    return ", ".join(known)


def _scaled(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
