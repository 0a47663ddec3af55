"""DiLoCo whose outer steps are rounds of a partial allreduce: equal to DiLoCo with all ranks, exact with stragglers."""

import copy
import importlib.util
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, allreduce, barrier
from communicators.communicator import MOST_DUPLICATES
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DiLoCo
from partial_collectives import PartialAllreduce
from replicas import refuse_unlike

pytestmark = pytest.mark.quick

PATH = Path(__file__).parent.parent / "examples" / "eager_diloco.py"
PLAIN = partial(torch.optim.SGD, lr=1.0)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def eager(model, comm, quorum, /, **settings):
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    return DiLoCo(inner, comm=comm, allreduce=partial(PartialAllreduce, quorum=quorum), **{"sync_every": 2} | settings)


def steps(model, optimizer, comm, numbers, seconds=1e-3, **weight):
    for number in numbers:
        comm.elapse(seconds)
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * comm.rank + number))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.average(**weight)


@pytest.mark.parametrize("weighted", [False, True])
def test_with_all_ranks_it_is_diloco(weighted):
    def body(comm):
        model, plain = network(), network()
        weight = {"weight": 1.0 + comm.rank} if weighted else {}
        with eager(model, comm, comm.size, weighted=weighted) as optimizer:
            steps(model, optimizer, comm, range(7), **weight)
        inner = torch.optim.AdamW(plain.parameters(), lr=0.05)
        with DiLoCo(inner, comm=comm, sync_every=2, weighted=weighted) as optimizer:
            steps(plain, optimizer, comm, range(7), **weight)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)

    SimulatedWorld(3).run(body)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([1e-4, 1e-3, 7e-3])), min_size=1, max_size=4),
    st.sampled_from(["solo", "majority", 1]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_ranks_end_alike_and_no_change_is_lost(ranks, quorum, every, order):
    """With a plain outer step of rate 1 and integer gradients: z − z₀ is the sum of all changes / m, exactly."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(3))
        inner, (count, seconds) = torch.optim.SGD([p], lr=float(comm.size)), ranks[comm.rank]
        maker = partial(PartialAllreduce, quorum=quorum, max_staleness=2)
        with DiLoCo(inner, comm=comm, sync_every=every, outer=PLAIN, allreduce=maker) as optimizer:
            for number in range(count):
                comm.elapse(seconds)
                p.grad = torch.full_like(p, 1.0 + number + 8 * comm.rank)
                optimizer.step()
                optimizer.average()
            optimizer.drain()
            refuse_unlike({"p": p.detach()}, comm)
        refuse_unlike({"p": p.detach()}, comm)
        given_ = torch.tensor(float(sum(1 + number + 8 * comm.rank for number in range(count))))
        assert p.tolist() == [-float(allreduce(given_.view(1), comm))] * 3

    SimulatedWorld(len(ranks), seed=order).run(body)


def test_nobody_waits_for_the_last():
    def body(comm, quorum):
        model = network()
        with eager(model, comm, quorum) as optimizer:
            steps(model, optimizer, comm, range(2 if comm.rank else 8), seconds=1.0 if comm.rank == 2 else 1e-3)
            return comm.clock()

    assert SimulatedWorld(3).run(lambda comm: body(comm, "solo"))[0] < 0.1
    assert SimulatedWorld(3).run(lambda comm: body(comm, 3))[0] > 1


def check_a_run_goes_on(make, taken, more):
    """Saved after steps of each rank, and loaded anew, it has the bits of one that has not stopped."""

    def unmet(comm):
        model = network()
        optimizer = make(model, comm)
        steps(model, optimizer, comm, range(taken[comm.rank]), seconds=0.05 if comm.rank == 1 else 1e-3)
        comm.elapse(1.0)
        return model, optimizer

    def ends(model, optimizer):
        comm = optimizer.comm
        barrier(comm)
        steps(model, optimizer, comm, range(20, 20 + more), seconds=0.01 * (1 + comm.rank))
        optimizer.finish()
        return [p.tolist() for p in model.parameters()]

    def stops(comm):
        model, optimizer = unmet(comm)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        barrier(comm)
        optimizer.finish()
        return file.getvalue()

    def resumes(comm):
        model = network()
        optimizer = make(model, comm)
        both = torch.load(io.BytesIO(saved[comm.rank]), weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        return ends(model, optimizer)

    saved = SimulatedWorld(3).run(stops)
    ended = SimulatedWorld(3).run(resumes)
    assert ended == [ended[0]] * 3
    assert ended == SimulatedWorld(3).run(lambda comm: ends(*unmet(comm)))


def test_a_run_goes_on_as_if_it_had_not_stopped():
    """Saved in mid-block where no rank is at a boundary, with changes that are in no round and rounds not applied."""
    check_a_run_goes_on(lambda model, comm: eager(model, comm, "solo"), [9, 3, 3], more=2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_steps_of_a_block_that_was_saved_in_its_midst_count(weighted, more):
    weight = {"weight": 3.0} if weighted else {}

    def make(comm):
        model = network()
        return model, eager(model, comm, comm.size, sync_every=4, weighted=weighted)

    def ends(model, optimizer):
        light = {"weight": 1.0} if weighted else {}
        steps(model, optimizer, optimizer.comm, range(3, 3 + more), **light)
        optimizer.drain()
        held = [p.tolist() for p in model.parameters()]
        optimizer.finish()
        return held

    def begins(comm):
        model, optimizer = make(comm)
        steps(model, optimizer, comm, range(3), **weight)
        return model, optimizer

    def saves(comm):
        model, optimizer = begins(comm)
        both = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.finish()
        return both

    def resumes(comm):
        model, optimizer = make(comm)
        model.load_state_dict(saved[comm.rank][0])
        optimizer.load_state_dict(saved[comm.rank][1])
        return ends(model, optimizer)

    saved = SimulatedWorld(2).run(saves)
    assert SimulatedWorld(2).run(resumes) == SimulatedWorld(2).run(lambda comm: ends(*begins(comm)))


def test_going_back_to_a_drained_state_is_as_if_one_had_not_gone_on():
    """However often: the rounds before are closed, or communicators would run out."""

    def body(comm, back):
        model = network()
        optimizer = eager(model, comm, comm.size)
        steps(model, optimizer, comm, range(5))
        optimizer.drain()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for _ in range(back):
            steps(model, optimizer, comm, range(5, 9))
            optimizer.drain()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        steps(model, optimizer, comm, range(9, 14))
        optimizer.finish()
        return [p.tolist() for p in model.parameters()]

    expected, *others = (
        SimulatedWorld(2).run(partial(body, back=back)) for back in (0, 1, MOST_DUPLICATES // 2)
    )  # each has two
    assert others == [expected] * 2


def test_a_drained_state_goes_on_at_any_number_of_ranks():
    def saves(comm):
        model = network()
        optimizer = eager(model, comm, "majority")
        steps(model, optimizer, comm, range(5))
        optimizer.drain()
        both = model.state_dict(), optimizer.state_dict()
        barrier(comm)
        optimizer.finish()
        return both

    def goes_on(comm):
        model = network()
        with eager(model, comm, "majority") as optimizer:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            steps(model, optimizer, comm, range(5, 8))
        refuse_unlike(dict(model.named_parameters()), comm)

    saved = SimulatedWorld(3).run(saves)[0]
    for size in (1, 2, 3):
        SimulatedWorld(size).run(goes_on)


def test_what_does_not_go_with_rounds_is_an_error():
    def body(comm):
        model = network()
        for wrong in ({"native": True}, {"inner_state": "average"}, {"buffers": "average", "model": model}):
            with pytest.raises(ValueError, match=r"all ranks wait for each other there"):
                eager(model, comm, "solo", **wrong)
        with pytest.raises(TypeError, match="expected what makes rounds"):
            DiLoCo(torch.optim.SGD(model.parameters()), comm=comm, allreduce=3)
        optimizer = eager(model, comm, "solo")
        steps(model, optimizer, comm, range(2))
        with pytest.raises(RuntimeError, match=r"drain\(\) first"), optimizer.averaged_model():
            pass
        optimizer.drain()
        with optimizer.averaged_model():
            pass
        other = DiLoCo(torch.optim.AdamW(model.parameters()), comm=comm)
        with pytest.raises(ValueError, match="the state is of outer steps by rounds"):
            other.load_state_dict(optimizer.state_dict())
        optimizer.finish()
        with pytest.raises(RuntimeError, match=r"a step after finish\(\), which is for good"):
            steps(model, optimizer, comm, range(2))

    SimulatedWorld(2).run(body)


def test_a_round_without_weight_changes_nothing():
    def body(comm):
        p = torch.nn.Parameter(torch.ones(3))
        maker = partial(PartialAllreduce, quorum="majority")
        inner = torch.optim.SGD([p], lr=1.0)
        with DiLoCo(inner, comm=comm, sync_every=1, weighted=True, outer=PLAIN, allreduce=maker) as optimizer:
            p.grad = torch.ones(3)
            optimizer.step()
            optimizer.average(weight=0.0)
        return p.tolist()

    assert SimulatedWorld(2).run(body) == [[1.0] * 3] * 2


def test_nan_and_a_rank_that_gives_up_are_named_on_all():
    def body(comm, fault):
        model = network()
        try:
            with eager(model, comm, "solo") as optimizer:
                for number in range(6):
                    if (comm.rank, number) == (1, 3):
                        fault(model)
                    steps(model, optimizer, comm, [number])
        except (CollectiveError, ZeroDivisionError) as error:
            return str(error)

    def spoils(model):
        model[0].weight.data.fill_(float("nan"))

    def breaks(model):
        raise ZeroDivisionError("mine")

    said = SimulatedWorld(3).run(lambda comm: body(comm, spoils))
    assert all("DiLoCo: NaN or inf in the parameters of ranks [1]" in one for one in said), said
    said = SimulatedWorld(3).run(lambda comm: body(comm, breaks))
    assert [said[0], said[2]] == ["rank 1 gave up its partial allreduce: ZeroDivisionError: mine"] * 2


@pytest.mark.slow
@pytest.mark.few(0)
def test_the_example_learns():
    spec = importlib.util.spec_from_file_location("eager_diloco", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for make in example.WAYS.values():
        (accuracy, eagerly), (_, waiting) = (
            SimulatedWorld(4).run(lambda comm, q=quorum, m=make: example.train(comm, m, q, steps=150))[0]
            for quorum in ("majority", 4)
        )
        assert accuracy > 0.8
        assert eagerly < 0.95 * waiting


def test_weights_loaded_behind_rounds_are_an_error():
    """The rounds of allreduce= compare nothing, so that ranks would part for good."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([p], lr=0.1)
        make = partial(PartialAllreduce, quorum=comm.size)
        optimizer = DiLoCo(inner, comm=comm, sync_every=1, allreduce=make)
        if comm.rank == 0:
            p.data += 1
        p.grad = torch.ones(3)
        optimizer.step()
        optimizer.average()

    with pytest.raises(RuntimeError, match="other weights than those that its ranks ended with"):
        SimulatedWorld(2).run(body)
