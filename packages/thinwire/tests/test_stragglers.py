"""Late ranks: who waits for them, and for how long."""

import json
import random
import tracemalloc
from itertools import chain, product

import numpy as np
import pytest
import thinwire
import torch
from communicators import Link, SimulatedWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_collectives import PartialAllreduce
from sparse_collectives import ALGORITHMS, Handling
from sparse_collectives.prediction import step_seconds
from thinwire.advice.command import parse
from thinwire.advice.measuring import Trained, find_out, measured_model
from thinwire.advice.recommendation import recommend
from thinwire.advice.report import as_json, as_text
from thinwire.advice.situation import Situation
from thinwire.advice.stragglers import Stragglers
from thinwire.advice.ways import BY_NAME, WAYS, Work, assumed_shapes

NEVER = Stragglers(({0.0: 1.0},))
SECONDS = st.floats(1e-4, 100)
TOLD = st.dictionaries(SECONDS, st.floats(0.01, 0.25), min_size=1, max_size=4).map(Stragglers.told)
TIMES = st.lists(st.lists(SECONDS, min_size=2, max_size=6), min_size=1, max_size=5)
LATE = TOLD | TIMES.map(Stragglers.measured)
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 8])
SMALL = settings(max_examples=max(1, settings.default.max_examples // 2), deadline=None)


@pytest.fixture(autouse=True)
def _little_is_measured(monkeypatch):
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", lambda comm, **_: Handling())
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda shapes, device: {})
    monkeypatch.setattr("thinwire.advice.measuring.share_taken", lambda comm: 0.0)


def situation(late, *, ranks=3, **changes):
    numel = 300_000
    given = {
        "numel": numel,
        "ranks": ranks,
        "device": "cpu",
        "compute": 0.1,
        "hidden": 0.06,
        "link": Link(1e-3, 8e-8),
        "link_name": "given",
        "pairs": None,
        "handling": {},
        "optimizer": "adamw",
        "shapes": assumed_shapes(numel),
        "work": {way.name: Work(1e-9, 1e-10) for way in WAYS},
        "stragglers": late,
    }
    return Situation(**given | changes)


def seconds_of(late, ranks, **changes):
    return {step.prediction.name: step for step in situation(late, ranks=ranks, **changes).predictions()}


@RANKS
def test_where_nobody_is_late_nothing_changes(ranks):
    """And where nothing is known of late ranks a step is computing and the exchange, of every way."""
    sparse = {"handling": {0.01: Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))}}
    plain, never = seconds_of(None, ranks, **sparse), seconds_of(NEVER, ranks, **sparse)
    for name, step in plain.items():
        assert never[name][1:] == pytest.approx(step[1:], rel=1e-9)
        p, way = step.prediction, BY_NAME.get(step.prediction.variant)
        backward = 0.06 if p.algorithm == "dense" or (way and way.early) else 0.0
        hidden = min(way.hides * 0.1, p.latency + p.transfer) if way else 0.0
        assert step.seconds == step_seconds(p, compute=0.1, backward=backward) - hidden


@RANKS
@given(LATE)
@SMALL
def test_who_waits_in_every_step_waits_for_the_last_and_others_never_longer(ranks, late):
    plain, found = seconds_of(None, ranks), seconds_of(late, ranks)
    last, slowest = late.late(ranks), late.slowest(ranks)
    assert late.mean(ranks) * (1 - 1e-9) <= slowest <= last * (1 + 1e-9)
    for name, step in found.items():
        way, before = BY_NAME.get(step.prediction.variant), plain[name].seconds
        added = step.seconds - before
        if way is None or (way.every == 1 and not way.quorum):
            assert added == pytest.approx(last, rel=1e-6)
        else:
            assert added <= last * (1 + 1e-6)
        if way and way.every > 1:
            assert added >= slowest * (1 - 1e-6)
        assert step.mean >= plain[name].mean * (1 - 1e-9)
        assert step.mean <= plain[name].mean + last * (1 + 1e-6)


@RANKS
@given(LATE, st.integers(1, 12), st.integers(1, 12))
@SMALL
def test_with_more_steps_between_two_meetings_no_step_waits_longer(ranks, late, few, more):
    least, rarely, often = late.slowest(ranks), late.late(ranks, every=few + more), late.late(ranks, every=few)
    assert least * (1 - 1e-9) <= rarely <= often * (1 + 1e-9)
    if ranks == 1:
        assert rarely == pytest.approx(least)


def test_averages_of_every_step_at_first_wait_in_every_step():
    late = Stragglers.told({0.2: 0.1})
    meets = seconds_of(late, 4, compute=1e-3)["local-sgd sync_every=4"]
    exchange = meets.prediction.seconds
    assert meets.seconds == pytest.approx(1e-3 + exchange + late.late(4, every=4))
    assert meets.mean == pytest.approx(0.1 * (1e-3 + 4 * exchange + late.late(4)) + 0.9 * meets.seconds)


@given(TOLD, st.integers(1, 100), st.integers(1, 8))
def test_more_ranks_wait_longer(late, ranks, every):
    assert late.late(ranks, every=every) <= late.late(ranks + 1, every=every) * (1 + 1e-9)


EAGER = LATE, st.sampled_from(["solo", "majority"]), st.floats(1e-3, 10), st.floats(0, 10)


def drawn(late, ranks):
    """The delays of each rank in each played round."""
    return late._delays(ranks, torch.Generator().manual_seed(0))


@given(*EAGER)
@SMALL
def test_one_rank_waits_for_nobody(late, quorum, compute, exchange):
    alone = compute + exchange + drawn(late, 1).mean().item()
    assert late.played(1, quorum, compute=compute, exchange=exchange) == pytest.approx(alone)
    steps, plain, mean = seconds_of(late, 1), seconds_of(None, 1), late.mean(1)
    assert all(steps[name].seconds <= plain[name].seconds + mean * (1 + 1e-9) for name in plain)


@RANKS
@given(*EAGER)
@SMALL
def test_partial_rounds_take_no_longer_than_those_that_wait_for_the_same_ranks(ranks, late, quorum, compute, exchange):
    waiting = compute + exchange + drawn(late, ranks).max(1).values.mean().item()
    assert late.played(ranks, quorum, compute=compute, exchange=exchange) <= 1.05 * waiting


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (2, 3), (3, 2)])
def test_the_wait_is_the_expected_longest(ranks, every):
    """Every course of events, by its probability; delays that are bins are not rounded."""
    shares = {0.0: 0.7, 0.25: 0.2, 1.0: 0.1}
    expected = 0.0
    for delays in product(shares, repeat=ranks * every):
        chance = torch.tensor([shares[late] for late in delays], dtype=torch.float64).prod().item()
        expected += chance * max(sum(delays[rank::ranks]) for rank in range(ranks)) / every
    assert Stragglers.told({0.25: 0.2, 1.0: 0.1}).late(ranks, every=every) == pytest.approx(expected)


def test_rare_long_delays_do_not_blur_the_short_ones():
    late = Stragglers.told({0.05: 0.5, 600.0: 1e-5})
    rarely, seldom = (1 - 1e-5) ** 8, (0.5 - 1e-5) ** 8
    assert late.late(8) == pytest.approx(0.05 * (1 - seldom) + (600 - 0.05) * (1 - rarely), rel=1e-9)
    assert late.slowest(8) <= late.late(8, every=4) <= late.late(8)


@given(LATE, st.integers(1, 9))
@SMALL
def test_the_last_of_one_step_is_that_of_the_bins_within_one(late, ranks):
    width = max(chain(*late.by_rank)) / 256
    exact, binned = late.late(ranks), late._last_mean(ranks, 1)
    assert exact - 1e-9 <= binned <= exact + width + 1e-9


def test_what_was_measured_of_many_ranks_takes_memory_once():
    times = torch.rand(100, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    late = Stragglers.measured((1 + times).tolist())
    tracemalloc.start()
    waited = late.late(100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6  # 8 bytes for each of 100 ranks and each of 100² delays would be twice that
    own = (times - times.min()).sort().values
    delays = own.flatten().sort().values
    within = (torch.searchsorted(own, delays.expand(100, -1).contiguous(), right=True).double() / 100).prod(0)
    assert waited == pytest.approx(float(delays[0] + (1 - within[:-1]) @ delays.diff()), rel=1e-9)


def test_a_wait_is_reckoned_once(monkeypatch):
    calls = []
    late, reckon = Stragglers.told({0.2: 0.1}), Stragglers._last_mean
    monkeypatch.setattr(Stragglers, "_last_mean", lambda self, *asked: calls.append(asked) or reckon(self, *asked))
    situation(late).predictions()
    situation(late).predictions()
    assert len(calls) == len(set(calls)) > 0


def test_a_rank_that_is_always_slow_is_waited_for_however_rarely_ranks_meet():
    late = Stragglers.measured([[1.0, 1.0], [1.0, 1.0], [1.5, 1.5]])
    assert [late.late(3, every=every) for every in (1, 4, 30)] == pytest.approx([0.5] * 3)
    assert (late.mean(3), late.slowest(3)) == pytest.approx((0.5 / 3, 0.5))
    assert late.slowest(2) == 0.0


SOMETIMES = ({0.0: 0.9, 1.0: 0.1},)
UNLIKE = ({0.0: 0.5, 0.3: 0.5}, {0.2: 1.0}, {0.0: 1.0})
ONE_IS_SLOW = ({0.0: 1.0}, {0.0: 1.0}, {50.0: 1.0})


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("by_rank", "rel"), [(({0.0: 1.0}, {0.0: 1.0}, {0.5: 1.0}), 0.02), (({0.0: 0.9, 0.2: 0.1},), 0.05)]
)
@pytest.mark.parametrize("alpha", [1e-5, 0.2])
@pytest.mark.parametrize("name", ["overlap-local-sgd sync_every=4", "streaming-diloco sync_every=32"])
def test_the_next_steps_hide_what_the_optimizers_do(name, alpha, by_rank, rel):
    """The network and chance, but never a rank that is always slow."""
    way, ranks, steps, link = BY_NAME[name], 3, 160, Link(alpha, 0.0)

    def body(comm):
        draw, own = random.Random(comm.rank), by_rank[comm.rank % len(by_rank)]
        model = torch.nn.ParameterList(torch.zeros(75_000) for _ in range(4))
        optimizer = way.make(torch.optim.SGD(model.parameters()), model, comm, steps=0, every=way.every)
        for delay in draw.choices(list(own), list(own.values()), k=steps):
            comm.elapse(1.0 + delay)
            optimizer.step()
            optimizer.average()
        ended = comm.clock()
        optimizer.finish()
        return ended / steps

    late, work = Stragglers(by_rank), {name: Work()}
    told = seconds_of(late, ranks, compute=1.0, link=link, work=work)[name].seconds
    assert told == pytest.approx(max(SimulatedWorld(ranks, link=link).run(body)), rel=rel)


@pytest.mark.few(3)
@pytest.mark.parametrize("quorum", ["solo", "majority"])
@pytest.mark.parametrize(
    ("by_rank", "alpha"), [(SOMETIMES, 1e-5), (UNLIKE, 1e-5), (ONE_IS_SLOW, 1e-5), (SOMETIMES, 0.05)]
)
def test_partial_rounds_take_what_the_protocol_takes(quorum, by_rank, alpha):
    """Whose rounds wait for a rank that has missed as many as it may, and whose late ranks miss an exchange."""
    ranks, compute = 3, 0.5
    until = 20_000.0 if (by_rank, quorum) == (ONE_IS_SLOW, "majority") else 400.0

    def simulated(by_rank, until):
        def body(comm):
            delays = by_rank[comm.rank % len(by_rank)]
            draw, steps = random.Random(comm.rank), 0
            with PartialAllreduce(torch.zeros(1), comm, quorum=quorum) as partial:
                while comm.clock() < until:
                    comm.elapse(compute + draw.choices(list(delays), list(delays.values()))[0])
                    partial.allreduce(torch.zeros(1))
                    steps += 1
                ended = comm.clock()
                for _ in partial.finish():
                    pass
            return steps / ended

        return ranks / sum(SimulatedWorld(ranks, link=Link(alpha, 0.0)).run(body))

    exchange = simulated(NEVER.by_rank, 40.0) - compute
    played = Stragglers(by_rank).played(ranks, quorum, compute=compute, exchange=exchange)
    assert played == pytest.approx(simulated(by_rank, until), rel=0.06 if alpha == 1e-5 else 0.08)


def test_steps_that_were_measured_are_those_of_all_ranks():
    def body(comm):
        times = [[0.2, 0.3], [0.2, 0.9, 0.2], [0.4, 0.4]][comm.rank]
        model = torch.nn.Linear(40, 30)
        return thinwire.advise(model, steps_per_second=1, density=0.01, stragglers=times, comm=comm).situation

    for found in SimulatedWorld(3).run(body):
        assert found.compute == 0.2
        delays = [sorted(own.items()) for own in found.stragglers.by_rank]
        expected = [(0.0, 0.5), (0.1, 0.5)], [(0.0, 2 / 3), (0.7, 1 / 3)], [(0.2, 1.0)]
        assert [[*chain(*own)] for own in delays] == [pytest.approx([*chain(*own)]) for own in expected]


def test_a_models_steps_are_measured_more_often_where_late_ranks_are_asked_for(monkeypatch):
    calls = []

    def step(*given):
        calls.append(1)
        return 0.1, 0.1 * len(calls)

    monkeypatch.setattr("thinwire.advice.measuring._made", lambda *given: (torch.nn.Linear(3, 1), None))
    monkeypatch.setattr("thinwire.advice.measuring._step_seconds", step)
    body = lambda comm: measured_model("here:made", comm, torch.device("cpu"), late=True)  # noqa: E731
    [found] = SimulatedWorld(1).run(body)
    assert found.times == pytest.approx([0.1 + 0.1 * number for number in range(2, 22)])


def test_the_advice_names_late_ranks_and_tells_programs():
    late = Stragglers.told({2.0: 0.05})
    found = situation(late, ranks=8)
    assert "a rank is late by 100 ms a step in the mean, the last of all by 673 ms" in as_text(found)
    assert "late ranks and the network are" in recommend(found).text.lower()
    told = json.loads(as_json(found))["stragglers"]
    assert told == {"mean_seconds": pytest.approx(0.1), "last_seconds": pytest.approx(2 * (1 - 0.95**8))}
    assert json.loads(as_json(situation(None)))["stragglers"] is None
    assert "late" not in as_text(situation(None)).split()


@pytest.mark.parametrize(("optimizer", "data"), [("adam", "text/recurrent"), ("adamw", "images")])
def test_what_does_not_wait_is_recommended_where_it_is_known_to_learn(optimizer, data):
    late = Stragglers.told({5.0: 0.2})
    found = recommend(situation(late, ranks=8, optimizer=optimizer, data=data))
    assert found.step.prediction.algorithm.startswith("eager")
    assert "EagerSGD(" in found.text


def test_what_does_not_wait_is_passed_over_where_it_learned_worse():
    found = recommend(situation(Stragglers.told({5.0: 0.2}), ranks=8, data="text/transformer"))
    assert "passed over: eager" in found.reason
    assert not found.step.prediction.algorithm.startswith("eager")


COMMAND = ["--parameters", "1e6", "--step-seconds", "1", "--link", "1gbit"]


def test_torchs_default_device_and_dtype_change_no_number():
    def text():
        return as_text(situation(Stragglers.told({0.3: 0.05}), ranks=8))

    expected, before = text(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert text() == expected
    finally:
        torch.set_default_dtype(before)


def test_they_are_told_on_the_command_line():
    told = parse([*COMMAND, "--stragglers", "5%:300ms", "0.001:10s"]).late
    assert told == Stragglers.told({0.3: 0.05, 10.0: 0.001})
    twice = parse([*COMMAND, "--stragglers", "5%:300ms", "10%:300ms", "--stragglers", "1%:1s"]).late
    [late] = twice.by_rank
    assert late == pytest.approx({0.0: 0.84, 0.3: 0.15, 1.0: 0.01})
    assert parse(COMMAND).late is None
    assert parse(["--model", "a:b", "--stragglers", "measured"]).late is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["5%"], "5% given, expected SHARE:TIME such as 5%:300ms, or measured"),
        (["120%:1s"], "120% given, expected 0 < share <= 1"),
        (["0:1s"], "expected 0 < share <= 1"),
        (["5%:0s"], "0s given, expected seconds > 0, a time such as 300ms"),
        (["5%:5%"], "5% given, expected seconds > 0"),
        (["60%:1s", "70%:1s"], "late in 1.3 of the steps, expected shares that add up to 1 at most"),
        (["60%:1s", "--stragglers", "70%:2s"], "late in 1.3 of the steps, expected shares that add up to 1 at most"),
        (["measured"], "--stragglers measured stands alone, and needs --model"),
    ],
)
def test_bad_flags(given, said, capsys):
    with pytest.raises(SystemExit):
        parse([*COMMAND, "--stragglers", *given])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "late ranks are {}, expected seconds above 0 and shares of steps"),
        ({-1.0: 0.5}, "expected seconds above 0"),
        ({1.0: 0.0}, "0 < share <= 1"),
        ({float("inf"): 0.5}, "expected seconds above 0"),
        ({1.0: 0.7, 2.0: 0.7}, "late in 1.4 of the steps"),
        ([0.3], "seconds above 0 of 2 or more steps of this rank"),
        ([0.3, float("nan")], "seconds above 0"),
        ({"a": "b"}, "late ranks are {'a': 'b'}, expected seconds above 0"),
        ({0.3: float("nan")}, "0 < share <= 1, such as {0.3: 0.05}"),
        (["a", "b"], "seconds above 0 of 2 or more steps of this rank"),
        ("measured", "stragglers is 'measured', expected {seconds late: share of the steps}"),
        (0.3, "stragglers is 0.3, expected {seconds late: share of the steps}"),
        (torch.tensor([0.2, 0.3]), "steps of this rank: give tolist() of this Tensor"),
        (torch.tensor([0.2, 0.3]).numpy(), "steps of this rank: give tolist() of this ndarray"),
        ([torch.tensor(0.2), torch.tensor(0.3)], "stragglers is [tensor(0.2000), tensor(0.3000)], expected"),
    ],
)
def test_bad_arguments(given, said):
    with pytest.raises(ValueError, match="expected") as error:
        thinwire.advise(torch.nn.Linear(2, 2), steps_per_second=1, link="wan", ranks=8, stragglers=given)
    assert said in str(error.value)


TIMED, TOLD_ONE = [0.2, 0.3], {0.3: 0.05}


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ((TIMED, [0.2]), "rank 1: stragglers is [0.2], expected"),
        (([0.2, float("nan")], TIMED), "rank 0: stragglers is [0.2, nan], expected"),
        ((TOLD_ONE, 0.3), "rank 1: stragglers is 0.3, expected"),
        ((TOLD_ONE, TIMED), "ranks 0 and 1 differ in stragglers: {0.3: 0.05}, and seconds of steps; give all"),
        ((None, TIMED), "ranks 0 and 1 differ in stragglers: None, and seconds of steps; give all"),
        ((TOLD_ONE, {0.3: 0.1}), "ranks 0 and 1 differ in stragglers: {0.3: 0.05}, and {0.3: 0.1}; give all"),
    ],
)
def test_ranks_refuse_unlike_late_ranks_together(of_ranks, said):
    def body(comm):
        with pytest.raises(ValueError, match="stragglers") as error:
            thinwire.advise(torch.nn.Linear(2, 2), steps_per_second=1, stragglers=of_ranks[comm.rank], comm=comm)
        return str(error.value)

    assert all(each.startswith(said) for each in SimulatedWorld(2).run(body))


@pytest.mark.parametrize(
    ("of_rank_1", "said"),
    [
        ({"optimizer": "adamw"}, "optimizer: sgd, and adamw"),
        ({"density": 0.05}, "density: [0.01, 0.001], and [0.05]"),
        ({"overlap": True}, "overlap: False, and True"),
        ({"data": "text"}, "data: , and text"),
        ({"model": torch.nn.Linear(2, 3)}, "model: 2 tensors, 6 elements, shapes "),
    ],
)
def test_ranks_refuse_to_ask_of_unlike_trainings(of_rank_1, said):
    def body(comm):
        asked = {"model": torch.nn.Linear(2, 2), **(of_rank_1 if comm.rank else {})}
        with pytest.raises(ValueError, match=r"give all ranks the same$") as error:
            thinwire.advise(steps_per_second=1 + comm.rank, comm=comm, **asked)
        return str(error.value)

    assert all(each.startswith(f"ranks 0 and 1 differ in {said}") for each in SimulatedWorld(2).run(body))


def test_ranks_may_tell_the_same_in_any_order_and_type():
    def body(comm):
        late = [{0.3: 0.05, 1.0: 0.1}, {1: 0.1, 0.3: 0.05}][comm.rank]
        same = {"overlap": (True, 1)[comm.rank], "density": ([0.01], [np.float64(0.01)])[comm.rank]}
        model = torch.nn.Linear(2, 2)
        return thinwire.advise(model, steps_per_second=1, stragglers=late, comm=comm, **same).situation

    one, other = SimulatedWorld(2).run(body)
    assert one.stragglers == other.stragglers == Stragglers.told({0.3: 0.05, 1.0: 0.1})


def test_what_is_known_of_one_process_stands_for_all_ranks():
    def body(comm):
        trained = Trained.of_numbers(100_000, 9.0)._replace(times=(0.3, 0.5))
        asked = {"densities": [0.01], "link": Link(1e-3, 1e-9), "link_name": "given", "overlap": True}
        return find_out(trained, comm, lambda _: None, device=torch.device("cpu"), ranks=4, **asked)

    [found] = SimulatedWorld(1).run(body)
    assert found.compute == 0.3
    assert found.hidden == pytest.approx(0.2)
    assert found.stragglers.late(4) == pytest.approx(0.2 * (1 - 0.5**4))
