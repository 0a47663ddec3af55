"""Dealing: each sample once an epoch, whoever comes and goes."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch
from communicators import CollectiveError, Dies, Elastic, LinkLost, SimulatedWorld, allreduce
from communicators.elastic.dealer import Dealer
from communicators.elastic.dealing import Change, Deal
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


class Group:
    """Ranks that draw, and what of it is in the model: `kept` by epoch, counted."""

    def __init__(self, numel: int, batch_size: int, seed: int, ranks: int) -> None:
        self.numel, self.batch_size, self.seed = numel, batch_size, seed
        self.kept, self.left_out = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.members = [f"{rank}" for rank in range(ranks)]
        self.born, self.founders, self.commits = ranks, ranks, False
        self.held: dict[str, list[tuple[int, int]]] = {name: [] for name in self.members}
        self.dealers = {name: Dealer() for name in self.members}
        self.counts = dict.fromkeys(self.members, 0)
        for rank, dealer in enumerate(self.dealers.values()):
            dealer.regroup(self.members, rank)
            dealer.begin(numel, batch_size, seed)
        self.drawn, self.committed = [0] * ranks, [0] * ranks

    @property
    def deal(self) -> Deal:
        deal = self.dealers[self.members[0]].deal
        assert deal is not None
        return deal

    def draw(self, rank: int) -> None:
        name, number = self.members[rank], self.drawn[rank]
        ((epoch, batch),) = self.deal.batches(rank, number, number + 1)
        self.held[name] += [(epoch, sample) for sample in batch]
        self.drawn[rank] += 1
        self.counts[name] += 1

    def commit(self) -> None:
        """What ranks hold is in the model, also what they had drawn in earlier generations."""
        self.committed, self.commits = list(self.drawn), True
        for name in self.members:
            self.kept.update(self.held[name])
            self.held[name] = []

    def regroup(self, dead: set[int], joined: int) -> None:
        drawn = [self.committed[rank] if rank in dead else self.drawn[rank] for rank in range(len(self.members))]
        change = Change(tuple(self.members), tuple(drawn), tuple(self.committed))
        last = self.deal
        olds = [name for rank, name in enumerate(self.members) if rank not in dead]
        news = [f"{self.born + number}" for number in range(joined)]
        self.members, self.born = olds + news, self.born + joined
        for rank, name in enumerate(olds):
            self.dealers[name].regroup(self.members, rank, change, commits=self.commits)
        for name in news:
            self.dealers[name] = Dealer()
            self.dealers[name].regroup(self.members, self.members.index(name))
            self.dealers[name].load(self.dealers[olds[0]].state())
        self.dealers = {name: self.dealers[name] for name in self.members}
        self.held = {name: self.held.get(name, []) for name in self.members}
        self.counts |= dict.fromkeys(news, 0)
        self.drawn, self.committed, self.commits = [0] * len(self.members), [0] * len(self.members), False
        assert all(dealer.deal == self.deal for dealer in self.dealers.values())
        while last.epoch < self.deal.epoch:
            self.left_out.update((last.epoch, int(sample)) for sample in last.left_out)
            last = last.next_epoch()

    def finish(self, epochs: int) -> None:
        """All ranks draw to the end of that epoch."""
        deal, steps = self.deal, 0
        while deal.epoch < epochs:
            self.left_out.update((deal.epoch, int(sample)) for sample in deal.left_out)
            steps, deal = steps + deal.steps, deal.next_epoch()
        for rank in range(len(self.members)):
            while self.drawn[rank] < steps + len(self.deal.owed_to(rank)):
                self.draw(rank)
        self.commit()


def schedule(seed: int) -> None:
    """Checks a drawn training of ranks that die, join and leave, to the end of the epoch that it has come to."""
    chance = random.Random(seed)
    group = Group(chance.randrange(40, 400), chance.randrange(16, 33), seed % 7, chance.randrange(1, 9))
    in_step = chance.random() < 0.5
    for _ in range(chance.randrange(1, 40)):
        size = len(group.members)
        if chance.random() < 0.3:
            pass  # the group changes again before anybody draws
        elif in_step:
            for rank in range(size):
                group.draw(rank)
        else:
            for _ in range(chance.randrange(1, 3 * size)):
                group.draw(chance.randrange(size))
        if chance.random() < 0.6:
            group.commit()
        if chance.random() < 0.3:
            dead = set(chance.sample(range(size), chance.randrange(size)))
            joined = chance.randrange(0, 17 - (size - len(dead))) if chance.random() < 0.5 else 0
            group.regroup(dead, joined)
    last, steps = group.deal, 0
    while steps < max(group.drawn, default=0):
        steps, last = steps + last.steps, last.next_epoch()
    owed = [epoch + 1 for rank in range(len(group.members)) for epoch, _ in group.deal.owed_to(rank)]
    epochs = max(last.epoch, 1, *(epoch + 1 for held in group.held.values() for epoch, _ in held), *owed, 1)
    group.finish(epochs)
    check(group, epochs)
    founders = [group.counts[name] for name in group.members if name in group.counts and int(name) < group.founders]
    assert len(set(founders)) <= 1, f"ranks came to the end after unlike numbers of batches: {founders}"


def check(group: Group, epochs: int) -> None:
    dealt = group.kept + group.left_out
    assert all(count == 1 for count in dealt.values()), "a sample was taken twice in an epoch"
    for epoch in range(epochs):
        missing = set(range(group.numel)) - {sample for one, sample in dealt if one == epoch}
        assert not missing, f"epoch {epoch}: samples {sorted(missing)[:5]} were never taken"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(10))
def test_each_sample_once_in_1000_schedules(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        schedule(seed)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12))
def test_a_step_is_the_global_batch(numel: int, batch_size: int, ranks: int) -> None:
    deal = Deal(numel, batch_size, 0, ranks)
    taken: list[int] = []
    for step in range(deal.steps):
        batches = [deal.batch(rank, step) for rank in range(ranks)]
        sizes = [len(batch) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0
        if step < deal.steps - 1:
            assert sum(sizes) == max(batch_size, ranks)
        taken += [sample for batch in batches for sample in batch]
    assert sorted([*taken, *deal.left_out.tolist()]) == list(range(numel))


def test_a_killed_ranks_uncommitted_draws_come_back_and_committed_ones_do_not() -> None:
    deal = Deal(40, 8, 0, 2)
    after = deal.after(Change(("a", "b"), (3, 2), (2, 2)), "a")  # b drew 3, committed 2
    gone = {sample for step in range(3) for sample in deal.batch(0, step)}
    gone |= {sample for step in range(2) for sample in deal.batch(1, step)}
    assert set(after.remaining.tolist()) == set(range(40)) - gone


def test_the_state_goes_on_alike() -> None:
    deal = Deal(100, 10, 3, 4).after(Change(tuple("abcd"), (2, 1, 2, 2), (1, 1, 1, 1)), "abc")
    assert deal.owed_to(1) == tuple(Deal(100, 10, 3, 4).batches(1, 1, 2))
    deal = deal.after(Change(tuple("abc"), (1, 1, 1), (1, 1, 1)), "abcef")
    other = Deal(**asdict(deal))
    assert [other.batch(rank, 0) for rank in range(5)] == [deal.batch(rank, 0) for rank in range(5)]


def test_epochs_differ_and_seeds_too() -> None:
    first = Deal(50, 10, 0, 2)
    orders = [first, first.next_epoch(), Deal(50, 10, 1, 2)]
    assert len({tuple(one.remaining.tolist()) for one in orders}) == 3


def dealt(dealer: Dealer, until: int = 1, batch_size: int = 8) -> list[int]:
    batches = dealer.batches(range(32), batch_size, 0, until, lambda batch: batch, lambda: True)
    return [sample for batch in batches for sample in batch]


def test_a_dealer_deals_an_epoch_and_the_next() -> None:
    dealers = [Dealer(), Dealer()]
    for rank, dealer in enumerate(dealers):
        dealer.regroup("ab", rank)
    for until in (1, 2):
        assert sorted(dealt(dealers[0], until) + dealt(dealers[1], until)) == list(range(32))
    assert dealt(dealers[0], 2) == []


def test_a_dealer_that_begins_after_a_change_agrees_with_one_that_began_before() -> None:
    early, late = Dealer(), Dealer()
    for rank, dealer in enumerate((early, late)):
        dealer.regroup("ab", rank)
    first = next(early.batches(range(32), 8, 0, 1, lambda batch: batch, lambda: True))
    for rank, dealer in enumerate((early, late)):
        dealer.regroup("ab", rank, Change(("a", "b"), (1, 0), (0, 0)))
    rest, lates = dealt(early), dealt(late)
    assert sorted([*first, *rest, *lates]) == list(range(32))
    assert len(lates) == len(first) + len(rest)  # it draws first what it would have drawn beside the other's


@pytest.mark.parametrize("drawn", [2, 3, 4])
def test_an_epoch_ends_where_the_group_changes_after_its_last_step(drawn: int) -> None:
    """A loop over an epoch's batches does not slide into the next one."""
    dealer, late = Dealer(), Dealer()
    dealer.regroup("a", 0)
    batches = dealer.batches(range(32), 8, 0, 1, lambda batch: batch, lambda: True)
    taken = [sample for _ in range(drawn) for sample in next(batches)]
    dealer.regroup("ab", 0, Change(("a",), (drawn,), (0,)))
    late.regroup("ab", 1)
    late.load(dealer.state())
    assert sorted([*taken, *(sample for batch in batches for sample in batch), *dealt(late)]) == list(range(32))
    assert (dealer.epochs, late.epochs) == (1, 1)
    assert sorted(dealt(dealer, 2) + dealt(late, 2)) == list(range(32))


def test_other_data_or_too_few_samples_are_refused() -> None:
    dealer = Dealer()
    dealer.regroup("ab", 0)
    dealt(dealer)
    with pytest.raises(ValueError, match="deals one data set"):
        dealt(dealer, 2, batch_size=16)
    small = Dealer()
    small.regroup("ab", 0)
    with pytest.raises(ValueError, match="lower batch_size"):
        dealt(small, batch_size=64)


@pytest.mark.parametrize(
    ("dataset", "batch_size", "said"),
    [(iter([1]), 1, "TypeError: dataset is a list_iterator"), (range(9), 0, "0, expected"), (range(9), -1, "-1, exp")],
)
def test_what_cannot_be_dealt(dataset, batch_size, said):
    dealer = Dealer()
    dealer.regroup("ab", 0)
    with pytest.raises((TypeError, ValueError)) as told:
        next(dealer.batches(dataset, batch_size, 0, 1, list, lambda: True))
    assert said in f"{told.typename}: {told.value}"


def test_a_global_batch_that_is_larger_than_asked_for_is_said(caplog):
    dealer = Dealer()
    dealer.regroup("abc", 0)
    assert len(next(dealer.batches(range(9), 2, 0, 1, list, lambda: True))) == 1
    assert "the global batch is 3, one sample for each rank, not batch_size=2" in caplog.text


kept: dict[int, list[int]] = {}
"""Samples by rank whose exchange stands."""


def draws(comm, **settings):
    """Notes what a rank has drawn, a step at a time."""
    world, drawn = Elastic(comm, at_least=1, timeout=0.2), []
    kept[comm.rank] = drawn
    for batch in world.deal(range(54), **{"batch_size": 6, "seed": 0, **settings}):
        comm.elapse(0.01)
        world.atomic(lambda: allreduce(torch.ones(1), world))
        drawn += batch.tolist()
    return drawn


@pytest.mark.parametrize("more", [1.55e-3, 1.6e-3, 1.65e-3])
def test_what_a_dead_rank_drew_is_dealt_again_also_where_the_next_generation_fails(more):
    """The link between the survivors is dark for a little longer than they try to connect."""
    faults = [Dies(0, at=0.055), LinkLost(1, 2, at=0.055, seconds=0.2 + more)]
    ranks = SimulatedWorld(3, faults=faults).run(draws)
    assert ranks[0] is None
    assert sorted(sample for drawn in kept.values() for sample in drawn) == list(range(54))


def test_it_is_said_what_a_dead_rank_had_drawn(caplog):
    assert SimulatedWorld(3, faults=[Dies(0, at=0.055)]).run(draws)[0] is None
    assert "(0.1); lost is what it held, its residual (norm unknown)" in caplog.text
    assert "in generation 1 it had drawn 8 samples in 4 batches by the last commit" in caplog.text  # and one in hand


@pytest.mark.slow
def test_a_batch_that_was_in_hand_through_two_deaths_is_dealt_again():
    """The second rank dies before the first commit of those whom the first one's death has left."""
    for at in torch.linspace(0.0551, 0.0575, 25).tolist():
        ranks = SimulatedWorld(4, faults=[Dies(0, at=0.055), Dies(1, at=at)]).run(draws)
        assert ranks[0] is ranks[1] is None
        assert sorted(sample for drawn in kept.values() for sample in drawn) == list(range(54)), at


def test_a_batch_that_is_drawn_in_another_thread_is_refused():
    def body(comm):
        world = Elastic(comm)
        batches = world.deal(range(8), batch_size=2)
        next(batches)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError, match="another thread than that which trains"):
                pool.submit(next, batches).result()
            there = pool.submit(world.deal, range(8), batch_size=2).result()
            pool.submit(next, there).result()
            world.atomic(lambda: None)
            with pytest.raises(RuntimeError, match="another thread than that which trains"):
                pool.submit(next, there).result()
        return True

    assert SimulatedWorld(1).run(body) == [True]


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch_size": 3}])
def test_ranks_that_begin_together_deal_alike(other):
    def body(comm):
        with pytest.raises(CollectiveError, match="54 samples in batches of 6 by seed 0"):
            draws(comm, **(other if comm.rank == 1 else {}))
        return True

    assert SimulatedWorld(3).run(body) == [True] * 3
