"""stats(): what training has cost and saved; and what a repr says."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from communicators import Alone, Link, SimulatedWorld, Stats
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer
from data_parallel.tally import Tally
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import Compressor, topk
from torch import nn

pytestmark = pytest.mark.quick

NUMEL = 64 * 16 + 16 + 16 + 1


def made(comm, kind=DistributedOptimizer, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, kind(optimizer, model.named_parameters(), comm=comm, **options)


def backward(model, rank, step=0):
    seeded = torch.Generator().manual_seed(97 * step + rank)
    model(torch.randn(8, 64, generator=seeded)).square().mean().backward()


@pytest.mark.few(24)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "gtopk"},
        {"algorithm": "oktopk"},
        {"algorithm": "dense"},
        {"algorithm": "powersgd", "options": {"dense_steps": 1}},
        {"algorithm": "dense-int8"},
        {"dense_below": 17},
        {"overlap": True, "bucket_bytes": 256},
        {"kind": UpdateOptimizer},
        {"nonfinite": "skip", "momentum": 0.9},
    ],
    ids=str,
)
def test_bytes_are_those_that_the_communicator_counts(size, options):
    def body(comm):
        model, optimizer = made(comm, **options)
        before = comm.bytes_sent
        for step in range(3):
            with optimizer.ahead() if isinstance(optimizer, UpdateOptimizer) else nullcontext():
                backward(model, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        skips = options.get("nonfinite") == "skip" and isinstance(optimizer, UpdateOptimizer)
        return optimizer.stats(), comm.bytes_sent - before, skips

    for stats, sent, _ in SimulatedWorld(size).run(body):
        assert stats["bytes_sent"] == sent
        assert (sent > 0) == (size > 1)
        assert abs(stats["bytes_dense"] - 3 * 2 * 4 * NUMEL * (size - 1) / size) <= 3 * len(options) * 8
        assert (stats["steps"], stats["skipped"]) == (3, 0)


def seconds(computes, **options):
    """Of one step of which the exchange takes a second for each message; computing goes on for so long after it."""

    def body(comm):
        model, optimizer = made(comm, **options)
        for step in range(2):
            backward(model, comm.rank, step)
            comm.elapse(computes)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.stats()

    stats = SimulatedWorld(2, link=Link(alpha=1.0, beta=0.0)).run(body)[0]
    return [round(stats[f"seconds_{name}"], 1) for name in ("exchanging", "waited", "hidden")]


def test_seconds_are_hidden_while_the_rank_computes_and_waited_for_after_that():
    assert seconds(0.0) == seconds(0.4) == [2.0, 2.0, 0.0]  # nothing is under way before step()
    assert seconds(0.0, overlap=True) == [2.0, 2.0, 0.0]
    assert seconds(0.4, overlap=True) == [2.0, 1.2, 0.8]
    assert seconds(7.0, overlap=True) == [2.0, 0.0, 2.0]


class Span:
    """Of something that was under way."""

    def __init__(self, began, ended):
        self.began, self.ended, self.bytes_sent = began, ended, 2


def covered(spans):
    return len({second for begin, end in spans for second in range(begin, end)})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-3, 9)), max_size=8), st.integers(0, 40))
def test_what_spans_cover_is_counted_once(spans, since):
    spans = [(begin, begin + length) for begin, length in spans]
    tally = Tally(lambda: since)
    tally._step = [Span(*span) for span in spans]
    tally.waiting_since = since
    numbers = tally.numbers()
    assert numbers["seconds_exchanging"] == covered(spans)
    assert numbers["seconds_waited"] == covered((max(begin, since), end) for begin, end in spans)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_a_tally_keeps_nothing_that_is_over_although_nobody_says_that_it_waits(pauses):
    """And counts the same seconds, whether they are added up one by one or at the end."""
    now, spans = 0, []
    tally = Tally(lambda: float(now))
    for pause, length in pauses:
        now += pause
        spans.append((now, now + length))
        tally.add([Span(*spans[-1])], dense=1)
        assert len(tally._step) == 1
        now += length
    numbers = tally.numbers()
    assert (numbers["bytes_sent"], numbers["bytes_dense"]) == (2 * len(pauses), len(pauses))
    assert (numbers["seconds_exchanging"], numbers["seconds_waited"]) == (covered(spans), 0)


def test_what_waits_and_what_was_skipped():
    def body(comm):
        model, optimizer = made(comm, density=0.05, nonfinite="skip")
        for step in range(3):
            backward(model, comm.rank, step)
            if step == 1 and comm.rank == 0:
                model[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        residuals = optimizer.state_dict()["distributed"]["residuals"]
        return optimizer.stats(), math.sqrt(sum(float(r.double().square().sum()) for r in residuals.values()))

    for stats, norm in SimulatedWorld(2).run(body):
        assert (stats["steps"], stats["skipped"], stats["density"]) == (3, 1, 0.05)
        assert stats["residual_norm"] == pytest.approx(norm) != 0


class OnlyOne(Compressor):
    """The largest element."""

    def __call__(self, dense):
        return topk(dense, 1)

    def entries(self, numel):
        return 1


def test_a_density_schedule_and_whole_gradients_say_what_they_send():
    model, optimizer = made(Alone(), density=lambda step: 0.25 / (1 + step))
    for _ in range(2):
        backward(model, 0)
        optimizer.step()
    assert optimizer.stats()["density"] == 0.125
    assert made(Alone(), algorithm="dense")[1].stats()["density"] == 1
    assert "density" not in made(Alone(), compressor=OnlyOne())[1].stats()  # it does not say


def test_while_an_algorithm_still_sums_whole_it_is_said():
    options = {"algorithm": "powersgd", "options": {"dense_steps": 2}}
    model, optimizer = made(Alone(), nonfinite="skip", **options)
    said = []
    for step in range(4):
        stats = optimizer.stats()
        said.append((stats["dense_steps_left"], "summed whole" in str(stats)))
        backward(model, 0, step)
        if step == 0:
            model[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
        optimizer.zero_grad()
    assert said == [(2, True), (2, True), (1, True), (0, False)]
    assert "the next 2 steps are summed whole" in str(made(Alone(), **options)[1].stats())
    assert "dense_steps_left" not in made(Alone(), algorithm="dense")[1].stats()


def test_a_logger_gets_plain_numbers_and_a_reader_a_line():
    model, optimizer = made(Alone())
    backward(model, 0)
    optimizer.step()
    stats = optimizer.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert {type(value) for value in stats.values()} <= {int, float}
    assert str(stats).startswith("1 step, 0 B sent, ")
    shown = {"bytes_sent": 2_000, "bytes_dense": 3_000_000, "seconds_waited": 1.25, "seconds_hidden": 0.5}
    assert str(Stats({**stats, **shown, "steps": 7, "skipped": 1, "residual_norm": 0.5})) == (
        "7 steps (1 skipped), 2 kB sent for 3 MB dense (1,500.0x fewer), 1.25 s waited and 0.5 s hidden, "
        "density 0.01, residual norm 0.5"
    )


def test_a_state_without_ranks_yet_counts_nothing_and_asks_nobody():
    state = SparseHookState(density=0.02, momentum=0.5)
    assert state.stats() == {"steps": 0, "skipped": 0}
    assert str(state.stats()) == "0 steps, 0 B sent, 0 s waited and 0 s hidden"
    assert repr(state) == (
        "SparseHookState(algorithm='gtopk', compressor=TopK(density=0.02), wire='fp32', momentum=0.5, "
        "nonfinite='raise', no group yet)"
    )


def test_a_repr_says_the_settings():
    text = repr(made(Alone(), algorithm="spardl", density=0.02, clip_norm=1.0)[1])
    for word in (
        "DistributedOptimizer(algorithm='spardl'",
        "TopK(density=0.02)",
        "clip_norm=1.0",
        "rank 0 of 1",
        "SGD",
        "lr: 0.1",
    ):
        assert word in text, word
    for whole in ("dense", "dense-int8", "powersgd"):
        assert "TopK" not in repr(made(Alone(), algorithm=whole)[1])


@pytest.mark.parametrize("kind", [DistributedOptimizer, UpdateOptimizer])
def test_what_was_verified_is_the_hash_that_all_ranks_have(kind):
    def body(comm):
        model, optimizer = made(comm, kind, verify=2)
        found = []
        for step in range(5):
            with optimizer.ahead() if isinstance(optimizer, UpdateOptimizer) else nullcontext():
                backward(model, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
            stats = optimizer.stats()
            found.append((stats.get("verified_step"), stats.get("verified_hash")))
        return found

    ranks = SimulatedWorld(3).run(body)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [step for step, _ in ranks[0]] == [None, 2, 2, 4, 4]
    hashes = {digest for _, digest in ranks[0]} - {None}
    assert len(hashes) == 2  # the parameters have changed
    assert all(digest == float(digest) < 2**48 for digest in hashes)


def test_statistics_tell_the_group_and_whose_messages_were_lacking():
    def body(comm):
        model, optimizer = made(comm, algorithm="topk-allgather")
        for step in range(3):
            backward(model, comm.rank, step)
            comm.elapse(5.0 if comm.rank == 2 else 0.0)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.stats()

    ranks = SimulatedWorld(4, link=Link(alpha=1e-3, beta=0.0)).run(body)
    for rank, stats in enumerate(ranks):
        assert (stats["rank"], stats["ranks"], stats["generation"]) == (rank, 4, 1)
        awaited = {name: seconds for name, seconds in stats.items() if name.startswith("seconds_awaited_of_")}
        assert f"seconds_awaited_of_{rank}" not in awaited
        assert sum(awaited.values()) >= stats["seconds_waited"] - 1e-9
    of_late = [stats["seconds_awaited_of_2"] for stats in ranks if "seconds_awaited_of_2" in stats]
    assert of_late
    assert min(of_late) > 14.9
    assert sum(seconds for name, seconds in ranks[2].items() if "awaited" in name) < 0.1


@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "powersgd"])
def test_one_rank_sends_nothing(algorithm):
    model = nn.Linear(30, 20)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=Alone(), algorithm=algorithm)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
    assert optimizer.stats()["bytes_sent"] == 0
