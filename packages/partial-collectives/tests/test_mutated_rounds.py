"""Mutated headers and signals of partial rounds: rounds go on, or one error with a name on every rank."""

import random

import torch
from communicators import CollectiveError, Link, SimulatedWorld
from mutants import EXTREMES, Tally, mutated
from partial_collectives import PartialAllreduce
from partial_collectives.collective import packed, unpacked
from partial_collectives.protocol.events import Header, Kind, Stage
from partial_collectives.rounds import KINDS


def test_headers():
    dice, tally = random.Random(1), Tally(CollectiveError)
    sound = packed(Header(Stage.PAUSED, True, False, 3.5, 2, True, -0.25, 7, False)).numpy().tobytes()
    for _ in range(1000):
        came = bytearray(mutated(sound, dice).ljust(len(sound), b"\0")[: len(sound)])

        def read(came=came):
            header = unpacked(torch.frombuffer(came, dtype=torch.uint8))
            assert 0 <= header.weight < float("inf")
            assert header.deposits >= 0

        tally.attempt(read, "header")
    tally.check(1000)


def strange(dice):
    """A signal that a rank may send that lies, or knows other rules."""
    kind, number = dice.choice([*Kind, 3, 9, 15]), dice.choice([*EXTREMES, 1, 2, 3])
    return dice.choice([number, max(min(KINDS * number + kind, EXTREMES[-2]), EXTREMES[-1])])


def test_signals():
    tally = Tally(CollectiveError)

    def rounds(comm, dice):
        with PartialAllreduce(torch.zeros(3), comm=comm, quorum="solo") as partial:
            for step in range(3):
                comm.elapse(dice.random())
                if step == 1 and comm.rank == 2:
                    partial._rounds._signals.send(dice.randrange(3), strange(dice))
                for result in partial.allreduce(torch.ones(3)):
                    assert result.total.isfinite().all()
            for _ in partial.finish():
                pass

    for case in range(200):
        world = SimulatedWorld(3, Link(1e-3, 0.0), seed=case)
        dices = [random.Random(f"{case} {rank}") for rank in range(3)]
        tally.attempt(lambda world=world, dices=dices: world.run(lambda comm: rounds(comm, dices[comm.rank])), "signal")
    tally.check(200)
