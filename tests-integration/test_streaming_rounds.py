"""StreamingDiLoCo whose fragments are rounds of a partial allreduce: equal with all ranks, exact with stragglers."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, allreduce, barrier
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DiLoCo, StreamingDiLoCo
from partial_collectives import PartialAllreduce
from replicas import refuse_unlike
from test_eager_diloco import PLAIN, check_a_run_goes_on, network, steps


def streaming(model, comm, quorum, /, compress=None, **settings):
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    make = partial(PartialAllreduce, quorum=quorum, compress=compress)
    return StreamingDiLoCo(inner, comm=comm, allreduce=make, **{"sync_every": 6, "fragments": 3} | settings)


@pytest.mark.few(4)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seconds", [(1e-3, 1e-3), (1e-3, 4e-3), (1e-7, 1e-7)])
@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [(6, 1, 0, 0.0), (6, 3, 1, 0.5), (6, 4, 2, 0.3), (6, 2, 9, 0.5), (2, 4, 1, 0.5), (6, 3, 3, 0.5)],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_with_all_ranks_it_is_streaming_diloco(weighted, seconds, every, fragments, delay, alpha, size):
    """Where launches come in one step, ranks are of unlike speed, and rounds take longer than steps, too.

    A drain comes at the end of a block: in the middle of one it is a round like others, and without rounds a mean.
    """

    def body(comm):
        model, plain = network(), network()
        weight = {"weight": 1.0 + comm.rank} if weighted else {}
        settings = {"fragments": fragments, "delay": delay, "alpha": alpha, "weighted": weighted, "sync_every": every}
        weight |= {"seconds": seconds[comm.rank % 2]}
        optimizer = streaming(model, comm, comm.size, **settings)
        inner = torch.optim.AdamW(plain.parameters(), lr=0.05)
        other = StreamingDiLoCo(inner, comm=comm, **settings)
        drains = alpha == 0 and delay == 0  # else what is under way at a drain is counted otherwise
        for count in (18, 20):
            steps(model, optimizer, comm, range(count if drains else 20), **weight)
            steps(plain, other, comm, range(count if drains else 20), **weight)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
            if drains:
                optimizer.drain()
                other.drain()
            else:
                break
        optimizer.finish()
        other.finish()

    SimulatedWorld(size).run(body)


def test_one_fragment_without_delay_is_diloco_by_rounds_bit_for_bit():
    def body(comm, make):
        model = network()
        with make(model, comm) as optimizer:
            steps(model, optimizer, comm, range(11), seconds=1e-3 * (1 + comm.rank))
        return [p.tolist() for p in model.parameters()]

    def diloco(model, comm):
        make = partial(PartialAllreduce, quorum=2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        return DiLoCo(inner, comm=comm, allreduce=make, sync_every=2)

    def one(model, comm):
        return streaming(model, comm, 2, fragments=1, delay=0, alpha=0.0, sync_every=2)

    first, second = (SimulatedWorld(3).run(lambda comm, m=make: body(comm, m)) for make in (diloco, one))
    assert first == second


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1e-4, 1e-3, 7e-3])), min_size=1, max_size=5),
    st.sampled_from(["solo", "majority", 1]),
    st.integers(1, 5),
    st.sampled_from([None, "int8", "int2"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_ranks_end_alike_and_no_change_is_lost(ranks, quorum, every, compress, drains, order):
    """With plain outer steps of rate 1 and integer gradients: z − z₀ and residuals are all changes / m, exactly."""

    def body(comm):
        model = torch.nn.ParameterDict({name: torch.zeros(numel) for name, numel in (("a", 3), ("b", 1), ("c", 200))})
        inner, (count, seconds) = torch.optim.SGD(model.parameters(), lr=float(comm.size)), ranks[comm.rank]
        make = partial(PartialAllreduce, quorum=quorum, max_staleness=2, compress=compress)
        given_ = torch.zeros(204)
        settings = {"fragments": 3, "delay": 0, "alpha": 0.0, "outer": PLAIN, "allreduce": make}
        with StreamingDiLoCo(inner, comm=comm, sync_every=every, **settings) as optimizer:
            for number in range(count):
                comm.elapse(seconds)
                draw = torch.Generator().manual_seed(100 * comm.rank + number)
                for p in model.parameters():
                    p.grad = torch.randint(-99, 100, p.shape, generator=draw).float()
                given_ += torch.cat([p.grad for p in model.parameters()])
                optimizer.step()
                optimizer.average()
            if drains:
                optimizer.drain()
                refuse_unlike(dict(model.named_parameters()), comm)
            rounds = optimizer._driver._rounds
        refuse_unlike(dict(model.named_parameters()), comm)
        residual = torch.cat([one for each in rounds.residuals for one in each]) if compress else torch.zeros(204)
        moved = torch.cat([p.detach() for p in model.parameters()])
        held = allreduce(residual, comm) / comm.size
        assert torch.equal(moved - held, -allreduce(given_, comm)), (moved, held, given_)

    sizes = {size for size in (1, 2, 4) if size <= len(ranks)}  # by which dividing is exact
    SimulatedWorld(max(sizes), seed=order).run(body)


def test_nobody_waits_for_the_last():
    def body(comm, quorum):
        model = network()
        with streaming(model, comm, quorum) as optimizer:
            steps(model, optimizer, comm, range(6 if comm.rank else 12), seconds=1.0 if comm.rank == 2 else 1e-3)
            return comm.clock()

    assert SimulatedWorld(3).run(lambda comm: body(comm, "solo"))[0] < 0.1
    assert SimulatedWorld(3).run(lambda comm: body(comm, 3))[0] > 1


@pytest.mark.few(2)
@pytest.mark.parametrize("compress", [None, "int4"])
@pytest.mark.parametrize(
    ("quorum", "delay", "taken"),
    [
        *[("solo", delay, taken) for delay in (2, 7) for taken in ([9, 4, 5], [8, 8, 8], [4, 3, 1], [0, 0, 0])],
        *[(3, 7, taken) for taken in ([8, 8, 8], [4, 3, 1], [0, 0, 0])],
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(compress, quorum, delay, taken):
    """Saved between a launch and its application, with changes that are in no round and rounds not applied."""

    def make(model, comm):
        return streaming(model, comm, quorum, compress=compress, delay=delay)

    check_a_run_goes_on(make, taken, more=7)


def test_a_drained_run_goes_on_with_its_residuals():
    def begun(comm):
        model = network()
        optimizer = streaming(model, comm, "majority", compress="int2")
        steps(model, optimizer, comm, range(9))
        optimizer.drain()
        return model, optimizer

    def ends(model, optimizer):
        barrier(optimizer.comm)
        steps(model, optimizer, optimizer.comm, range(9, 17))
        optimizer.finish()
        return [p.tolist() for p in model.parameters()]

    def saves(comm):
        model, optimizer = begun(comm)
        both = model.state_dict(), optimizer.state_dict()
        barrier(comm)
        optimizer.finish()
        return both

    def goes_on(comm, saved, size=3):
        model = network()
        optimizer = streaming(model, comm, "majority", compress="int2")
        model.load_state_dict(saved[comm.rank % 3][0])
        optimizer.load_state_dict(saved[comm.rank % 3][1])
        return ends(model, optimizer)

    saved = SimulatedWorld(3).run(saves)
    assert SimulatedWorld(3).run(lambda comm: goes_on(comm, saved)) == SimulatedWorld(3).run(lambda c: ends(*begun(c)))
    for size in (1, 2, 5):
        ended = SimulatedWorld(size).run(lambda comm: goes_on(comm, [saved[0]] * 3))
        assert ended == [ended[0]] * size


@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_residuals_of_a_drained_state_are_there_before_a_faster_rank_goes_on(jitter):
    def make(comm):
        p = torch.nn.Parameter(torch.zeros(64))
        settings = {"fragments": 1, "delay": 0, "alpha": 0.0, "outer": PLAIN, "sync_every": 1}
        inner = torch.optim.SGD([p], lr=1.0)
        make = partial(PartialAllreduce, quorum="solo", compress="int2")
        return p, StreamingDiLoCo(inner, comm=comm, allreduce=make, **settings)

    def trains(p, optimizer, numbers):
        for number in numbers:
            p.grad = integers(number, optimizer.comm.rank)
            optimizer.step()
            optimizer.average()

    def integers(number, rank):
        return torch.randint(-99, 100, (64,), generator=torch.Generator().manual_seed(10 * number + rank)).float()

    def saves(comm):
        p, optimizer = make(comm)
        trains(p, optimizer, range(5))
        optimizer.drain()
        saved = copy.deepcopy((p.data, optimizer.state_dict()))
        barrier(comm)
        optimizer.finish()
        return saved

    def resumes(comm, saved):
        p, optimizer = make(comm)
        p.data.copy_(saved[comm.rank][0])
        optimizer.load_state_dict(saved[comm.rank][1])
        trains(p, optimizer, range(5, 9) if comm.rank == 0 else [])
        optimizer.drain()
        given_ = sum(integers(number, rank) for number in range(5) for rank in range(comm.size))
        given_ += sum(integers(number, 0) for number in range(5, 9))
        held = allreduce(optimizer._driver._rounds.residuals[0][0], comm) / comm.size
        optimizer.finish()
        return torch.equal(p.data - held, -given_ / comm.size)

    saved = SimulatedWorld(4).run(saves)
    for seed in range(8):
        assert all(SimulatedWorld(4, seed=seed, jitter=jitter).run(lambda comm: resumes(comm, saved)))


def test_a_light_round_does_not_multiply_what_heavy_ones_have_left():
    def body(comm, weight):
        p, deltas = torch.nn.Parameter(torch.zeros(2048)), []
        make = partial(PartialAllreduce, quorum="solo", compress="int4")
        settings = {"fragments": 1, "delay": 0, "alpha": 0.0, "sync_every": 1, "weighted": True}
        inner = torch.optim.SGD([p], lr=0.01)
        optimizer = StreamingDiLoCo(inner, comm=comm, outer=PLAIN, allreduce=make, **settings)
        draw = torch.Generator().manual_seed(comm.rank)
        for number in range(7):
            before = p.detach().clone()
            if number < 6 or comm.rank == 0:
                comm.elapse(1e-3)
                p.grad = torch.randn(2048, generator=draw)
                optimizer.step()
                optimizer.average(4096.0 if number < 6 else weight)
            optimizer.drain()
            deltas.append(float((p.detach() - before).norm()))
        optimizer.finish()
        return deltas[-1]

    heavy, light, none = (SimulatedWorld(4).run(lambda comm, w=w: body(comm, w))[0] for w in (4096.0, 1.0, 0.0))
    assert light == pytest.approx(heavy, rel=1e-3)
    assert none == 0


def test_a_slow_rank_gives_all_fragments():
    """Also where it comes to every third round, and there are three."""

    def body(comm):
        given_ = Counter()
        model = network()
        optimizer = streaming(model, comm, "solo", sync_every=3, delay=0)
        own = optimizer._driver._given

        def counted(turn):
            given_[turn] += 1
            return own(turn)

        optimizer._driver._given = counted
        slow = comm.rank == 2
        steps(model, optimizer, comm, range(12 if slow else 36), seconds=3e-3 if slow else 1e-3)
        optimizer.finish()
        return given_

    counts = SimulatedWorld(3).run(body)[2]
    assert max(counts.values()) - min(counts.values()) <= 2


def test_the_others_go_on_without_a_rank_that_dies():
    """And the mean is of those that are left."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(4))
        make = partial(PartialAllreduce, quorum=2, on_death="shrink")
        inner = torch.optim.SGD([p], lr=1.0)
        settings = {"fragments": 1, "delay": 0, "alpha": 0.0, "outer": PLAIN, "sync_every": 1}
        with StreamingDiLoCo(inner, comm=comm, allreduce=make, **settings) as optimizer:
            for number in range(6):
                if (comm.rank, number) == (2, 3):
                    raise ZeroDivisionError("mine")
                comm.elapse(1e-3)
                p.grad = torch.ones(4)
                optimizer.step()
                optimizer.average()
        return p.tolist()

    def kept(comm):
        try:
            return body(comm)
        except (CollectiveError, ZeroDivisionError) as error:
            return str(error)

    assert SimulatedWorld(3).run(kept) == [[-6.0] * 4, [-6.0] * 4, "mine"]


def test_what_does_not_go_together_says_why():
    def body(comm):
        model = network()
        with pytest.raises(ValueError, match=r"rounds do it themselves"):
            streaming(model, comm, "solo").__class__(
                torch.optim.SGD(model.parameters(), lr=1.0), comm=comm, compress="int8", allreduce=PartialAllreduce
            )
        with pytest.raises(ValueError, match=r"all ranks wait for each other there"):
            streaming(model, comm, "solo", inner_state="average")
        with pytest.raises(TypeError, match="expected what makes rounds"):
            StreamingDiLoCo(torch.optim.SGD(model.parameters()), comm=comm, allreduce=3)
        optimizer = streaming(model, comm, "solo")
        steps(model, optimizer, comm, range(4))
        state = optimizer.state_dict()
        for other in (
            StreamingDiLoCo(torch.optim.AdamW(model.parameters()), comm=comm, fragments=3),
            streaming(model, comm, "solo", fragments=2),
            streaming(model, comm, "solo", compress="int8"),
            streaming(model, comm, "solo", bucket_bytes=16),
        ):
            with pytest.raises(ValueError, match="the state is of"):
                other.load_state_dict(state)
        optimizer.finish()

    SimulatedWorld(2).run(body)
