"""Bytes that change on their way: a result or one error on all ranks, never a crash, a hang or an allocation."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from communicators import CollectiveError, Elapse, SimulatedWorld, run
from hypothesis import settings
from sparse_collectives import ALGORITHMS, WIRES
from sparse_collectives.algorithms import kth_largest, topk_dsa
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.allreduce import prepare
from sparse_collectives.wire import RAW, InvalidMessageError
from sparse_compress import SparseVector, spread_keys, topk

pytestmark = pytest.mark.quick

CASES = settings.default.max_examples
WAYS = [(name, wire) for name, entry in ALGORITHMS.items() for wire in WIRES if entry.selects or wire == "fp32"]
EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**30)


class Damage:
    """Changes bytes behind the slot of the message number `at` that one rank gets, once."""

    def __init__(self, rng, at):
        self.rng, self.at, self.seen, self.done = rng, at, 0, False

    def __call__(self, payload):
        self.seen += 1
        body = payload.body.numpy()
        if self.seen - 1 != self.at or not len(body):
            return
        self.done, kind = True, self.rng.integers(4)
        if kind == 0 or len(body) < 4:
            body[self.rng.integers(len(body))] ^= np.uint8(1 << self.rng.integers(8))
        elif kind == 1:
            at = self.rng.integers(len(body) // 4)
            body[: len(body) // 4 * 4].view(np.int32)[at] = self.rng.choice(EXTREMES)
        elif kind == 2:
            body[self.rng.integers(len(body)) :] = self.rng.choice([0, 255])
        else:
            body[:] = self.rng.integers(256, size=len(body), dtype=np.uint8)


def tampered(schedule, damage):
    """The schedule, with damage done to what it receives."""
    received = None
    while True:
        try:
            action = next(schedule) if received is None else schedule.send(received)
        except StopIteration as stop:
            return stop.value
        received = (yield action) or {}
        if not isinstance(action, Elapse):
            for source in sorted(received):
                damage(received[source])


def call(size, sparse, k, name, options, wire, states, victim, damage):
    """What every rank got: its total, or the reason why not."""

    def body(comm):
        schedule, facts = prepare(
            sparse[comm.rank], comm, k, algorithm=name, options=options, state=states[comm.rank], wire=wire
        )
        if comm.rank == victim:
            schedule = tampered(schedule, damage)
        try:
            return run(schedule, comm, facts=facts)
        except CollectiveError as error:
            return str(error)

    try:
        return SimulatedWorld(size).run(body)
    except CollectiveError as error:  # what was sent, but never received
        return [str(error)] * size


def check_outcome(outcomes, name):
    """Said as what it is: a message that is none, of a size that is not agreed, or that nobody waits for."""
    for reason in (outcome for outcome in outcomes if isinstance(outcome, str)):
        assert "failed in" not in reason or "InvalidMessageError: " in reason, reason
    for outcome in outcomes:
        if not isinstance(outcome, str):
            for vector in (outcome.total, outcome.dropped):
                SparseVector(vector.indices, vector.values, vector.numel)  # looks at them


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "wire"), WAYS)
def test_a_damaged_message_is_a_result_or_an_error(name, wire):
    rng, done, refused = np.random.default_rng(len(name) + len(wire)), 0, 0
    for case in range(CASES):
        size, n = int(rng.choice([2, 3, 4, 5, 6, 8])), int(rng.choice([3, 20, 200]))
        k = int(rng.integers(1, min(n, 12) + 1))
        variants = ALGORITHMS[name].variants(size)
        options = variants[rng.integers(len(variants))]
        messages = resolve(name, options, size=size).sent(0, size, k, n, torch.float32).messages
        states = [None] * size
        sparse = [topk(torch.randn(n, generator=torch.Generator().manual_seed(case + rank)), k) for rank in range(size)]
        damage = Damage(rng, int(rng.integers(max(messages, 1))))
        outcomes = call(size, sparse, k, name, options, wire, states, int(rng.integers(size)), damage)
        check_outcome(outcomes, name)
        done += damage.done
        refused += any(isinstance(outcome, str) for outcome in outcomes)
    assert done > CASES // 4
    assert refused or not ALGORITHMS[name].selects  # the bytes of whole gradients are all values


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.selects])
def test_the_error_names_the_rank_that_it_came_from(name):
    """Indices that decrease, in the last message that rank 0 gets: from rank 1."""

    class Backwards:
        def __init__(self, only=None):
            self.seen, self.only = 0, only

        def __call__(self, payload):
            if self.seen == self.only:
                payload.body.copy_(payload.body.flip(0))
            self.seen += 1

    sparse = [topk(torch.randn(50, generator=torch.Generator().manual_seed(rank)), 8) for rank in range(2)]
    arguments = (2, sparse, 8, name, {}, "fp32", [None, None], 0)
    counting = Backwards()
    call(*arguments, counting)
    outcomes = call(*arguments, Backwards(counting.seen - 1))
    assert "rank 0 failed in " in outcomes[0]
    assert "InvalidMessageError: rank 1 " in outcomes[0]


def test_counts_that_fit_no_threshold_are_everybodys():
    """Each rank's may be true, but 5 keys cannot all be larger than the second largest."""
    found = spread_keys.KthLargest(0, [3, 2], [0, 0])
    with pytest.raises(InvalidMessageError, match="together is no valid message: 5 keys are larger than the 2-th"):
        kth_largest._check_found(found, [3, 2], 2)


@pytest.mark.parametrize(
    ("larger", "equal", "fits"), [(1, 0, False), (1, 1, True), (0, 2, True), (2, 1, False), (0, 1, False)]
)
def test_the_second_largest_is_smaller_than_one_key_at_most(larger, equal, fits):
    found = spread_keys.KthLargest(0, [larger, 0], [equal, 0])
    with nullcontext() if fits else pytest.raises(InvalidMessageError, match="larger than the 2-th"):
        kth_largest._check_found(found, [3, 2], 2)


def test_ranks_in_teams_are_named_as_they_are_in_the_world():
    """Rank 2 of 4 in two teams exchanges with rank 0 at last, its place in team 0."""
    sparse = [topk(torch.randn(64, generator=torch.Generator().manual_seed(rank)), 16) for rank in range(4)]
    said = set()
    for at in range(4):

        def damage(payload, at=at, seen=[0]):  # noqa: B006 - one count for each
            if seen[0] == at:
                payload.body.copy_(payload.body.flip(0))
            seen[0] += 1

        outcomes = call(4, sparse, 16, "spardl", {"teams": 2}, "fp32", [None] * 4, 2, damage)
        said |= {text.split("InvalidMessageError: ")[1][:6] for text in outcomes if isinstance(text, str)}
    assert said == {"rank 0", "rank 3"}


def test_a_block_that_is_longer_than_a_dense_one_is_the_senders():
    said = "rank 3 .*a block of 17 bytes, expected at most 16"
    with pytest.raises(InvalidMessageError, match=said):
        topk_dsa._decode(torch.zeros(17, dtype=torch.uint8), (4, 8), SparseVector.empty(9), RAW, 3)
