"""The ways that select nothing: bytes as they are counted, lines that run, plans that do what they say."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import re
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import thinwire
import torch
import torch.distributed as dist
from communicators import Alone, Link, SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer
from local_sgd import DiLoCo, LocalSGD, OverlapLocalSGD, SparseLoCo, StreamingDiLoCo
from partial_collectives import EagerSGD
from replicas import MuonAdamW, refuse_unlike
from sparse_collectives import ALGORITHMS, Handling
from sparse_collectives.prediction import HANDLING, step_seconds
from thinwire.__main__ import main
from thinwire.advice import accuracy, own_work
from thinwire.advice.measuring import Trained, find_out, measure_torch_alpha
from thinwire.advice.own_work import measure_around, measure_work
from thinwire.advice.plan import KINDS, Plan
from thinwire.advice.recommendation import OPTIMIZERS, _use, recommend
from thinwire.advice.report import as_text
from thinwire.advice.situation import Situation
from thinwire.advice.stragglers import Stragglers
from thinwire.advice.ways import BY_NAME, WAYS, Work, assumed_shapes, elements, for_late_gradients
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings(action="ignore"):  # of torch.jit; imported later, it would keep the group there is then
    import torch.distributed.nn
    from torch.distributed.optim import PostLocalSGDOptimizer

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
LINK, SLOW = Link(200e-6, 80e-9), Link(30e-3, 8e-6)
OPTIMIZERS_OF_WAYS = (DistributedOptimizer, DiLoCo, LocalSGD, OverlapLocalSGD, SparseLoCo, StreamingDiLoCo, EagerSGD)
OF_TORCH = (
    bf16_compress_hook,
    PowerSGDState,
    powerSGD_hook,
    PostLocalSGDState,
    post_localSGD_hook,
    PeriodicModelAverager,
)
NAMES = {"partial": partial, **{one.__name__: one for one in (*OPTIMIZERS_OF_WAYS, *OF_TORCH, PeriodicModelAverager)}}
OURS = [way for way in WAYS if not way.ddp_only]
OF_DDP = [way for way in WAYS if way.ddp_only]


def model_of(times=1):
    torch.manual_seed(0)
    layers = torch.nn.Linear(60 * times, 70 * times), torch.nn.Linear(70 * times, 40 * times)
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])


def inner_of(name, model):
    make = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-2),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "muon": lambda: MuonAdamW(model, lr=1e-2),
    }
    return make[name]()


def situation(optimizer="adamw", **changes):
    trained = Trained.of([p.shape for p in model_of().parameters()], 0.01)
    given = {
        "numel": elements(trained.shapes),
        "ranks": 3,
        "device": "cpu",
        "compute": trained.compute,
        "hidden": 0.0,
        "link": SLOW,
        "link_name": "given",
        "pairs": None,
        "handling": {0.01: Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))},
        "tiny": trained.tiny,
        "shapes": trained.shapes,
        "work": {way.name: Work() for way in WAYS},
    }
    return Situation(**given | {"optimizer": optimizer} | changes)


def exchanged(optimizer):
    optimizer.step()
    getattr(optimizer, "average", lambda: None)()


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("way", OURS, ids=lambda way: way.name)
def test_bytes_are_those_that_a_training_sends(way, ranks):
    """Of its busiest rank; beside them travels a little that does not grow with the model."""

    def body(comm):
        model = model_of(4)
        optimizer = way.make(torch.optim.SGD(model.parameters(), lr=0.1), model, comm, steps=0, every=1)
        counts = []
        for _ in range(5):  # what one begins the next one may end
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            exchanged(optimizer)
            counts.append(comm.bytes_sent)
        getattr(optimizer, "finish", lambda: None)()
        return (counts[-1] - counts[0]) / 4

    shapes = [p.shape for p in model_of(4).parameters()]
    told = way.predict(shapes, size=ranks, link=LINK, work=Work())
    counted = max(SimulatedWorld(ranks).run(body))
    rel = 0.04 if "streaming" in way.name else 0.01  # its fragments are whole parameters, about equal
    assert told.nbytes * way.every == pytest.approx(counted, rel=rel, abs=16 * way.every + 50)


@pytest.mark.slow
@pytest.mark.few(14)  # each way
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("way", OURS, ids=lambda way: way.name)
def test_rounds_cost_what_the_simulated_clock_says(way, ranks):
    """Behind a link where nothing counts but α.

    What travels side by side costs most of it once, as on real links: on 4 gloo ranks, of which each message takes
    50 ms, a sum in int8 takes 182 ms for three rounds with five messages. The simulated clock sends one after another.
    """

    def body(comm):
        model = model_of()
        optimizer = way.make(torch.optim.SGD(model.parameters(), lr=0.1), model, comm, steps=0, every=1)
        for _ in range(4):
            begin = comm.clock()
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            exchanged(optimizer)
        seconds = comm.clock() - begin
        getattr(optimizer, "finish", lambda: None)()
        return seconds

    link = Link(30e-3, 0.0)
    told = way.predict([p.shape for p in model_of().parameters()], size=ranks, link=link, work=Work())
    seconds = max(SimulatedWorld(ranks, link=link).run(body))
    latency, gather = told.latency * way.every, math.ceil(math.log2(ranks))
    few_bits, sent = "int8" in way.name or "int2" in way.name, way.sent(0, ranks, [torch.Size((100, 100))])
    if few_bits or way.gathers:
        assert sent.rounds == gather + few_bits
        beside = ranks - 2 if way.name == "dense-int8" else gather + (ranks - 2) * few_bits  # weights, and a split
        assert seconds * 1.001 >= latency == pytest.approx(sent.rounds * link.alpha + beside * HANDLING)
    elif way.fragments > 1:  # the last one is shorter than a quarter, and may double where that halves
        assert seconds * 0.99 <= latency <= seconds * 2.01
    else:
        assert latency == pytest.approx(seconds, rel=0.15 if "powersgd" in way.name else 0.35)


def test_a_step_has_its_share_of_an_exchange_after_a_block_and_hides_none():
    found = {p.variant: (p, seconds) for p, seconds, *_ in situation(hidden=0.005).predictions()}
    often, rarely = found["diloco sync_every=5"], found["diloco sync_every=30"]
    for name in ("latency", "transfer"):
        assert getattr(often[0], name) == pytest.approx(6 * getattr(rarely[0], name))
    for p, seconds in (often, rarely):
        assert seconds == pytest.approx(0.01 + p.seconds)

    def low_rank(hidden):
        large = {"shapes": assumed_shapes(25_000_000), "numel": 25_000_000, "link": Link(0.0, 8e-9)}
        steps = situation(hidden=hidden, **large).predictions()
        return next(s.seconds for s in steps if s.prediction.variant == "powersgd rank=2")

    assert low_rank(0.005) < low_rank(0.0)


@pytest.mark.parametrize("compute", [0.01, 100.0])
def test_an_exchange_beside_the_next_steps_costs_what_they_do_not_hide(compute):
    found = {s.prediction.variant: s for s in situation(compute=compute).predictions()}
    overlaps, averages = found["overlap-local-sgd sync_every=4"], found["local-sgd sync_every=4"]
    assert overlaps.seconds == pytest.approx(max(compute, averages.seconds - compute))
    streams = found["streaming-diloco sync_every=32"]
    network = streams.prediction.latency + streams.prediction.transfer
    assert streams.seconds == pytest.approx(compute + max(0.0, network - compute / 2))
    every_step = compute + 4 * averages.prediction.seconds
    assert averages.mean == pytest.approx(0.1 * every_step + 0.9 * averages.seconds)


def test_the_dense_steps_before_power_sgd_are_in_its_mean():
    steps = {s.prediction.name: s for s in situation(plain=True).predictions()}
    low_rank, dense = steps["powersgd rank=2"], steps["dense"]
    assert low_rank.mean == pytest.approx(0.1 * dense.seconds + 0.9 * low_rank.seconds)


def test_power_sgd_is_made_with_these_dense_steps():
    model = torch.nn.Linear(40, 30)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    made = BY_NAME["powersgd rank=2"].make(inner, model, Alone(), steps=25, every=1)
    assert "dense_steps=2" in made._exchange.facts().split(", ")


@pytest.mark.slow
def test_work_is_that_of_the_real_optimizers_and_grows_with_what_is_done():
    work = measure_work(assumed_shapes(300_000), CPU)
    assert set(work) == {*BY_NAME, "dense"}
    assert all(number >= 0 for one in work.values() for number in one)
    packed, plain = (sum(work[f"diloco sync_every=30{more}"]) for more in (" compress=int2", ""))
    assert packed > plain > 0


def test_work_of_fragments_that_differ_is_their_mean(monkeypatch):
    now, seconds = [0.0], itertools.cycle([1.0, 2.0, 3.0, 6.0])

    class Streams:
        def step(self):
            now[0] += next(seconds)

    monkeypatch.setattr(own_work, "_now", lambda device: now[0])
    assert own_work._seconds(lambda *_, **__: Streams(), [torch.Size((2, 3))], CPU, 1, fragments=4) == 3.0


def test_a_selection_takes_what_the_optimizer_does_around_it(monkeypatch):
    """Look-ahead, buckets, corrections: more than the selection; where updates are sent, as the advice says then."""
    now, asked = [0.0], {}

    class Takes:
        def __init__(self, seconds):
            self.seconds = seconds

        @contextmanager
        def ahead(self):
            now[0] += 1.0
            yield

        def step(self):
            now[0] += self.seconds

    def for_model(inner, model, *, comm, density):
        asked.update(inner=inner.seconds, ranks=comm.size, density=density(0))
        return Takes(7.0)

    monkeypatch.setattr(own_work, "_now", lambda device: now[0])
    monkeypatch.setattr(own_work.UpdateOptimizer, "for_model", for_model)
    monkeypatch.setitem(own_work.INNER, "adamw", lambda parameters: Takes(3.0))
    shapes = [torch.Size((2, 3)), torch.Size((4,))]
    assert measure_around(shapes, CPU, optimizer="adamw", density=0.01) == pytest.approx((8.0 - 4.0) / 10)
    assert asked == {"inner": 3.0, "ranks": 1, "density": 0.01}

    handling = {density: Handling(0.1, {"oktopk": 0.3}, {"gtopk": 0.0}) for density in (0.01, 0.001)}
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", lambda comm, density, **_: handling[density])
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda shapes, device: {})
    monkeypatch.setattr("thinwire.advice.measuring.share_taken", lambda comm: 0.0)
    given = {"device": CPU, "ranks": 2, "densities": (0.01, 0.001), "link": Link(1e-3, 1e-8), "link_name": "given"}
    trained = Trained.of(shapes, 0.1)
    monkeypatch.setattr(Situation, "sends_updates", True)
    found = find_out(trained, Alone(), print, **given, overlap=False, optimizer="adamw").handling
    for own in found.values():
        assert own.compress == pytest.approx(0.4)
        assert own.prescribed == {"oktopk": pytest.approx(0.6)}
    monkeypatch.setattr(Situation, "sends_updates", False)
    assert find_out(trained, Alone(), print, **given, overlap=False, optimizer="sgd").handling == handling


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_work_is_measured_in_float32_whatever_torchs_default(default, monkeypatch):
    seen = set()

    def inner(parameters):
        made = torch.optim.AdamW(parameters)
        seen.update(p.dtype for p in made.param_groups[0]["params"])
        return made

    monkeypatch.setitem(own_work.INNER, "adamw", inner)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        measure_around([torch.Size((4, 3))], CPU, optimizer="adamw", density=0.5)
    finally:
        torch.set_default_dtype(before)
    assert seen == {torch.float32}


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1 << 20, 25_000_000, 10**10 + 7, 10**13])
def test_assumed_shapes_have_all_elements_and_are_few(numel):
    assert elements(assumed_shapes(numel)) == numel
    assert len(assumed_shapes(numel)) <= 1026


def test_nothing_is_selected_for_muon():
    names = {p.algorithm for p, *_ in situation("muon").predictions()}
    averaged = {"diloco", "streaming-diloco", "local-sgd", "overlap-local-sgd", "torch-local-sgd"}
    compressed = {"dense-int8", "powersgd", "torch-powersgd", "torch-bf16"}
    assert names == {"dense", *compressed, *averaged}
    assert "UpdateOptimizer" not in recommend(situation("muon")).text


def test_what_is_known_of_one_task_alone_is_not_advised_unasked(monkeypatch):
    def record(tasks, seeds):
        same = {"optimizer": "adamw", "wire": "fp32", "ranks": 3, "seeds": seeds, "steps": 100, "sends": "gradients"}
        same |= {"data": "images", "until": 1.0, "dense_until": 1.0}
        ways = ("sparseloco sync_every=5", 0.021, tasks), ("powersgd rank=4", 1.0, ("vit", "text"))
        return accuracy.by_exchange(
            {**same, "algorithm": algorithm, "density": density, "behind": 0.2, "task": task}
            for algorithm, density, of in ways
            for task in of
        )

    found = []
    for tasks, seeds in ((("text",), 5), (("text", "vit"), 5), (("text",), 1)):
        monkeypatch.setattr(accuracy, "_record", partial(record, tasks, seeds))
        work = {name: Work() for name in ("sparseloco sync_every=5", "powersgd rank=4")}
        found.append(recommend(situation(work=work)))
    one, two, once = found
    assert one.step.prediction.algorithm == "powersgd"
    assert "was measured with text alone (5 seeds)." in one.reason
    assert "was measured with text alone (1 seed)." in once.reason
    assert two.step.prediction.algorithm == "sparseloco"
    assert "optimizer.average()" in two.text


NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
MADE = [pytest.param(name, marks=[NEEDS_MUON] if name == "muon" else []) for name in OPTIMIZERS]
PLANS = [
    pytest.param(optimizer, step.prediction.name, id=f"{optimizer}-{step.prediction.name}", marks=made.marks)
    for optimizer, made in zip(OPTIMIZERS, MADE, strict=True)
    for step in situation(optimizer).predictions()
]


def planned(optimizer, name):
    found = situation(optimizer)
    step = next(step for step in found.predictions() if step.prediction.name == name)
    return Plan(found, recommend(found)._replace(step=step))


def loss_of(model, generator):
    x = torch.randn(20, 60, generator=generator)
    return (model(x) - 2 * x[:, :40]).square().mean()


FOR_DDP = {way.name for way in OF_DDP}


@pytest.mark.parametrize("optimizer", MADE)
def test_a_plan_makes_the_optimizer_that_it_names(optimizer):
    """Where DDP is not used, a sparse exchange is that of updates, with SGD too. One rank has no teams."""
    for name in (case.values[1] for case in PLANS if case.values[0] == optimizer and case.values[1] not in FOR_DDP):
        plan, model = planned(optimizer, name), model_of()
        same, wrapped = plan.apply(model, inner_of(optimizer, model), steps=60, comm=Alone())
        p = plan.recommendation.step.prediction
        sparse = "DistributedOptimizer" if p.algorithm == "dense" else "UpdateOptimizer"
        said = BY_NAME[p.variant].code if p.variant in BY_NAME else sparse
        assert same is model
        assert f"{type(wrapped).__name__}(" in f"{said}("


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("optimizer", "name"), [each for each in PLANS if each.values[1] not in FOR_DDP])
def test_a_plan_does_what_it_says(optimizer, name):
    """Every way that may be advised: it learns, and at the end ranks have the same model."""
    plan = planned(optimizer, name)

    def body(comm):
        generator, made, losses = torch.Generator().manual_seed(comm.rank), model_of(), []
        model, wrapped = plan.apply(made, inner_of(optimizer, made), steps=60, comm=comm)
        assert model is made
        for _ in range(60):
            wrapped.zero_grad()
            loss = loss_of(model, generator)
            loss.backward()
            exchanged(wrapped)
            losses.append(loss.item())
        getattr(wrapped, "finish", lambda: None)()
        refuse_unlike(dict(model.named_parameters()), comm)
        return sum(losses[:5]), sum(losses[-5:])

    for first, last in SimulatedWorld(3).run(body):
        assert last < 0.95 * first


@pytest.mark.parametrize(
    ("name", "betas", "rate"), [("gtopk", (0.5, 0.999), 1e-2), ("diloco sync_every=30", (0.9, 0.999), 5e-3)]
)
def test_settings_are_adapted_as_the_text_says(name, betas, rate):
    model = model_of()
    inner = inner_of("adamw", model)
    planned("adamw", name).apply(model, inner, steps=100)
    [group] = inner.param_groups
    assert (group["betas"], group["lr"]) == (betas, rate)


def test_a_rate_is_adapted_once():
    model, plan = model_of(), planned("adamw", "diloco sync_every=30")
    inner = inner_of("adamw", model)
    plan.apply(model, inner)
    with pytest.raises(ValueError, match="is adapted to diloco sync_every=30 already: give an optimizer that was made"):
        plan.apply(model, inner)
    assert inner.param_groups[0]["lr"] == 5e-3


def test_a_rate_that_a_scheduler_would_set_back_is_not_adapted():
    model, plan = model_of(), planned("adamw", "diloco sync_every=30")
    inner = inner_of("adamw", model)
    torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"takes 0\.5 of the learning rate, .* make its scheduler after apply"):
        plan.apply(model, inner)
    assert inner.param_groups[0]["lr"] == 1e-2
    planned("adamw", "local-sgd sync_every=4").apply(model, inner)  # which leaves the rate as it is


@pytest.mark.parametrize("whose", ["plain", "its own"])
def test_a_state_that_sets_an_adapted_rate_back_is_told_of(whose):
    model, plan = model_of(), planned("adamw", "diloco sync_every=30")
    inner = inner_of("adamw", model)
    states = {"plain": copy.deepcopy(inner.state_dict())}
    _, wrapped = plan.apply(model, inner)
    states["its own"] = copy.deepcopy(wrapped.optimizer.state_dict())
    said = r"has set it back: diloco sync_every=30 takes 0\.5 of that"
    with pytest.warns(UserWarning, match=said) if whose == "plain" else contextlib.nullcontext():
        wrapped.optimizer.load_state_dict(states[whose])
    assert wrapped.param_groups[0]["lr"] == (1e-2 if whose == "plain" else 5e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_momentum_stays_of_the_kind_for_late_gradients_when_a_state_is_loaded(optimizer):
    model, plan = model_of(), planned(optimizer, "eager-majority")
    inner = inner_of(optimizer, model)
    before = copy.deepcopy(inner.state_dict())

    def settings():
        [group] = inner.param_groups
        return {name: group[name] for name in ("betas", "nesterov", "momentum", "lr") if name in group}

    _, eager = plan.apply(model, inner)
    applied = settings()
    assert {name: before["param_groups"][0][name] for name in applied} != applied
    with eager:
        eager.optimizer.load_state_dict(before)
        assert settings() == applied
        inner.param_groups[0]["lr"] = 0.5
        if optimizer == "adamw":
            inner.param_groups[0]["betas"] = (0.8, 0.999)  # of one's own, which a checkpoint keeps
        mine = settings()
        eager.optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
        assert settings() == mine


def test_eager_sgd_steps_the_scheduler_that_it_is_given():
    def body(comm):
        model, plan = model_of(), planned("adamw", "eager-majority")
        inner = inner_of("adamw", model)
        rates = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
        with pytest.raises(ValueError, match=r"eager-majority steps the learning-rate scheduler itself: give it"):
            plan.apply(model, inner, comm=comm)
        with pytest.raises(ValueError, match=r"local-sgd sync_every=4 leaves the scheduler to the training loop"):
            planned("adamw", "local-sgd sync_every=4").apply(model, inner, comm=comm, scheduler=rates)
        _, eager = plan.apply(model, inner, comm=comm, scheduler=rates)
        assert inner.param_groups[0]["betas"] == (0.5, 0.999)
        with eager:
            for _ in range(4):
                eager.zero_grad()
                loss_of(model, torch.Generator().manual_seed(comm.rank)).backward()
                eager.step()
        return eager.param_groups[0]["lr"]

    assert SimulatedWorld(3).run(body) == [1e-2 * 0.5**2] * 3


def test_momentum_is_of_the_kind_for_late_gradients():
    p = [torch.nn.Parameter(torch.ones(3))]
    adam, sgd, plain = torch.optim.Adam(p), torch.optim.SGD(p, momentum=0.9), torch.optim.SGD(p)
    cycle = torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=5)
    for each in (adam, sgd, plain):
        for_late_gradients(each)
    assert [each.param_groups[0]["nesterov"] for each in (sgd, plain)] == [True, False]
    for _ in range(4):
        adam.step()
        cycle.step()
        assert adam.param_groups[0]["betas"] == (0.5, 0.999)


@pytest.mark.parametrize("steps", [-5, 1e4, math.nan, "x", True])
def test_steps_are_checked_before_anything_is_made(steps):
    for name in ("local-sgd sync_every=4", "diloco sync_every=30", "gtopk", "powersgd rank=2", "dense in bf16"):
        model = model_of()
        inner = inner_of("adamw", model)
        with pytest.raises(ValueError, match=f"steps is {steps!r}, expected a whole number of 0 or more, or None"):
            planned("adamw", name).apply(model, inner, steps=steps)
        assert inner.param_groups[0]["betas"] == (0.9, 0.999)


def test_all_ranks_do_what_rank_0_was_recommended():
    names = ["dense-int8", "powersgd rank=4", "gtopk"]

    def body(comm):
        made = model_of()
        _, wrapped = planned("adamw", names[comm.rank]).apply(made, inner_of("adamw", made), comm=comm)
        return repr(wrapped)

    assert all("dense-int8" in said for said in SimulatedWorld(3).run(body))


@pytest.mark.parametrize("name", ["local-sgd sync_every=4", "powersgd rank=2", "gtopk"])
def test_all_ranks_warm_up_in_rank_0s_steps(name):
    """Ranks with more data have more: averages and sums that begin at different steps would be mixed up."""

    def settings(steps):
        def body(comm):
            made = model_of()
            wrapped = planned("adamw", name).apply(made, inner_of("adamw", made), steps=steps[comm.rank], comm=comm)[1]
            return settings_of(wrapped, SimpleNamespace(_comm_hooks=[]))

        return SimulatedWorld(3).run(body)

    with pytest.warns(UserWarning, match="but 60 on rank 0: all ranks warm up as in a training of 60") as found:
        unlike = settings([60, None, 200])
    assert unlike == settings([60] * 3)
    assert sorted(str(each.message).partition(",")[0] for each in found) == ["steps is 1", "steps is 200"]


def test_a_plan_is_for_so_many_ranks():
    def body(comm):
        made = model_of()
        with pytest.raises(ValueError, match="the advice is for 3 ranks, but this is one of 2"):
            planned("adamw", "gtopk").apply(made, inner_of("adamw", made), comm=comm)

    SimulatedWorld(2).run(body)


def test_the_slowest_ranks_steps_count_for_all(costs_nothing):
    def body(comm):
        model = model_of()
        speed = 100 / (1 + comm.rank)
        return thinwire.advise(model, steps_per_second=speed, comm=comm).situation.compute

    assert SimulatedWorld(2).run(body) == [0.02, 0.02]


def test_a_density_of_ones_own_is_kept_to():
    found = situation(chosen=True)
    algorithm = recommend(found).step.prediction.algorithm
    assert algorithm == "dense" or ALGORITHMS[algorithm].selects


WARNS = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # importing PostLocalSGDOptimizer


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield
    gc.collect()  # of DDP modules, which keep the group
    dist.destroy_process_group()
    time.sleep(0.1)  # for a thread of the group that lets a callback go: the last to hold it, it would join itself
    del group


IN_DDP = {"dense", "dense in bf16", "dense-int8", "powersgd rank=2", "powersgd rank=4", *FOR_DDP}


@WARNS
@pytest.mark.slow
@pytest.mark.few(25)
@pytest.mark.parametrize(("optimizer", "name"), [each for each in PLANS if "teams" not in each.values[1]])
def test_in_ddp_its_hook_is_registered_or_the_module_itself_is_asked_for(optimizer, name, one_process):
    plan, model = planned(optimizer, name), model_of()
    inner, ddp = inner_of(optimizer, model), DistributedDataParallel(model)
    if name not in IN_DDP and (optimizer != "sgd" or plan.situation.sends_updates or name in BY_NAME):
        with pytest.raises(ValueError, match="give the module itself"):
            plan.apply(ddp, inner, steps=10)
        return
    same, wrapped = plan.apply(ddp, inner, steps=10)
    assert same is ddp
    assert wrapped is inner or name == "torch-local-sgd sync_every=4"
    assert bool(ddp._comm_hooks) == (name != "dense")
    loss_of(ddp, torch.Generator().manual_seed(0)).backward()
    wrapped.step()


@WARNS
@pytest.mark.few(40)
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "name"), [each for each in PLANS if each.values[1] in BY_NAME])
def test_the_lines_run(optimizer, name, monkeypatch, one_process):
    late = Stragglers.told({10.0: 0.2}) if name.startswith("eager") else None
    found = situation(optimizer, stragglers=late, torch_alpha=0.0 if name in FOR_DDP else None)
    steps = [s for s in found.predictions() if s.prediction.name in ("dense", name)]
    monkeypatch.setattr(Situation, "predictions", lambda self: steps)
    monkeypatch.setattr(
        "thinwire.advice.situation.known", lambda *_, sends, data: accuracy.Known(0, 0, ("a", "b"), 1, (3, 3))
    )
    text, model = recommend(found).text, model_of()
    assert text.startswith(f"Use {name}: ")
    names = NAMES | {"SparseHookState": SparseHookState, "torch": torch, "STEPS": 3}
    names["PostLocalSGDOptimizer"] = PostLocalSGDOptimizer
    inner = inner_of(optimizer, model)
    names |= {"model": model, "inner": inner, "ddp": DistributedDataParallel(model), "optimizer": inner}
    run = 0
    for line in text.splitlines():
        where, _, code = line.partition(": ")
        if where in ("Without DDP", "In DDP"):
            exec(code.replace(OPTIMIZERS[optimizer], "inner"), names)
            run += 1
    assert run == (2 if name in IN_DDP - FOR_DDP else 1)
    assert ("average()" in text) == (name not in IN_DDP and not name.startswith("eager"))
    assert BY_NAME[name].note.replace("MEGABYTES", "1") in text


def settings_of(optimizer, ddp):
    """Everything that an optimizer and its hook were set to, warm-ups step by step; but for the rate and its mark."""
    said = [
        repr(optimizer),
        getattr(optimizer, "_alike", ""),
        repr(getattr(getattr(optimizer, "rule", None), "outer", "")),
    ]
    for one in (optimizer, getattr(optimizer, "averager", None), *(state for _, state in ddp._comm_hooks)):
        exchange, every = getattr(one, "_exchange", None), getattr(one, "sync_every", None)
        numbers = {name: own for name, own in getattr(one, "__dict__", {}).items() if isinstance(own, int | float)}
        numbers.pop("_sent_before", None)  # bytes, no setting
        said += [exchange and exchange.settings, list(map(every, range(60))) if callable(every) else every, numbers]
    return [
        re.sub(r"lr: \S+|    rate_adapted_to: .+\n|<function .*? at 0x\w+>| at 0x\w+|options=(None|{}), ", "", str(one))
        for one in said
    ]


@WARNS
@pytest.mark.few(40)
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "name"), [each for each in PLANS if "teams" not in each.values[1] != "dense"])
def test_the_lines_do_what_apply_does(optimizer, name, one_process):
    """Every way that may be advised, of a training of 60 steps."""
    names = NAMES | {one.__name__: one for one in (SparseHookState, UpdateOptimizer, PostLocalSGDOptimizer)}
    inner_code = re.escape(OPTIMIZERS[optimizer]).replace(r"\.\.\.", "[^)]*")
    for where in ("In DDP: ", "Without DDP: "):
        plan = planned(optimizer, name)
        plan = replace(plan, situation=replace(plan.situation, plain=where != "In DDP: "))
        lines = _use(plan.situation, plan.recommendation.step, 1.0)
        names |= {"torch": torch, "STEPS": 6 if "the first 10% of yours" in "".join(lines) else 60}
        code = [re.sub(inner_code, "inner", line.partition(", which")[0]) for line in lines if line.startswith(where)]
        assert code or where == "In DDP: " or name in FOR_DDP
        for line in code:
            found = []
            for printed in (True, False):
                model = model_of()
                inner, ddp = inner_of(optimizer, model), DistributedDataParallel(model, bucket_cap_mb=1)
                made = {"model": model, "inner": inner, "ddp": ddp, "optimizer": inner}
                if printed:
                    if "Late gradients act like momentum: take" in "".join(lines):
                        for_late_gradients(inner)
                    exec(line.removeprefix(where), names, made)
                else:
                    made["optimizer"] = plan.apply(model if plan.situation.plain else ddp, inner, steps=60)[1]
                found.append(settings_of(made["optimizer"], ddp))
            assert found[0] == found[1]


@pytest.mark.parametrize("way", OF_DDP, ids=lambda way: way.name)
def test_hooks_ask_for_ddp(way):
    model = model_of()
    with pytest.raises(ValueError, match=f"{way.name} is a hook of DDP: give DistributedDataParallel"):
        planned("sgd", way.name).apply(model, inner_of("sgd", model), steps=10)


LEARNS = accuracy.Known(0, 0, ("a", "b"), 1, (3, 3))


@pytest.mark.parametrize("in_ddp", [False, True])
def test_a_model_that_is_not_in_ddp_is_advised_no_hook_of_it(in_ddp, monkeypatch, costs_nothing, one_process):
    """And what is advised can be applied, to as large a model over gloo."""
    known = lambda optimizer, way, *_, sends, data: LEARNS if way in of else None  # noqa: E731
    monkeypatch.setattr("thinwire.advice.situation.known", known)
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda shapes, device: {name: Work() for name in of})
    of, model = ("torch-powersgd rank=2", "dense-int8"), torch.nn.Linear(600, 500)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    given = DistributedDataParallel(model, bucket_cap_mb=2) if in_ddp else model
    plan = thinwire.advise(given, steps_per_second=50, optimizer=inner, link="100mbit", ranks=8, overlap=False)
    found = plan.recommendation
    assert (found.step.prediction.algorithm == "torch-powersgd") == in_ddp
    passed = "passed over: torch-powersgd rank=2" in found.reason
    assert passed != in_ddp
    assert ("it is a hook of DDP, and the model is not in DDP" in found.text) != in_ddp
    assert ("DistributedDataParallel(model, bucket_cap_mb=2)" in found.text) == in_ddp
    plan.apply(given, inner, steps=100)


@pytest.mark.parametrize("overlap", [None, True, False])
def test_gradients_travel_during_backward_where_that_was_reckoned_with(overlap, monkeypatch, costs_nothing):
    known = lambda optimizer, way, *_, sends, data: LEARNS if way == "dense-int8" else None  # noqa: E731
    monkeypatch.setattr("thinwire.advice.situation.known", known)
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda *_: {"dense-int8": Work()})
    model = torch.nn.Linear(600, 500)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = thinwire.advise(model, steps_per_second=50, optimizer=inner, link="100mbit", ranks=8, overlap=overlap)
    assert plan.recommendation.step.prediction.name == "dense-int8"
    assert (plan.situation.hidden > 0) == bool(overlap)
    assert ("overlap=True" in plan.recommendation.text) == bool(overlap)
    assert plan.apply(model, inner)[1].overlap == bool(overlap)


@pytest.mark.parametrize("name", ["dense-int8", "powersgd rank=2", "powersgd rank=4"])
def test_compressors_of_whole_gradients_are_hooks_of_ddp(name, one_process):
    model = torch.nn.Linear(60, 50)
    ddp, inner = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    assert BY_NAME[name].in_ddp(ddp, inner, 30) is inner
    assert f"algorithm='{name.split()[0]}'" in str(ddp._comm_hooks[0][1])


def test_torchs_bf16_hook_rounds_and_is_taken_over_gloo(one_process):
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 50)
    plain, rounded = copy.deepcopy(model), DistributedDataParallel(model)
    BY_NAME["torch-bf16"].in_ddp(rounded, torch.optim.SGD(model.parameters(), lr=0.1), 10)
    assert rounded._comm_hooks[0][1] is rounded.process_group  # of None torch would make its group of all ranks
    x = torch.randn(7, 60)
    for each in (plain, rounded):
        each(x).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(q.grad, p.grad.bfloat16().float())
        assert not torch.equal(q.grad, p.grad)


@pytest.mark.parametrize(("device", "messages"), [("cpu", 28), ("cuda", 6)])
def test_a_sum_by_torch_costs_what_it_takes_or_its_messages(device, messages):
    """Also plain DDP's, unless the model is not in DDP."""
    for torch_alpha, alpha in ((None, messages * LINK.alpha), (0.01, 0.28)):
        found = situation("sgd", link=LINK, ranks=8, device=device, torch_alpha=torch_alpha)
        predicted = {s.prediction.name: s.prediction for s in found.predictions()}
        assert predicted["torch-powersgd rank=2"].latency == pytest.approx(3 * alpha)
        assert predicted["dense"].latency == predicted["torch-bf16"].latency == pytest.approx(alpha)
        assert predicted["dense"].transfer == pytest.approx(2 * predicted["torch-bf16"].transfer)
        ours = {s.prediction.name: s.prediction for s in replace(found, plain=True).predictions()}
        assert ours["dense"].latency == predicted["dense in bf16"].latency == pytest.approx(6 * LINK.alpha)


def test_a_sum_by_torch_is_measured_where_it_has_a_group_of_all_ranks(one_process, monkeypatch):
    assert measure_torch_alpha(Alone()) is None
    assert SimulatedWorld(2).run(measure_torch_alpha) == [None, None]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda short: None)
    monkeypatch.setattr("sparse_collectives.prediction.seconds_of", lambda call, comm, device: call() or 0.04)
    assert SimulatedWorld(2).run(measure_torch_alpha) == [pytest.approx(0.01)] * 2
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    assert SimulatedWorld(2).run(measure_torch_alpha) == [None, None]


@pytest.mark.parametrize("plain", [False, True])
def test_of_sums_in_bf16_torchs_own_is_advised_if_as_fast_and_in_ddp(plain):
    few = {"link": Link(1e-3, 1e-6), "handling": {}, "work": {"torch-bf16": Work()}, "plain": plain}
    for torch_sum, rule in ((0.006, "fastest"), (0.009, "as fast"), (0.011, "")):  # a step by our sum takes 41 ms
        found = recommend(situation("adamw", ranks=8, torch_alpha=torch_sum / 28, **few))
        torchs = bool(rule) and not plain
        assert found.step.prediction.name == ("torch-bf16" if torchs else "dense in bf16")
        assert ("and of these torch's own" in found.reason) == (torchs and rule == "as fast")
        assert ("bf16_compress_hook(state, bucket)" in found.text) == torchs


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_torchs_hook_reduces_the_elements_that_are_told(rank, one_process):
    """As its own state counts them, for matrices, vectors, and filters that are too small to be compressed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 20, 5), torch.nn.Flatten(), torch.nn.Linear(20 * 16, 7))
    ddp = DistributedDataParallel(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    BY_NAME[f"torch-powersgd rank={rank}"].in_ddp(ddp, inner, 0)
    state, counts = ddp._comm_hooks[0][1], []
    for _ in range(4):
        ddp(torch.randn(2, 3, 8, 8)).square().mean().backward()
        counts.append(state.total_numel_after_compression)
    told = [BY_NAME[f"torch-powersgd rank={rank}"].sent(me, 2, [p.shape for p in model.parameters()]) for me in (0, 1)]
    assert {traffic.nbytes for traffic in told} == {4 * (counts[-1] - counts[-2])}


def test_torchs_powersgd_is_refused_where_its_sums_may_part(one_process):
    model = torch.nn.Linear(600, 500)
    way = BY_NAME["torch-powersgd rank=2"]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for settings, most in (({}, 1), ({"bucket_cap_mb": 0.5}, 0.5)):
        said = rf"1.1 MB of gradients are several buckets of {most} MB.*, bucket_cap_mb=2\)"
        with pytest.raises(ValueError, match=said):
            way.in_ddp(DistributedDataParallel(model, **settings), inner, 10)
    way.in_ddp(DistributedDataParallel(model, bucket_cap_mb=2), inner, 10)


def test_torchs_local_steps_begin_with_ddps_gradients():
    """In `hidden` seconds of backward, and not with an average of models after every step, nor the work of our sum."""
    large = {"shapes": assumed_shapes(25_000_000), "numel": 25_000_000}
    made = situation(hidden=0.005, **large)
    made = replace(made, work={**made.work, "dense": Work(1e-9)})
    steps = {s.prediction.name: s for s in made.predictions()}
    torchs, ours, dense = (steps[name] for name in ("torch-local-sgd sync_every=4", "local-sgd sync_every=4", "dense"))
    assert torchs.seconds == pytest.approx(ours.seconds, rel=1e-3)
    assert torchs.mean == pytest.approx(0.1 * dense.seconds + 0.9 * torchs.seconds)


@pytest.mark.slow
def test_advise_in_python():
    plan = thinwire.advise(model_of(), steps_per_second=100, optimizer="adamw", link="wan", ranks=8, density=0.01)
    assert plan.situation.ranks == 8
    assert list(plan.situation.shapes) == [p.shape for p in model_of().parameters()]
    assert str(plan) == as_text(plan.situation)
    assert plan.recommendation == recommend(plan.situation)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "lion"}, "optimizer is 'lion', expected sgd, adam, adamw, muon"),
        ({"optimizer": torch.optim.Rprop([torch.zeros(2, requires_grad=True)])}, "optimizer is Rprop, expected"),
        (
            {"optimizer": torch.optim.Adafactor([torch.zeros(2, requires_grad=True)])},
            "optimizer is Adafactor, .* or an SGD, Adam or AdamW of torch, or a replicas.MuonAdamW: how others learn",
        ),
        ({"optimizer": torch.optim.AdamW}, "optimizer is <class 'torch.optim.adamw.AdamW'>, expected"),
        ({"steps_per_second": 0}, "steps_per_second is 0, expected a number above 0"),
        ({"steps_per_second": float("nan")}, "steps_per_second is nan"),
        ({"steps_per_second": float("inf")}, "steps_per_second is inf, expected a number above 0 and finite"),
        ({"steps_per_second": 1e-320}, "steps_per_second is 1e-320, expected a number above 0 and finite"),
        ({"link": "10mbit"}, r"link is '10mbit', expected a Link\(alpha, beta\) of seconds per message and per byte"),
        ({"ranks": None}, "ranks goes with link"),
        ({"link": None}, "ranks goes with link"),
        ({"ranks": 8.0}, "ranks is 8.0, expected a whole number"),
        ({"model": model_of().double()}, "0.weight is float64, but predictions are of float32"),
        ({"optimizer": "muon", "density": 0.1}, "density is of a selection, and nothing is selected for muon"),
        ({"ranks": 1}, "ranks is 1, expected a whole number of 2 to"),
        ({"density": 2.0}, "density is 2.0, expected a number above 0"),
        ({"density": [0.5, 1]}, "density is 1, expected a number above 0 and below 1, at which nothing is selected"),
        ({"density": []}, r"density is \[\], expected a number, or several: leave it out"),
        ({"density": [0.1, 0.0]}, "density is 0.0, expected a number above 0"),
        ({"model": torch.nn.ReLU()}, "no parameter of the model requires a gradient"),
        ({"model": torch.nn.LazyLinear(3)}, "weight of a lazy layer has no shape yet: run one batch through"),
        ({"model": torch.nn.Linear(3, 1, device="meta")}, "on the meta device, where nothing can be measured"),
        ({"ranks": 4097}, "ranks is 4097, expected a whole number of 2 to 4,096"),
    ],
)
def test_arguments_that_make_no_sense(changes, said):
    given = {"model": model_of(), "steps_per_second": 4, "optimizer": "sgd", "link": "wan", "ranks": 8}
    with pytest.raises(ValueError, match=said):
        thinwire.advise(**given | changes)


@pytest.mark.parametrize("overlap", ["no", 2, []])
def test_an_overlap_that_is_no_truth_is_told(overlap):
    with pytest.raises(TypeError, match=r"overlap is .+ \((str|int|list)\), expected True, False, or None"):
        thinwire.advise(model_of(), steps_per_second=4, link="wan", ranks=8, overlap=overlap)


@pytest.mark.parametrize("changes", [{"steps_per_second": "4"}, {"density": "0.01"}, {"density": [0.1, True]}])
def test_arguments_that_are_no_numbers(changes):
    with pytest.raises(TypeError, match=r"(steps_per_second is '4'|density is ('0.01'|True)) .+, expected a number"):
        thinwire.advise(**{"model": model_of(), "steps_per_second": 4, "link": "wan", "ranks": 8} | changes)


def test_what_is_no_module_is_told():
    with pytest.raises(TypeError, match=r"model is \[1\], expected a torch.nn.Module"):
        thinwire.advise([1], steps_per_second=4, link="wan", ranks=8)


def refused(model, said):
    """By advise, and by the plan of another model."""
    with pytest.raises(ValueError, match=said):
        thinwire.advise(model, steps_per_second=4, link="wan", ranks=8)
    with pytest.raises(ValueError, match=said):
        planned("sgd", "gtopk").apply(model, torch.optim.SGD(model.parameters(), lr=0.1))


@WARNS
def test_ddp_is_known_when_compiled_and_refused_inside_another_module(one_process):
    model = model_of()
    ddp = DistributedDataParallel(model)
    refused(torch.nn.Sequential(ddp), "holds DistributedDataParallel, as 0: give that module")
    compiled, inner = torch.compile(ddp, backend="eager"), inner_of("sgd", model)
    assert planned("sgd", "dense-int8").apply(compiled, inner, steps=10) == (compiled, inner)
    assert ddp._comm_hooks


@pytest.mark.filterwarnings("ignore")  # of torch, about FSDP
@pytest.mark.parametrize("older", [False, True])
def test_what_fsdp_has_sharded_is_refused(older, one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, mesh = model_of(), init_device_mesh("cpu", (1,))
    sharded = FullyShardedDataParallel(model, device_id=CPU) if older else fully_shard(model, mesh=mesh) or model
    refused(torch.nn.Sequential(sharded), r"in FSDP, .* data_parallel.sparse_hsdp")


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind, costs_nothing):
    """Unless it is frozen, and so gives none."""
    model = torch.nn.Sequential(kind(9, 4, sparse=True), torch.nn.Linear(4, 4))
    refused(model, "0 gives sparse gradients, .* take sparse=False")
    model[0].requires_grad_(False)
    assert thinwire.advise(model, steps_per_second=4, link="wan", ranks=8).recommendation.text


def test_parameters_without_a_dimension_are_predicted():
    """But not with torch's PowerSGD, which fails at them."""
    shapes = (*situation().shapes, torch.Size())
    told = {s.prediction.algorithm for s in situation("sgd", shapes=shapes, tiny=1).predictions()}
    assert {"powersgd", "torch-bf16"} <= told
    assert "torch-powersgd" not in told


def test_one_rank_without_a_link_is_told():
    with pytest.raises(thinwire.NoAdvice, match="one rank: there is no network to measure"):
        thinwire.advise(model_of(), steps_per_second=4, optimizer="sgd")


def test_another_optimizer_than_was_asked_about_is_refused():
    model = model_of()
    with pytest.raises(ValueError, match="the advice is for adamw, but this is SGD"):
        planned("adamw", "gtopk").apply(model, inner_of("sgd", model), steps=10)


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_is_known_by_its_class(name):
    assert next(n for kind, n in KINDS if isinstance(inner_of(name, model_of()), kind)) == name


def test_commands(capsys):
    assert main([]) == 0
    assert "thinwire advise" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {thinwire.__version__}\n"
    assert main(["teach"]) == 2
    assert "'teach' given, expected one of advise, doctor, slow-link" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["slow-link", "check", "--ranks", "3"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_a_warm_up_goes_in_int8_on_a_wire_of_int8():
    """A tenth of the steps are those of dense-int8, the others the selection's."""
    merging = dict.fromkeys([*ALGORITHMS, "gtopk in int8-packed"], 1e-8)
    found = situation(handling={0.01: Handling(1e-9, {}, merging)})
    told = {(step.prediction.algorithm, step.prediction.wire): step for step in found.predictions()}
    int8 = BY_NAME["dense-int8"].predict(found.shapes, size=found.ranks, link=found.link, work=found.work["dense-int8"])
    whole = step_seconds(int8, compute=found.compute, backward=0.0)
    one = told["gtopk", "int8-packed"]
    assert one.mean == pytest.approx(0.1 * whole + 0.9 * one.seconds)
    assert whole < 0.5 * told["dense", "fp32"].seconds
