"""Uneven ranks, drains, wrong and missing calls: a stated meaning or a clear error, never a hang."""

import gc
import warnings
from functools import partial

import pytest
import torch
from communicators import CollectiveError, Dies, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import (
    BMUF,
    EASGD,
    CoCoDSGD,
    DeMo,
    DiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from partial_collectives import PartialAllreduce
from torch import nn

pytestmark = pytest.mark.quick

ROUNDS = partial(PartialAllreduce, quorum=3)


def make(algorithm, task, comm, **options):
    options = {"sync_every": 3, **options}
    return algorithm(
        torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.5), comm=comm, model=task.model, **options
    )


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["LocalSGD", "BMUF", "SlowMo", "EASGD", "CoCoDSGD", "OverlapLocalSGD", "DiLoCo"])
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from(["keep", "average", "reset"]),
)
def test_ranks_with_different_numbers_of_steps_end_alike(quadratic, name, counts, tau, again, policy):
    """Also none at all; and they may go on afterwards."""
    import local_sgd

    def body(comm):
        task = quadratic(comm.rank)
        with make(getattr(local_sgd, name), task, comm, sync_every=tau, inner_state=policy) as optimizer:
            task.train(optimizer, range(counts[comm.rank]))
        first = task.flat().clone()
        assert torch.isfinite(first).all()
        task.train(optimizer, range(again))
        optimizer.drain()
        return first, task.flat()

    for ends in zip(*SimulatedWorld(len(counts)).run(body), strict=True):
        assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("algorithm", [LocalSGD, OverlapLocalSGD, CoCoDSGD])
def test_ranks_may_have_their_own_tau(quadratic, algorithm):
    """Blocks are exchanged in order, whatever their lengths."""

    def body(comm):
        task = quadratic(comm.rank)
        with make(algorithm, task, comm, sync_every=comm.rank + 1) as optimizer:
            task.train(optimizer, range(4 * (comm.rank + 1)))
        return task.flat()

    ends = SimulatedWorld(3).run(body)
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_the_last_mean_is_of_those_that_still_train(quadratic):
    """Rank 1 ends in mid-block: its two steps count once, then it goes where rank 0 goes."""

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(LocalSGD, task, comm)
        places = [task.train(optimizer, range(2))]
        if comm.rank == 0:
            task.backward(2)
            optimizer.step()
            places.append(task.flat().clone())
            optimizer.average()
            places.append(task.flat().clone())
            places.append(task.train(optimizer, range(3, 5)))
        optimizer.finish()
        return [*places, task.flat()]

    (_, third, mean, last, end), (short, other_end) = SimulatedWorld(2).run(body)
    torch.testing.assert_close(mean, (third + short) / 2)
    assert torch.equal(end, last)
    assert torch.equal(other_end, end)


def test_a_drain_that_others_do_not_come_to(quadratic):
    for algorithm in (LocalSGD, OverlapLocalSGD):

        def body(comm, algorithm=algorithm):
            task = quadratic(comm.rank)
            optimizer = make(algorithm, task, comm)
            task.train(optimizer, range(3))
            if comm.rank == 0:
                optimizer.drain()
            else:
                task.train(optimizer, range(3, 99))

        with pytest.raises(RuntimeError, match=r"drain\(\) is for all ranks at the same point, but 2 of 3 went on"):
            SimulatedWorld(3).run(body)


def test_a_drain_in_inference_mode_leaves_state_that_steps_can_change(algorithm):
    """An evaluation that drains: what the drain makes, as the outer momentum or rounding errors, is no tensor of it."""

    def body(comm, mode):
        p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = algorithm(torch.optim.SGD([p], lr=0.1), comm=comm, sync_every=4)
        for step in range(8):
            if step in (2, 5):
                with mode():
                    optimizer.drain()
            p.grad = torch.full_like(p, comm.rank + step)
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return p.detach()

    looking, plain = (SimulatedWorld(2).run(partial(body, mode=mode)) for mode in (torch.inference_mode, torch.no_grad))
    assert all(map(torch.equal, looking, plain))


def test_an_exception_leaves_without_a_drain(quadratic):
    """Which would wait for ranks that do not come."""

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(LocalSGD, task, comm)
        task.train(optimizer, range(2))
        with pytest.raises(KeyError, match="mine"), optimizer:
            raise KeyError("mine")
        return comm.messages_sent

    sent = SimulatedWorld(2).run(body)
    assert sent == SimulatedWorld(2).run(lambda comm: make(LocalSGD, quadratic(0), comm) and comm.messages_sent)


@pytest.mark.parametrize("algorithm", [LocalSGD, CoCoDSGD])
def test_a_rank_that_stops_early_without_finish(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        task.train(make(algorithm, task, comm), range(9 - 6 * (comm.rank == 1)))

    with pytest.raises(
        CollectiveError, match=rf"rank 0 waits for rank 1 .*{algorithm.__name__}.average\(\) .*finish\(\)"
    ):
        SimulatedWorld(2).run(body)


def test_a_rank_that_dies(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        task.train(make(BMUF, task, comm), range(9))

    with pytest.raises(CollectiveError, match=r"rank 1 died in BMUF.average\(\)"):
        SimulatedWorld(2, faults=[Dies(rank=1, message=2)]).run(body)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_nan_in_the_average_is_named(quadratic, algorithm, spoilt):
    """On every rank alike: whose, and in which parameter; nothing is applied."""
    said = []

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm, sync_every=2)
        task.train(optimizer, range(3))
        if comm.rank == 1:
            with torch.no_grad():
                task.model["b"][2] = spoilt
        before = task.flat().clone()
        try:
            for _ in range(4):  # an exchange that overlaps brings it one block later
                optimizer.average()
        except CollectiveError as error:
            said.append(str(error))
        if (
            comm.rank == 0 and not optimizer.rule.overlaps and algorithm is not StreamingDiLoCo
        ):  # other fragments came first
            assert torch.equal(task.flat(), before)

    SimulatedWorld(3).run(body)
    assert len(said) == 3
    assert len(set(said)) == 1
    where = "'a' and 2 more" if algorithm in (SparseLoCo, DeMo) else "'b'"  # which select by chunk, and spoil all of it
    assert said[0].startswith(
        f"{algorithm.__name__}: the average is not finite in {where}; NaN or inf in the parameters of"
    )
    assert "of ranks [1]: nothing was applied" in said[0]


def refused(other, size=2, algorithm=LocalSGD):
    """What all ranks raise at construction where the last one has `other` options or model."""

    def body(comm):
        model = nn.Linear(3, 2)
        options = {}
        if comm.rank == size - 1:
            model = other.get("model", model)
            options = other.get("options", {})
        kind = other.get("algorithm", algorithm) if comm.rank == size - 1 else algorithm
        kind(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, model=model, **options)

    with pytest.raises(CollectiveError) as error:
        SimulatedWorld(size).run(body)
    return str(error.value)


@pytest.mark.parametrize(
    "other",
    [
        {"model": nn.Linear(3, 3)},
        {"model": nn.Linear(2, 3)},
        {"model": nn.Linear(3, 2, bias=False)},
        {"model": nn.Linear(3, 2, dtype=torch.float64)},
        {"model": nn.Sequential(nn.Linear(3, 2))},  # other names
        {"algorithm": BMUF},
        {"options": {"weighted": True}},
        {"options": {"inner_state": "reset"}},
        {"options": {"buffers": "average"}},
        {"options": {"bucket_bytes": 8}},
        {"options": {"native": True}},
        {"options": {"broadcast": False}},
    ],
)
def test_ranks_that_differ_are_told_so_when_they_begin(other):
    assert refused(other).startswith("ranks disagree on call 0: rank 0 calls LocalSGD(buffers='keep'")


def test_other_settings_of_an_algorithm():
    assert "block_rate=0.25" in refused({"options": {"block_rate": 0.25}}, algorithm=BMUF)


def test_without_a_broadcast_ranks_that_differ_are_told_so():
    def body(comm):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(comm.rank // 2)
        with pytest.raises(CollectiveError, match="replicas differ: rank 2 in 'bias', against most"):
            LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, model=model, broadcast=False)

    SimulatedWorld(3).run(body)


def test_with_a_broadcast_all_begin_with_rank_0s(algorithm):
    def body(comm):
        torch.manual_seed(comm.rank)
        model = nn.BatchNorm1d(3)
        model.running_mean.fill_(comm.rank)
        nn.init.normal_(model.weight)
        algorithm(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, model=model)
        return torch.cat([model.weight.detach(), model.running_mean])

    ends = SimulatedWorld(3).run(body)
    assert ends[0][0] != 0
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sync_every": 0}, ValueError, "sync_every is 0, expected 1 or more"),
        ({"sync_every": -3}, ValueError, "sync_every is -3, expected 1 or more"),
        ({"sync_every": 2.5}, TypeError, "sync_every is 2.5, expected a whole number of steps, or a function"),
        ({"sync_every": True}, TypeError, "sync_every is True"),
        ({"buffers": "mean"}, ValueError, "buffers is 'mean', expected 'keep', 'average' or"),
        ({"buffers": "average"}, ValueError, "takes the model whose buffers they are: give model="),
        ({"weighted": "yes"}, TypeError, "weighted is 'yes', expected True or False"),
        ({"native": 1}, TypeError, "native is 1, expected True or False"),
        ({"model": 3}, TypeError, "model is 3, expected a torch.nn.Module, or None"),
        ({"inner_state": "broadcast"}, ValueError, "inner_state is 'broadcast', expected one of"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes is 0"),
        ({"tau": 4}, TypeError, "LocalSGD has no setting tau; it takes sync_every, compress, allreduce, comm, model"),
        ({"model": nn.Linear(2, 2)}, ValueError, "without a name"),
        ({"comm": "mpi"}, TypeError, "expected an mpi4py communicator"),
    ],
)
def test_what_is_wrong_by_itself(options, error, says):
    with pytest.raises(error, match=says):
        LocalSGD(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), **options)


def test_a_switch_of_bmuf_is_no_word():
    with pytest.raises(TypeError, match="nesterov is 'no', expected True or False"):
        BMUF(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), nesterov="no")


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        (BMUF, {"momentum": 1.0}, "expected 0 ≤ momentum < 1"),
        (BMUF, {"block_rate": 0.0}, "block_rate is 0.0, expected more than 0"),
        (BMUF, {"block_rate": float("nan")}, "expected a finite number"),
        (OverlapLocalSGD, {"alpha": 1.0}, "expected 0 ≤ alpha < 1"),
        (OverlapLocalSGD, {"beta": -0.1}, "expected 0 ≤ beta < 1"),
        (OverlapLocalSGD, {"native": True}, "native=True waits"),
        (EASGD, {"weighted": True}, "no mean to weight"),
    ],
)
def test_settings_of_the_algorithms(algorithm, options, says):
    with pytest.raises(ValueError, match=says):
        algorithm(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), **options)


def test_a_function_of_steps_that_gives_no_tau(quadratic):
    task = quadratic(0)
    optimizer = make(LocalSGD, task, None, sync_every=lambda step: 2 - step // 2)
    task.train(optimizer, range(3))
    with pytest.raises(ValueError, match=r"sync_every\(4\) is 0, expected 1 or more"):
        task.train(optimizer, range(3, 5))


def test_nothing_to_average():
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"of the 2 parameters given none can be trained.* before a LocalSGD is made"):
        LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_that_are_frozen_or_added_later(quadratic):
    task = quadratic(0)
    optimizer = make(LocalSGD, task, None, sync_every=1)
    task.model["b"].requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen later, but are exchanged: \['b'\]; unfreeze them, or"):
        task.train(optimizer, range(1))
    task.model["b"].requires_grad_(True)
    optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"not exchanged: .*make a new LocalSGD of the wrapped one"):
        task.train(optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"call drain\(\), add the group to the wrapped optimizer, and make"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_what_is_to_be_done_where_parameters_were_unfrozen_keeps_the_block_of_all_ranks(quadratic):
    def body(comm):
        task = quadratic(comm.rank)
        task.model["b"].requires_grad_(False)
        optimizer = make(LocalSGD, task, comm)
        task.train(optimizer, range(2))
        task.model["b"].requires_grad_(True)
        says = r"set requires_grad back \(.*\), call drain\(\) on every rank, .* set it anew, and make a new LocalSGD"
        with pytest.raises(ValueError, match=says):
            task.train(optimizer, range(2, 3))
        own = task.model["a"].detach().clone()
        task.model["b"].requires_grad_(False).grad = None
        optimizer.drain()
        drained = task.model["a"].detach().clone()
        task.model["b"].requires_grad_(True)
        again = make(LocalSGD, task, comm)
        assert torch.equal(task.model["a"], drained)
        task.train(again, range(3, 5))
        again.finish()
        return own, drained, task.flat()

    (first, drained, end), (second, _, other_end) = SimulatedWorld(2).run(body)
    torch.testing.assert_close(drained, (first + second) / 2)
    assert torch.equal(end, other_end)


def test_a_drain_at_a_boundary_ends_in_the_model(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.train(optimizer, range(6))
        with optimizer.averaged_model():
            model = task.flat().clone()
        optimizer.drain()
        drained = task.flat().clone()
        with optimizer.averaged_model():
            assert torch.equal(task.flat(), drained) or algorithm in (LocalSGD, CoCoDSGD)  # a mean rounds again
        optimizer.drain()
        return model, drained, task.flat()

    for model, drained, again in SimulatedWorld(2).run(body):
        if algorithm is not StreamingDiLoCo:  # fragments that were launched earlier have steps of their own in the end
            torch.testing.assert_close(drained, model, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(again, drained, rtol=1e-6, atol=1e-6)


def test_a_step_that_failed_is_none_and_the_state_can_be_saved(quadratic, algorithm):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.train(optimizer, range(3))

        def fails():
            raise MemoryError

        with pytest.raises(MemoryError):
            optimizer.step(fails)
        steps = optimizer.state_dict()["distributed"]["block"]["steps"]
        optimizer.drain()
        return steps

    assert SimulatedWorld(2).run(body) == [3, 3]


@pytest.mark.filterwarnings("ignore:2 steps of StreamingDiLoCo since the last")
def test_steps_that_average_never_saw(quadratic, algorithm):
    """Would be left out of the model, or leave ranks apart."""

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.train(optimizer, range(3))
        for step in (3, 4):
            task.backward(step)
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"2 steps since the last average\(\): call that after every step"):
            optimizer.finish()
        with pytest.raises(RuntimeError, match=r"2 steps since the last average\(\): .*, then save"):
            optimizer.state_dict()
        optimizer.average()
        optimizer.drain()
        return task.flat()

    ends = SimulatedWorld(2).run(body)
    assert torch.equal(*ends)


def test_weights_of_zero_leave_no_rank_apart(quadratic, algorithm):
    if algorithm in (EASGD, SparseLoCo, DeMo):
        return  # have no weights

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm, weighted=True)
        for step in range(2):
            task.backward(step)
            optimizer.step()
            optimizer.average(0)
        optimizer.finish()
        return task.flat()

    ends = SimulatedWorld(2).run(body)
    assert torch.equal(*ends)


@pytest.mark.parametrize("end", ["finish", "drain"])
def test_what_average_never_saw_leaves_no_rank_apart(quadratic, algorithm, end):
    """A rank projects its weights, or takes a step of the wrapped optimizer, after the last boundary."""

    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm)
        task.train(optimizer, range(3))
        with torch.no_grad():
            task.model["a"].mul_(1 + comm.rank)
        getattr(optimizer, end)()
        return task.flat()

    assert torch.equal(*SimulatedWorld(2).run(body))


def test_inside_the_averaged_model_nothing_else_happens(quadratic):
    task = quadratic(0)
    optimizer = make(BMUF, task, None)
    for call in (optimizer.step, optimizer.average, optimizer.state_dict, optimizer.drain, optimizer.finish):
        with optimizer.averaged_model(), pytest.raises(RuntimeError, match=r"inside averaged_model\(\)"):
            call()
    task.train(optimizer, range(4))


def test_copies_are_refused(quadratic):
    import copy

    optimizer = make(LocalSGD, quadratic(0), None)
    with pytest.raises(TypeError, match="cannot be copied or pickled: save its state_dict"):
        copy.deepcopy(optimizer)


def test_ranks_whose_learning_rates_differ_end_alike(quadratic):
    """A scheduler that goes on by batches is elsewhere on a rank with fewer; SlowMo counts in rates."""

    def run(comm):
        task = quadratic(comm.rank)
        optimizer = make(SlowMo, task, comm)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 - 0.2 * comm.rank)
        for step in range(9):
            task.train(optimizer, [step])
            schedule.step()
        optimizer.finish()
        return task.flat()

    first, second = SimulatedWorld(2).run(run)
    assert torch.equal(first, second)


@pytest.mark.parametrize("broadcast", [True, False])
def test_frozen_parameters_that_the_optimizer_lacks_begin_alike(broadcast):
    def run(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[1].weight.fill_(1)
            model[1].bias.fill_(0)
        LocalSGD(torch.optim.SGD(model[1].parameters(), lr=0.1), comm=comm, model=model, broadcast=broadcast)
        return model[0].weight

    if broadcast:
        first, second = SimulatedWorld(2).run(run)
        assert torch.equal(first, second)
    else:
        with pytest.raises(CollectiveError, match=r"0\.weight"):
            SimulatedWorld(2).run(run)


def test_nan_in_a_buffer_that_is_averaged_is_named():
    def run(comm):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, model=model, sync_every=1, buffers="average"
        )
        if comm.rank == 1:
            model[1].running_mean[1] = torch.nan
        optimizer.average()

    with pytest.raises(CollectiveError, match=r"buffers \['1\.running_mean'\] is NaN"):
        SimulatedWorld(2).run(run)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("taken", [4, 5])
@pytest.mark.parametrize("end", ["", "finish", "drain", "state_dict", "averaged_model"])
def test_steps_after_which_ranks_did_not_come_together_are_said_when_the_optimizer_goes(
    quadratic, algorithm, end, taken, caplog
):
    def body(comm):
        task = quadratic(comm.rank)
        optimizer = make(algorithm, task, comm, sync_every=2)
        task.train(optimizer, range(taken))
        if end == "averaged_model":
            with optimizer.averaged_model():
                pass
        elif end:
            getattr(optimizer, end)()
        return optimizer.rule.overlaps or algorithm is StreamingDiLoCo

    gc.collect()  # those of other tests
    caplog.clear()
    [parts, _] = SimulatedWorld(2).run(body)
    gc.collect()
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == (1 if not end and (taken == 5 or parts) else 0)
    assert all(f"steps of {algorithm.__name__} since its ranks last came together" in one for one in said)


@pytest.mark.parametrize("broadcast", [True, False])
def test_settings_that_differ_are_told_so_when_it_is_made(broadcast):
    def body(comm):
        inner = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
        with pytest.raises(CollectiveError, match=r"ranks disagree on call \d+: .*weighted=False.*weighted=True"):
            LocalSGD(inner, comm=comm, weighted=bool(comm.rank), broadcast=broadcast)

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SlowMo, {}),
        (DeMo, {}),
        (LocalSGD, {"inner_state": "average"}),
        (OverlapLocalSGD, {"inner_state": "average"}),
        (LocalSGD, {"buffers": "keep"}),
        (OverlapLocalSGD, {"buffers": "keep"}),
    ],
)
def test_a_rank_that_has_finished_counts_in_no_mean(algorithm, options):
    """The others go on as with ranks like themselves, whose learning rates, inner states and buffers change, too."""

    def run(comm, first):
        p = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(4))})
        p.register_buffer("seen", torch.zeros(1))
        inner = torch.optim.SGD(p.parameters(), lr=1.0, momentum=0.5)
        optimizer = algorithm(inner, comm=comm, model=p, sync_every=2, **{"buffers": "average", **options})
        for step in range(8 if comm.rank else first):
            inner.param_groups[0]["lr"] = 0.5**step
            for each in p.values():
                each.grad = torch.full((4,), float(step + 1))
            p.seen += step
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return [
            p.seen,
            *(each.detach() for each in p.values()),
            *(inner.state[each]["momentum_buffer"] for each in p.values()),
        ]

    finished, alike = (SimulatedWorld(2).run(partial(run, first=first))[1] for first in (2, 8))
    assert all(map(torch.equal, finished, alike))


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_buffers_at_the_end_are_of_all_that_finished_a_block_before_at_most(algorithm, steps):
    """So ranks whose numbers of batches differ by one all count."""

    def body(comm):
        p = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(4))})
        p.register_buffer("seen", torch.zeros(1))
        optimizer = algorithm(torch.optim.SGD(p.parameters(), lr=0.1), comm=comm, model=p, sync_every=2)
        for step in range((8, steps, 2)[comm.rank]):
            for each in p.values():
                each.grad = torch.ones(4)
            p.seen.fill_(step)
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return p.seen.item()

    assert SimulatedWorld(3).run(body) == [(7 + steps - 1) / 2] * 3


@pytest.mark.parametrize("end", ["finish", "drain"])
@pytest.mark.parametrize(
    "make",
    [
        partial(DiLoCo, sync_every=8),
        partial(StreamingDiLoCo, sync_every=8, fragments=1, delay=0, alpha=0.0),
        partial(SlowMo, sync_every=8, alpha=1.0, beta=0.8),
        partial(BMUF, sync_every=8, block_rate=1.0, momentum=0.8),
        partial(DiLoCo, sync_every=8, compress="int8"),
        partial(DiLoCo, sync_every=8, outer=partial(torch.optim.Adam, lr=0.7)),
        partial(DiLoCo, sync_every=8, outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, dampening=0.1)),
        partial(DiLoCo, sync_every=8, allreduce=ROUNDS),
        partial(StreamingDiLoCo, sync_every=8, fragments=1, delay=0, alpha=0.0, allreduce=ROUNDS),
        partial(DiLoCo, sync_every=8, outer=partial(torch.optim.Adam, lr=0.7), allreduce=ROUNDS),
    ],
)
def test_a_momentum_over_blocks_takes_no_step_for_a_block_that_no_rank_has_completed(make, end):
    """Where gradients have come to zero it would move the model away, by as much as after a whole block."""

    def body(comm):
        p = nn.Parameter(torch.zeros(4))
        optimizer = make(torch.optim.SGD([p], lr=1.0), comm=comm)
        for step in range(16):
            p.grad = torch.full((4,), float(step < 8))
            optimizer.step()
            optimizer.average()
        before = p.detach().clone()
        for _ in range(3):
            p.grad = torch.full((4,), 2.0 * comm.rank)
            optimizer.step()
            optimizer.average()
        getattr(optimizer, end)()
        moved = before - p.detach()
        optimizer.finish()
        return moved

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two momenta
        moved = SimulatedWorld(3).run(body)
    assert all(torch.equal(one, moved[0]) for one in moved)
    torch.testing.assert_close(moved[0], torch.full((4,), 6.0), rtol=0.02, atol=0.02)
