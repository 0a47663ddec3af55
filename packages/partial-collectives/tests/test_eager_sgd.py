"""Eager SGD in simulated worlds: the same parameters everywhere, after as many rounds, however late ranks are."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, barrier
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import EagerSGD, injected_delays, until_deadline
from replicas import STATE_KEY, refuse_unlike

pytestmark = pytest.mark.quick


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2).double())
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def wrapped(model, comm, **settings):
    """Two dtypes, so two buckets; momentum, and a rate that falls with every round."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.97)
    return EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=scheduler, **settings)


def step(model, optimizer, rank, number, **settings):
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * rank + number))
    optimizer.zero_grad()
    model[2](model[1](model[0](inputs)).double()).square().mean().backward()
    optimizer.step(**settings)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1e-4, 1e-3, 7e-3])), min_size=1, max_size=4),
    st.one_of(st.sampled_from(["solo", "majority"]), st.just(1)),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_parameters_are_the_same_on_all_ranks(ranks, quorum, max_staleness, order):
    def body(comm):
        model, (steps, seconds) = network(seed=comm.rank), ranks[comm.rank]
        with wrapped(model, comm, quorum=quorum, max_staleness=max_staleness) as optimizer:
            for number in range(steps):
                comm.elapse(seconds)
                step(model, optimizer, comm.rank, number)
            optimizer.synchronize()
            refuse_unlike(dict(model.named_parameters()), comm)
            for number in range(steps // 2):
                comm.elapse(seconds)
                step(model, optimizer, comm.rank, number)
        refuse_unlike(dict(model.named_parameters()), comm)
        rate = optimizer.param_groups[0]["lr"]
        assert optimizer.gradients == sum(steps + steps // 2 for steps, _ in ranks)
        assert rate == pytest.approx(0.05 * 0.97 ** (optimizer.gradients // comm.size))
        return optimizer.applied, rate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler that is stepped in no round at all
        outcomes = SimulatedWorld(len(ranks), seed=order).run(body)
    assert len(set(outcomes)) == 1


def test_with_all_ranks_it_is_synchronous_sgd():
    def body(comm):
        model, alone = network(), network()
        inner = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.97)
        with wrapped(model, comm, quorum=comm.size) as optimizer:
            for number in range(5):
                comm.elapse(1e-3 * comm.rank)
                step(model, optimizer, comm.rank, number)
        for number in range(5):
            inner.zero_grad()
            for rank in range(comm.size):
                inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * rank + number))
                (alone[2](alone[1](alone[0](inputs)).double()).square().mean() / comm.size).backward()
            inner.step()
            scheduler.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)

    SimulatedWorld(3).run(body)


def test_one_rank_is_the_wrapped_optimizer():
    def body(comm):
        model, alone = network(), network()
        inner = torch.optim.Adam(alone.parameters(), lr=0.05)
        with EagerSGD(torch.optim.Adam(model.parameters(), lr=0.05), model.named_parameters(), comm=comm) as optimizer:
            for number in range(4):
                step(model, optimizer, 0, number)
                step(alone, inner, 0, number)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    SimulatedWorld(1).run(body)


def test_weighted_means():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1))
        with EagerSGD(torch.optim.SGD([p], lr=1.0), [("p", p)], comm=comm, quorum=2, weighted=True) as optimizer:
            p.grad = torch.tensor([4.0 * comm.rank])
            optimizer.step(weight=1 + 2 * comm.rank)
        assert p.item() == -3.0  # (1 · 0 + 3 · 4) / 4

    SimulatedWorld(2).run(body)


def first_part(comm):
    """Four steps, a meeting, and what a checkpoint holds, as bytes."""
    model = network()
    optimizer = wrapped(model, comm, quorum="solo")
    steps(model, optimizer, range(4))
    optimizer.synchronize()
    barrier(comm)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    barrier(comm)
    optimizer.close()
    return file.getvalue()


def second_part(comm, saved):
    """Goes on from there for three steps."""
    model = network(seed=7)
    with wrapped(model, comm, quorum="solo") as optimizer:
        both = torch.load(io.BytesIO(saved[comm.rank]), weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        comm.elapse(1.0 - comm.clock())
        steps(model, optimizer, range(4, 7))
    return [p.tolist() for p in model.parameters()], optimizer.applied


def steps(model, optimizer, numbers):
    for number in numbers:
        optimizer.comm.elapse(1.07e-3 * (1 + optimizer.comm.rank))  # no multiple of α, at which ranks would tie
        step(model, optimizer, optimizer.comm.rank, number)


def test_a_run_goes_on_as_if_it_had_not_stopped():
    """From a meeting on, where arrivals take the same times, the same bits."""

    def whole(comm):
        model = network()
        with wrapped(model, comm, quorum="solo") as optimizer:
            steps(model, optimizer, range(4))
            optimizer.synchronize()
            comm.elapse(1.0 - comm.clock())  # all at the same time, as there
            steps(model, optimizer, range(4, 7))
        return [p.tolist() for p in model.parameters()], optimizer.applied

    saved = SimulatedWorld(3).run(first_part)
    assert SimulatedWorld(3).run(lambda comm: second_part(comm, saved)) == SimulatedWorld(3).run(whole)


def test_other_ranks_go_on_with_the_rate_and_the_scheduler_as_the_error_says():
    def before(comm):
        model = network()
        with wrapped(model, comm) as optimizer:
            steps(model, optimizer, range(4))
            optimizer.finish()
            return copy.deepcopy(optimizer.state_dict())

    def after(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.97)
        with pytest.raises(ValueError, match=r"of 3 ranks, .*\['distributed'\]\['scheduler'\] into the scheduler"):
            wrapped(network(), comm).load_state_dict(state)
        inner.load_state_dict(copy.deepcopy(state))  # torch goes on in the given tensors
        scheduler.load_state_dict(state[STATE_KEY]["scheduler"])
        with EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=scheduler) as optimizer:
            steps(model, optimizer, range(4))
        assert scheduler.last_epoch == 4 + 4
        assert inner.param_groups[0]["lr"] == pytest.approx(0.05 * 0.97**scheduler.last_epoch)
        return [p.tolist() for p in model.parameters()]

    state = SimulatedWorld(3).run(before)[0]
    first, *others = SimulatedWorld(2).run(after)
    assert all(other == first for other in others)


def test_what_is_not_finite_is_named_on_all_ranks():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1))
        try:
            with EagerSGD(torch.optim.SGD([p], lr=1.0), [("p", p)], comm=comm, quorum="solo") as optimizer:
                for number in range(3):
                    comm.elapse(1e-3 * comm.rank)
                    p.grad = torch.tensor([float("inf") if (comm.rank, number) == (1, 1) else 1.0])
                    optimizer.step()
        except CollectiveError as error:
            return str(error)

    said = SimulatedWorld(3).run(body)
    assert any(one.startswith("gradients of ranks [1] are not finite in round") for one in said)
    assert all("gradients of ranks [1] are not finite in round" in one for one in said), said


def test_bad_input():
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
            EagerSGD(model, model.named_parameters(), comm=comm)
        other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters(), lr=1.0), 1)
        with pytest.raises(ValueError, match="of another optimizer"):
            EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=other)
        optimizer = EagerSGD(inner, model.named_parameters(), comm=comm)
        with pytest.raises(RuntimeError, match="cannot be added"):
            optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        with pytest.raises(TypeError, match="cannot be copied"):
            optimizer.__reduce_ex__(2)
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match="expected one of an EagerSGD"):
            optimizer.load_state_dict(inner.state_dict())
        with pytest.raises(ValueError, match="every rank saves and loads its own"):
            optimizer.load_state_dict({**state, STATE_KEY: {**state[STATE_KEY], "rank": 1 - comm.rank}})
        optimizer.finish()
        with pytest.raises(RuntimeError, match="after finish"):
            optimizer.step()
        optimizer.close()

    SimulatedWorld(2).run(body)


def test_an_optimizer_that_asks_for_several_gradients_is_refused():
    model = network()
    with pytest.raises(TypeError, match="LBFGS asks for gradients several times in a step"):
        EagerSGD(torch.optim.LBFGS(model.parameters()), model.named_parameters())


def test_a_sparse_gradient_is_refused_by_name_before_anything_is_given():
    def body(comm):
        model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with EagerSGD(inner, model.named_parameters(), comm=comm) as optimizer:
            model(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(TypeError, match=r"gradient of '0\.weight' has layout .*embeddings need sparse=False"):
                optimizer.step()
            model[0].weight.grad = model[0].weight.grad.to_dense()
            optimizer.step()

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("calls", [["finish"], ["finish", "close"], ["close"], ["close", "close"]])
def test_a_context_skips_what_is_done_already(calls):
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with EagerSGD(inner, model.named_parameters(), comm=comm) as optimizer:
            step(model, optimizer, comm.rank, 0)
            for call in calls:
                getattr(optimizer, call)()
        with pytest.raises(RuntimeError, match=r"after (finish\(\): this rank|close\(\): make a new one)"):
            step(model, optimizer, comm.rank, 1)

    SimulatedWorld(2).run(body)


def normalised(rank):
    """A model with statistics of its own on every rank: means and variances, a count, a mask."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[2].register_buffer("mask", torch.tensor([True, rank == 0]))
    return model


def train_normalised(comm, buffers, steps):
    """steps: of each rank, between meetings. Returns its buffers before and after each meeting, and at the end."""
    model = normalised(comm.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    with EagerSGD(inner, model.named_parameters(), comm=comm, model=model, buffers=buffers) as optimizer:
        for place, part in enumerate(steps[comm.rank], start=1):
            for number in range(part):
                comm.elapse(1e-3 * (1 + comm.rank))
                optimizer.zero_grad()
                inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * comm.rank + number))
                model[2](model[1](model[0](inputs))).square().mean().backward()
                optimizer.step()
            if place < len(steps[comm.rank]):
                own = [buffer.clone() for buffer in model.buffers()]
                optimizer.synchronize()
                seen.append((own, [buffer.clone() for buffer in model.buffers()]))
    return seen, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("buffers", ["average", "broadcast"])
def test_buffers_are_shared_where_ranks_meet_also_with_those_that_have_ended(buffers):
    steps = [[1, 2], [3], [1, 2, 4]]
    outcomes = SimulatedWorld(3).run(lambda comm: train_normalised(comm, buffers, steps))
    for number in (0, 1):
        met = [seen[number] for seen, _ in outcomes if len(seen) > number]
        for place in range(4):
            values = [after[place] for _, after in met]
            assert all(torch.equal(value, values[0]) for value in values)
    ends = [end for _, end in outcomes]
    for end in ends:
        assert all(torch.equal(one, other) for one, other in zip(end, ends[0], strict=True))
    assert int(ends[0][2]) == 3  # steps of rank 0
    assert ends[0][3].tolist() == [True, True]


def test_means_of_buffers_are_those_of_all_ranks():
    outcomes = SimulatedWorld(2).run(lambda comm: train_normalised(comm, "average", [[2, 1], [1, 1]]))
    befores, afters = zip(*(seen[0] for seen, _ in outcomes), strict=True)
    for place in (0, 1):
        torch.testing.assert_close(afters[0][place], (befores[0][place] + befores[1][place]) / 2)


def test_buffers_stay_each_ranks_own_unless_it_is_said_otherwise():
    outcomes = SimulatedWorld(2).run(lambda comm: train_normalised(comm, "keep", [[2, 1], [1, 1]]))
    assert not torch.equal(outcomes[0][1][0], outcomes[1][1][0])


def test_buffers_take_the_model():
    def body(comm):
        model = normalised(comm.rank)
        with pytest.raises(ValueError, match="takes the model whose buffers they are"):
            EagerSGD(torch.optim.SGD(model.parameters()), model.named_parameters(), comm=comm, buffers="average")
        with pytest.raises(ValueError, match="expected 'keep', 'average' or 'broadcast'"):
            EagerSGD(torch.optim.SGD(model.parameters()), model.named_parameters(), comm=comm, buffers="mean")
        shared = {"comm": comm, "model": model, "buffers": "average", "on_death": "shrink"}
        with pytest.raises(ValueError, match="takes all ranks, but on_death='shrink' goes on without some"):
            EagerSGD(torch.optim.SGD(model.parameters()), model.named_parameters(), **shared)

    SimulatedWorld(2).run(body)


def rate_by_hand(comm, change, quorum="solo"):
    """Every rank changes a setting of its optimizer as often as it takes steps."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with EagerSGD(inner, model.named_parameters(), comm=comm, quorum=quorum) as optimizer:
        scheduler = change(optimizer)
        for number in range(4):
            comm.elapse(1e-3 * (1 + comm.rank))
            step(model, optimizer, comm.rank, number)
            scheduler()
    refuse_unlike(dict(model.named_parameters()), comm)


def by_step(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step


def by_hand(optimizer):
    return lambda: optimizer.param_groups[0].update(momentum=optimizer.param_groups[0]["momentum"] * 0.9)


@pytest.mark.parametrize("change", [by_step, by_hand])
def test_a_rate_that_goes_by_a_ranks_own_steps_is_an_error(change):
    with pytest.raises(ValueError, match=r"changed between two rounds: (lr 0.05|momentum 0.9) -> .*give scheduler="):
        SimulatedWorld(3).run(lambda comm: rate_by_hand(comm, change))


def test_where_all_have_met_a_rate_may_be_set_by_hand():
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with EagerSGD(inner, model.named_parameters(), comm=comm, quorum="solo") as optimizer:
            for number in range(6):
                comm.elapse(1e-3 * (1 + comm.rank))
                step(model, optimizer, comm.rank, number)
                if number % 2:
                    optimizer.synchronize()
                    optimizer.param_groups[0]["lr"] *= 0.5
        refuse_unlike(dict(model.named_parameters()), comm)
        return optimizer.param_groups[0]["lr"]

    assert SimulatedWorld(3).run(body) == [0.05 / 8] * 3


def other_rates(comm, when, buffers, last):
    """Rank 1 changes its rate where any rank may, before the first step or after a meeting; says what it is told."""
    model, others = network(), {"lr": 0.5, "weight_decay": 0.1}
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    try:
        with EagerSGD(inner, model.named_parameters(), comm=comm, model=normalised(0), buffers=buffers) as optimizer:
            for number in range(4):
                if number == when and comm.rank == 1:
                    optimizer.param_groups[0].update(others)
                if number < last or comm.rank == 1:
                    comm.elapse(1e-3 * (1 + comm.rank))
                    step(model, optimizer, comm.rank, number)
                    optimizer.synchronize()
    except CollectiveError as error:
        return str(error)


@pytest.mark.parametrize("buffers", ["keep", "average"])
@pytest.mark.parametrize(("when", "last"), [(0, 4), (2, 4), (3, 3), (3, 2)])  # 3, 2: the others have finished
def test_settings_that_differ_between_ranks_after_a_meeting_are_an_error_on_all(when, last, buffers):
    said = SimulatedWorld(3).run(lambda comm: other_rates(comm, when, buffers, last))
    assert len(set(said)) == 1
    assert "rank 0 has changed nothing, rank 1 has changed lr 0.05 -> 0.5 in parameter group 0, weight_decay" in said[0]


@pytest.mark.parametrize("buffers", ["keep", "average"])
def test_a_rate_that_is_set_while_a_rank_has_finished_is_an_error_as_that_keeps_its_own(buffers):
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with EagerSGD(inner, model.named_parameters(), comm=comm, model=normalised(0), buffers=buffers) as optimizer:
            for number in range(1 if comm.rank == 1 else 4):
                comm.elapse(1e-3)
                step(model, optimizer, comm.rank, number)
                optimizer.synchronize()
                if number == 2:  # rank 1 has finished for two meetings
                    optimizer.param_groups[0]["lr"] = 0.5

    with pytest.raises(CollectiveError, match=r"rank 0 has changed lr 0.05 -> 0.5 .*, rank 1 has changed nothing"):
        SimulatedWorld(3).run(body)


@pytest.mark.parametrize("meetings", [1, 2])
def test_a_rate_that_all_set_alike_is_none_that_parts_whoever_finishes(meetings):
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with EagerSGD(inner, model.named_parameters(), comm=comm) as optimizer:
            step(model, optimizer, comm.rank, 0)
            optimizer.synchronize()
            optimizer.param_groups[0].update(lr=0.5, kept=object())  # what is no plain value has a text of each rank's
            if comm.rank != 1:
                for _ in range(meetings - 1):
                    optimizer.synchronize()
                step(model, optimizer, comm.rank, 1)
        refuse_unlike(dict(model.named_parameters()), comm)
        return True

    assert all(SimulatedWorld(3).run(body))


def test_of_many_groups_the_error_names_those_that_differ():
    def body(comm):
        model = network()
        inner = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model.parameters()], lr=0.1)
        with EagerSGD(inner, model.named_parameters(), comm=comm) as optimizer:
            for number, group in enumerate(inner.param_groups):
                group["lr"] = 0.2 if number or comm.rank != 1 else 0.3
            step(model, optimizer, comm.rank, 0)

    with pytest.raises(CollectiveError, match=r"last met: rank 0 has changed lr 0.1 -> 0.2 in parameter group 0, rank"):
        SimulatedWorld(3).run(body)


def test_a_scheduler_that_wants_a_metric_is_refused():
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(inner)
        with pytest.raises(TypeError, match=r"takes a metric.*step it yourself after synchronize\(\)"):
            EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=plateau)
        wrong = {"scheduler": torch.optim.lr_scheduler.StepLR, "weighted": "yes", "model": 3}
        for name, value in wrong.items():
            with pytest.raises(TypeError, match=f"{name} is .*, expected "):
                EagerSGD(inner, model.named_parameters(), comm=comm, **{name: value})

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    ("dtype", "gradients"), [(torch.float16, [4e4, 4e4]), (torch.bfloat16, [256.0, 1.0, 1.0, 1.0])]
)
def test_16_bits_are_summed_in_32(dtype, gradients):
    """Halves that are finite may add to inf, and small ones beside a large one would be rounded away."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        got = []
        inner = torch.optim.SGD([p], lr=0.0)
        inner.register_step_pre_hook(lambda *_: got.append(p.grad[0].item()))
        with EagerSGD(inner, [("p", p)], comm=comm, quorum=comm.size) as optimizer:
            p.grad = torch.full_like(p, gradients[comm.rank])
            optimizer.step()
        return got

    mean = torch.tensor(sum(gradients) / len(gradients)).to(dtype).item()
    assert SimulatedWorld(len(gradients)).run(body) == [[mean]] * len(gradients)


def test_gradients_and_rounds_that_nobody_has_applied_yet_come_back():
    """Saved where no rank is in a step: one has a gradient that came too late for any round, one has rounds to apply.
    Going on gives the bits of a run that went on at once."""

    def unmet(comm):
        model = network()
        optimizer = wrapped(model, comm, quorum="solo")
        for number in range(4 if comm.rank == 0 else 1):
            comm.elapse(0.05 if comm.rank == 1 else 1e-3)
            step(model, optimizer, comm.rank, number)
        comm.elapse(1.0)
        return model, optimizer

    def ends(model, optimizer):
        optimizer.finish()
        optimizer.close()
        return [p.tolist() for p in model.parameters()], optimizer.applied

    def stops(comm):
        model, optimizer = unmet(comm)
        state, file = optimizer.state_dict(), io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": state}, file)
        barrier(comm)  # closing goes on with rounds
        optimizer.close()
        rounds = state[STATE_KEY]["rounds"]
        return file.getvalue(), optimizer.applied, rounds["deposits"][0]["count"], len(rounds["results"])

    def resumes(comm):
        model = network(seed=9)
        optimizer = wrapped(model, comm, quorum="solo")
        both = torch.load(io.BytesIO(saved[comm.rank][0]), weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        return ends(model, optimizer)

    saved = SimulatedWorld(3).run(stops)
    assert [tuple(counts) for _, *counts in saved] == [(4, 0, 0), (4, 1, 0), (1, 0, 3)]
    assert SimulatedWorld(3).run(resumes) == SimulatedWorld(3).run(lambda comm: ends(*unmet(comm)))


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_one_state_of_all_ranks_goes_on_with_the_same_bits(size):
    def goes_on(comm, model, optimizer):
        for number in range(3, 6):
            comm.elapse(1e-3)
            step(model, optimizer, comm.rank, number)
        optimizer.finish()
        optimizer.close()
        return [p.tolist() for p in model.parameters()], optimizer.applied

    def whole(comm):
        model = network()
        optimizer = wrapped(model, comm, quorum=size)
        for number in range(3):
            step(model, optimizer, comm.rank, number)
        optimizer.synchronize()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.gathered_state_dict()}, file)
        return file.getvalue(), goes_on(comm, model, optimizer)

    def resumed(comm):
        model = network(seed=9)
        optimizer = wrapped(model, comm, quorum=size)
        both = torch.load(io.BytesIO(written[0][0]), weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        return goes_on(comm, model, optimizer)

    written = SimulatedWorld(size).run(whole)
    assert SimulatedWorld(size).run(resumed) == [ended for _, ended in written]


def test_as_users_write_it_with_a_scaler_clipping_and_accumulation():
    """A rank whose gradient overflowed takes no step; nobody waits for it, nothing of the inf is applied."""

    def body(comm):
        model = network()
        inner = torch.optim.Adam(model.parameters(), lr=0.05)
        norms = []
        inner.register_step_pre_hook(
            lambda *_: norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        with EagerSGD(inner, model.named_parameters(), comm=comm, quorum="majority") as optimizer:
            for number in range(8):
                comm.elapse(1e-3 * (1 + comm.rank))
                optimizer.zero_grad()
                for micro in range(2):
                    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + micro))
                    loss = model[2](model[1](model[0](inputs)).double()).square().mean() / 2
                    scaler.scale(loss * float("inf") if (comm.rank, number) == (1, 3) else loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        refuse_unlike(dict(model.named_parameters()), comm)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert len(norms) == optimizer.applied
        return optimizer.applied, scaler.get_scale()

    outcomes = SimulatedWorld(3).run(body)
    assert len({applied for applied, _ in outcomes}) == 1
    assert outcomes[1][1] < outcomes[0][1]


def one_parameter(comm, **settings):
    p = torch.nn.Parameter(torch.zeros(1))
    return p, EagerSGD(torch.optim.SGD([p], lr=1.0), [("p", p)], comm=comm, **settings)


def test_a_round_without_weight_changes_nothing():
    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([p], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(inner, 1.0)
        optimizer = EagerSGD(inner, [("p", p)], comm=comm, scheduler=scheduler, quorum=2, weighted=True)
        with optimizer:
            for weight in (0.0, 1.0, 0.0):
                p.grad = torch.tensor([1.0])
                optimizer.step(weight=weight)
        return p.item(), optimizer.applied, scheduler.last_epoch  # but for the place in the schedule

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule's first step is before the optimizer's
        assert SimulatedWorld(2).run(body) == [(-1.0, 1, 3)] * 2


def test_weights_that_would_count_for_nothing_or_twice_are_refused():
    def body(comm):
        p, optimizer = one_parameter(comm)
        p.grad = torch.tensor([1.0])
        with pytest.raises(ValueError, match=r"step\(weight=32\), but means are plain: .* weighted=True"):
            optimizer.step(weight=32)
        optimizer.close()
        p, optimizer = one_parameter(comm, weighted=True)
        p.grad = torch.tensor([1.0])
        with pytest.raises(ValueError, match=r"step\(\) of a weighted EagerSGD: give the step's weight"):
            optimizer.step()
        optimizer.close()

    SimulatedWorld(2).run(body)


def test_micro_batches_until_a_deadline_count_as_many_samples_as_they_were():
    """As `until_deadline` is documented: the mean over all samples that were in time, on all ranks."""

    def body(comm):
        p, optimizer = one_parameter(comm, quorum=2, weighted=True)
        with optimizer:
            samples = 0
            for batch in until_deadline([torch.full((3,), 1.0 + comm.rank)] * 4, 0.5, clock=comm.clock):
                comm.elapse(0.2 if comm.rank else 0.1)
                (p * batch).sum().backward()
                samples += len(batch)
            p.grad /= samples
            optimizer.step(weight=samples)
        return p.item(), samples

    (change, ours), (_, theirs) = SimulatedWorld(2).run(body)
    assert (ours, theirs) == (12, 9)
    assert change == pytest.approx(-(12 * 1.0 + 9 * 2.0) / 21)


def other_rate(model, rank):
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))


def other_optimizer(model, rank):
    return (torch.optim.Adam if rank else torch.optim.AdamW)(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [other_rate, other_optimizer])
def test_ranks_with_other_optimizers_or_rates_are_refused(make):
    def body(comm):
        model = network()
        EagerSGD(make(model, comm.rank), model.named_parameters(), comm=comm)

    with pytest.raises(CollectiveError, match="ranks disagree on call 0"):
        SimulatedWorld(2).run(body)


def test_a_state_of_other_settings_is_refused():
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        plain = EagerSGD(inner, model.named_parameters(), comm=comm)
        scheduled = EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=scheduler)
        weighted = EagerSGD(inner, model.named_parameters(), comm=comm, weighted=True)
        with pytest.raises(ValueError, match="with scheduler=ExponentialLR, this one has scheduler=None"):
            plain.load_state_dict(scheduled.state_dict())
        with pytest.raises(ValueError, match="with scheduler=None, this one has scheduler=ExponentialLR"):
            scheduled.load_state_dict(plain.state_dict())
        with pytest.raises(ValueError, match="with weighted=True, this one has weighted=False"):
            plain.load_state_dict(weighted.state_dict())
        for one in (plain, scheduled, weighted):
            one.close()

    SimulatedWorld(2).run(body)


def test_parameters_that_a_load_has_replaced_are_an_error_of_the_next_step():
    """load_state_dict(assign=True)."""

    def body(comm):
        model = network()
        optimizer = wrapped(model, comm)
        model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True)
        with pytest.raises(ValueError, match=r"than this EagerSGD was made of: '0\.weight' and 3 more of 4"):
            step(model, optimizer, comm.rank, 0)
        optimizer.close()

    SimulatedWorld(2).run(body)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("end", ["", "finish", "synchronize", "state_dict", "close"])
def test_steps_after_which_ranks_did_not_meet_are_said_when_the_optimizer_goes(end, caplog):
    """Neither finish() nor a meeting or a checkpoint since: parameters are one rank's alone."""

    def body(comm):
        model = network()
        optimizer = wrapped(model, comm, quorum=2)
        for number in range(3):
            step(model, optimizer, comm.rank, number)
        barrier(comm)  # a rank that leaves earlier is an error of the others
        if end:
            getattr(optimizer, end)()
        barrier(comm)

    gc.collect()  # those of other tests
    caplog.clear()
    SimulatedWorld(2).run(body)
    gc.collect()
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == (1 if end in ("", "close") else 0)
    assert all("3 steps of EagerSGD since its ranks last came together" in one for one in said)


@pytest.mark.slow
def test_after_an_error_nobody_is_told_to_finish(caplog):
    def body(comm):
        model = network()
        optimizer = wrapped(model, comm, quorum="solo")
        with optimizer:
            steps(model, optimizer, range(3))
            raise KeyError

    gc.collect()
    caplog.clear()
    with pytest.raises((KeyError, CollectiveError)):
        SimulatedWorld(2).run(body)
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("quorum", ["solo", "majority"])
def test_a_schedule_is_as_long_as_the_steps_although_late_ranks_make_for_more_rounds(quorum):
    def body(comm):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        cycle = torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, total_steps=20)  # a step more is its ValueError
        late = injected_delays("random:1=0.02", comm.rank, comm.size)
        with EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=cycle, quorum=quorum) as optimizer:
            for number in range(20):
                comm.elapse(0.01 + late(number))
                step(model, optimizer, comm.rank, number)
        return cycle.last_epoch, optimizer.applied > 20

    assert SimulatedWorld(4).run(body) == [(20, True)] * 4


@pytest.mark.parametrize("size", [1, 3])
def test_a_scheduler_goes_on_from_where_it_was_saved(size):
    def made(comm):
        model = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
        return model, rates, EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=rates, quorum=size)

    def body(comm):
        model, _, optimizer = made(comm)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        saved, parameters = copy.deepcopy(optimizer.state_dict()), model.state_dict()
        optimizer.finish()
        again, later, fresh = made(comm)
        again.load_state_dict(parameters)
        fresh.load_state_dict(saved)
        assert later.last_epoch == saved["distributed"]["applied"] == 5
        assert later.state_dict() == saved["distributed"]["scheduler"]
        assert fresh.param_groups[0]["lr"] == later.get_last_lr()[0] == 0.1 * 0.5**2
        fresh.finish()

    SimulatedWorld(size).run(body)
