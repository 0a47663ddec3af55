"""Mutated headers and signals of partial rounds: rounds go on, or one error with a name on every rank."""

import random
from functools import partial

import torch
from communicators import CollectiveError, Link, SimulatedWorld
from mutants import EXTREMES, Tally, mutated
from partial_collectives import PartialAllreduce
from partial_collectives.collective import packed, unpacked
from partial_collectives.partial_allreduce import KINDS
from partial_collectives.protocol.events import Header, Kind, Stage


def test_headers():
    dice, tally = random.Random(1), Tally(CollectiveError)
    sound = packed(Header(Stage.PAUSED, True, False, 3.5, 2, True, -0.25, 7, False)).numpy().tobytes()
    for _ in range(2000):
        came = bytearray(mutated(sound, dice).ljust(len(sound), b"\0")[: len(sound)])

        def read(came=came):
            header = unpacked(torch.frombuffer(came, dtype=torch.uint8))
            assert 0 <= header.weight < float("inf")
            assert header.deposits >= 0

        tally.attempt(read, "header")
    tally.check(2000)


def strange(dice):
    """A signal that a rank may send that lies, or knows other rules."""
    kind, number = dice.choice([*Kind, 3, 9, 15]), dice.choice([*EXTREMES, 1, 2, 3])
    return dice.choice([number, max(min(KINDS * number + kind, EXTREMES[-2]), EXTREMES[-1])])


def test_signals():
    tally = Tally(CollectiveError)

    def told(world, dices):
        try:
            world.run(lambda comm: body(comm, dices[comm.rank]))
        except CollectiveError as error:
            if "which no rank says to another in partial rounds" not in str(error):
                raise AssertionError(error) from error
            raise

    def body(comm, dice):
        with PartialAllreduce(torch.zeros(3), comm=comm, quorum="solo") as rounds:
            for step in range(3):
                comm.elapse(dice.random())
                if step == 1 and comm.rank == 2:
                    rounds._signals.send(dice.randrange(3), strange(dice))
                for result in rounds.allreduce(torch.ones(3)):
                    assert result.total.isfinite().all()
            for _ in rounds.finish():
                pass

    for case in range(120):
        world = SimulatedWorld(3, Link(1e-3, 0.0), seed=case)
        dices = [random.Random(f"{case} {rank}") for rank in range(3)]
        tally.attempt(partial(told, world, dices), "signal")
    tally.check(120)
