"""Ranks of periodic averaging that die, leave and come, in simulated worlds: who is left goes on with the same bits."""

import functools

import pytest
import torch
from communicators import Dies, Elastic, SimulatedWorld
from hypothesis import given, settings
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
from local_sgd.compression import CompressedAveraging
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK
from torch import nn

RANKS, BLOCKS, EVERY, SECONDS = 4, 4, 2, 1e-3
"""A step takes SECONDS, far more than an exchange."""

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)  # which DeMo has in its own step
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9)


def sparse(make, optimizer, **options):
    return make(
        optimizer, compress=ErrorFeedback(TopK(0.1)), allreduce=functools.partial(sparse_allreduce, k=9), **options
    )


KINDS = {
    "LocalSGD": LocalSGD,
    "LocalSGD, int8": functools.partial(LocalSGD, compress="int8"),
    "LocalSGD, sparse": functools.partial(sparse, LocalSGD),
    "LocalSGD, weighted": functools.partial(LocalSGD, weighted=True, buffers="average", inner_state="average"),
    "BMUF": functools.partial(BMUF, inner_state="reset"),
    "SlowMo": functools.partial(SlowMo, buffers="broadcast"),
    "EASGD": EASGD,
    "CoCoD": CoCoDSGD,
    "CoCoD, weighted": functools.partial(CoCoDSGD, weighted=True, buffers="average"),
    "Overlap": OverlapLocalSGD,
    "DiLoCo": functools.partial(DiLoCo, outer_scheduler=COSINE),
    "DiLoCo, int4": functools.partial(DiLoCo, compress="int4", weighted=True),
    "DiLoCo, int2": functools.partial(DiLoCo, compress="int2"),
    "SparseLoCo": functools.partial(SparseLoCo, density=0.1),
    "DeMo": functools.partial(DeMo, sync_every=4),
    "Streaming": functools.partial(StreamingDiLoCo, fragments=2, delay=1, outer_scheduler=COSINE),
    "Streaming, int8": functools.partial(StreamingDiLoCo, fragments=2, delay=0, compress="int8", buffers="average"),
    "Streaming, sparse": functools.partial(sparse, StreamingDiLoCo, fragments=2, delay=3),
}
OVERLAPS = {"EASGD", "CoCoD", "CoCoD, weighted", "Overlap"}
WEIGHTED = {"LocalSGD, weighted", "CoCoD, weighted", "DiLoCo, int4"}
all_kinds = pytest.mark.parametrize("kind", KINDS)


class Model(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in {"a": (5, width), "b": (7,), "c": (2, 6)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_buffer("mean", torch.zeros(4))


def new(kind, world, inner=SGD, model=None, **options):
    model = model or Model()
    return model, KINDS[kind](inner(model.parameters()), comm=world, model=model, sync_every=EVERY, **options)


def take_step(kind, model, optimizer, place, step):
    generator = torch.Generator().manual_seed(1000 * step + place)
    for p in model.parameters():
        p.grad = p.detach() - place + torch.randn(p.shape, generator=generator)
    model.mean += torch.randn(4, generator=generator)
    optimizer.step()
    optimizer.average(*[1.0 + place] * (kind in WEIGHTED))


def kept(model, optimizer, *, alike=False):
    """All that survivors keep; alike: only what is the same on all ranks after a boundary."""
    driver = optimizer._driver
    found = {name: held.clone() for name, held in model.state_dict().items() if not alike}
    names = optimizer.rule.kept if not alike else [name for name in optimizer.rule.kept if name != "launched"]
    for number, part in enumerate(driver.parts):
        found |= {f"{name} {number}": part[name].clone() for name in names}
    if driver.sums is not None and not alike:
        state = driver.sums.state_dict()
        residuals = state["sparsifier"]["residuals"] if "sparsifier" in state else state
        found |= {f"residual {name}": held.clone() for name, held in residuals.items()}
    if not alike:
        state = optimizer.optimizer.state_dict()["state"]
        found |= {
            f"{p} {name}": held.clone() for p, of in state.items() for name, held in of.items() if held is not None
        }
    return found


class LeftError(Exception):
    pass


class Counted(Elastic):
    """Counts the atomic exchanges that this rank comes to, and leaves in place of the one of that number."""

    def __init__(self, comm, counts, leaves):
        super().__init__(comm)
        self._counts, self._place, self._leaves_at = counts, comm.rank, leaves

    def atomic(self, exchange, undo=lambda: None):
        if not self._inside:
            self._counts[self._place] += 1
            if self._counts[self._place] == self._leaves_at:
                self.close()
                raise LeftError
        return super().atomic(exchange, undo)


def train(comm, kind, counts, *, leaves=0):
    comm.elapse(comm.rank * 1e-9)  # so that members are in this order
    world = Counted(comm, counts, leaves)
    try:
        model, optimizer = new(kind, world)
        for step in range(BLOCKS * EVERY):
            comm.elapse(SECONDS)
            take_step(kind, model, optimizer, comm.rank, step)
        before = kept(model, optimizer)
        optimizer.finish()
    except LeftError:
        return None
    return before, kept(model, optimizer)


@functools.cache
def left(kind, leaver, leaves):
    """Results where a rank has left in place of its exchange of that number."""
    counts = [0] * RANKS
    return SimulatedWorld(RANKS).run(
        lambda comm: train(comm, kind, counts, leaves=leaves if comm.rank == leaver else 0)
    )


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@functools.cache
def seconds(kind):
    world = SimulatedWorld(RANKS)
    world.run(lambda comm: train(comm, kind, [0] * RANKS))
    return world.elapsed


@pytest.mark.few(2)
@all_kinds
@settings(max_examples=8, deadline=None, derandomize=True)
@given(dying=st.integers(0, RANKS - 1), part=st.floats(0.02, 0.98), late=st.sampled_from([0.0, 1e-4, 3e-4, 5e-4]))
def test_survivors_are_where_they_would_be_had_the_dead_left_before(kind, dying, part, late):
    """All of them at one of two places: before the exchange that the rank came to last, or after it."""
    at = part * seconds(kind)
    at = at - at % SECONDS + late if late else at  # amid exchanges, which come at the ends of steps
    counts = [0] * RANKS
    world = SimulatedWorld(RANKS, faults=[Dies(dying, at=at)])
    results = world.run(lambda comm: train(comm, kind, counts))
    living = [rank for rank in range(RANKS) if rank != dying]
    assert all(results[rank] is not None for rank in living)
    expected = [left(kind, dying, counts[dying] + later) for later in (0, 1)]
    assert any(all(same(results[rank][at], run[rank][at]) for rank in living for at in (0, 1)) for run in expected)


def come_and_train(comm, kind, *, comes, said, inner=SGD, blocks=3):
    """A rank of which the last one comes later; notes what is alike on all ranks, by boundary and what is under way."""
    joins = comm.rank == RANKS - 1
    comm.elapse(comes if joins else comm.rank * 1e-9)
    world = Elastic(comm)
    model, optimizer = new(kind, world, inner)
    for step in range(blocks * EVERY):
        comm.elapse(SECONDS)
        take_step(kind, model, optimizer, comm.rank, step)
        under_way = [fragment.due is None for fragment in getattr(optimizer._driver, "fragments", [])]
        key = optimizer.stats()["boundaries"], *under_way
        said.setdefault(key, {})[comm.rank] = kept(model, optimizer, alike=True)
    optimizer.finish()
    with optimizer.averaged_model():
        shown = kept(model, optimizer)
    return model.state_dict(), kept(model, optimizer, alike=True), shown, optimizer.stats()["boundaries"], world.size


def check_agreement(results, said):
    for held in said.values():
        assert all(same(one, next(iter(held.values()))) for one in held.values())
    ends = [result for result in results if result is not None]
    assert all(same(end[at], ends[0][at]) for end in ends for at in (0, 1))
    assert len({end[3] for end in ends}) == 1


@pytest.mark.few(8)
@all_kinds
@pytest.mark.parametrize("inner", [SGD, ADAM], ids=["SGD", "Adam"])
def test_a_newcomer_agrees_with_all_at_every_boundary(kind, inner):
    said = {}
    world = SimulatedWorld(RANKS)
    comes = 6.5 * SECONDS
    results = world.run(lambda comm: come_and_train(comm, kind, comes=comes, said=said, inner=inner))
    assert results[0][4] == RANKS
    assert any(len(held) == RANKS for held in said.values())
    assert any(len(held) < RANKS for held in said.values())
    check_agreement(results, said)


@pytest.mark.few(5)
@all_kinds
def test_a_newcomer_that_gets_its_state_from_one_who_has_ended_trains_on(kind):
    """Three ranks, of which one has more steps than the others; who comes meanwhile has most, and ends last."""

    def body(comm):
        comm.elapse(comm.rank * 1e-9 if comm.rank < RANKS - 1 else 17 * SECONDS)
        world = Elastic(comm, start_with=RANKS - 1)
        model, optimizer = new(kind, world)
        for step in range(EVERY * {0: 8, RANKS - 1: 10}.get(comm.rank, 2)):
            comm.elapse(SECONDS)
            take_step(kind, model, optimizer, comm.rank, step)
        optimizer.finish()
        return model.state_dict(), world.size

    ranks = SimulatedWorld(RANKS).run(body)
    assert {size for _, size in ranks} == {RANKS}
    parameters = [{name: held for name, held in state.items() if name != "mean"} for state, _ in ranks]
    assert all(same(one, parameters[0]) for one in parameters)


@pytest.mark.few(3)
@all_kinds
@settings(max_examples=6, deadline=None, derandomize=True)
@given(dying=st.integers(0, RANKS - 1), late=st.floats(0, 2e-3), generation=st.integers(0, 2))
def test_a_donor_or_newcomer_may_die_amid_joining(kind, dying, late, generation):
    said = {}
    world = SimulatedWorld(RANKS, faults=[Dies(dying, at=4 * SECONDS + late)])
    comes = (1.5 + generation) * SECONDS
    results = world.run(lambda comm: come_and_train(comm, kind, comes=comes, said=said))
    assert [rank for rank, result in enumerate(results) if result is None] == [dying]
    check_agreement(results, said)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["LocalSGD, int8", "DiLoCo, int4", "DiLoCo, int2"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(dying=st.integers(0, RANKS - 1), part=st.floats(0.1, 0.9))
def test_compression_loses_nothing_but_what_died(kind, dying, part):
    """Σ given, old residuals included, = applied + Σ residuals, over the ranks of each exchange that was applied."""
    taken, original = {}, CompressedAveraging._taken

    def noted(self, totals):
        arrived, (each,) = original(self, totals), self._given
        residual = self._compressed.residuals[id(each.part)].double()
        self._noted += 1
        if arrived.means:
            taken.setdefault((self.ranks, self._noted), []).append(
                (each.given.double(), residual, totals[1].total.double())
            )
        return arrived

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CompressedAveraging, "_taken", noted)
        patched.setattr(CompressedAveraging, "_noted", 0, raising=False)
        world = SimulatedWorld(RANKS, faults=[Dies(dying, at=part * seconds(kind))])
        world.run(lambda comm: train(comm, kind, [0] * RANKS))
    complete = [held for (ranks, _), held in taken.items() if len(held) == ranks]
    assert complete
    for held in complete:
        assert torch.allclose(sum(one[0] for one in held), held[0][2] + sum(one[1] for one in held), atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [
        ("LocalSGD", {"width": 4}, "other settings or another model"),
        ("LocalSGD", {"weighted": True}, "other settings or another model"),
        ("DiLoCo", {"outer": SGD}, "with other settings"),
        ("Streaming", {"fragments": 3}, "with other settings"),
    ],
)
def test_a_newcomer_unlike_the_others_is_refused_alone(kind, changes, fault):
    said = {}

    def body(comm):
        if comm.rank < RANKS - 1:
            return come_and_train(comm, kind, comes=0.0, said=said)
        comm.elapse(2.5 * SECONDS)
        with pytest.raises(ValueError, match=fault):
            new(
                kind,
                Elastic(comm),
                model=Model(changes.get("width", 3)),
                **{k: v for k, v in changes.items() if k != "width"},
            )
        return None

    check_agreement(SimulatedWorld(RANKS).run(body), said)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "name", "of"), [(BMUF, "momentum", lambda m: 1 - 1 / m), (EASGD, "alpha", lambda m: 0.9 / m)]
)
@pytest.mark.parametrize("own", [None, 0.2])
def test_defaults_follow_the_number_of_ranks_and_given_values_stay(make, name, of, own):
    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        world, model, seen = Elastic(comm), Model(), []
        options = {} if own is None else {name: own}
        optimizer = make(SGD(model.parameters()), comm=world, sync_every=1, **options)
        for step in range(6):
            if comm.rank == 3 and step == 2:
                return world.close()
            comm.elapse(SECONDS)
            take_step("", model, optimizer, comm.rank, step)
            seen.append(getattr(optimizer.rule, name))
        return seen

    results = SimulatedWorld(RANKS).run(body)
    assert results[0] == results[1] == results[2]
    assert results[0] == [own] * 6 if own else results[0] == pytest.approx([of(4)] * 2 + [of(3)] * 4)


@pytest.mark.quick
def test_what_cannot_be_elastic_is_refused_by_name():
    def body(comm):
        world = Elastic(comm)
        with pytest.raises(ValueError, match="LocalSGD with native=True over an Elastic"):
            new("LocalSGD", world, native=True)
        with pytest.raises(ValueError, match="LocalSGD with TwoLevels over an Elastic: the small group"):
            LocalSGD(SGD(Model().parameters()), sync_every=[(comm, 1), (world, 4)])

    SimulatedWorld(1).run(body)


@all_kinds
def test_a_drained_state_of_more_ranks_loads_where_fewer_are_left(kind):
    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        world = Elastic(comm)
        model, optimizer = new(kind, world)
        for step in range(3):
            take_step(kind, model, optimizer, comm.rank, step)
        optimizer.drain()
        optimizer.gathered_state_dict()
        weights, state = model.state_dict(), optimizer.state_dict()
        if comm.rank == 3:
            return world.close()
        again, optimizer = new(kind, world)
        again.load_state_dict(weights)
        assert world.size == 3
        optimizer.load_state_dict(state)
        take_step(kind, again, optimizer, comm.rank, 4)
        optimizer.finish()
        return again.state_dict()

    ends = SimulatedWorld(RANKS).run(body)
    assert all(same(end, ends[0]) for end in ends[:3])


@pytest.mark.few(3)
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_a_rank_leaves_after_a_step_that_exchanges_several_fragments(delay, every, compress):
    """Not amid the step, which it takes to its end; all others go on without it, and agree."""

    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        world, model, steps = Elastic(comm), Model(), 0
        optimizer = StreamingDiLoCo(
            SGD(model.parameters()), comm=world, sync_every=every, fragments=3, delay=delay, compress=compress
        )
        for _ in world.deal(range(12 * RANKS), batch_size=RANKS):
            if comm.rank == 1 and steps == 4:
                world.leave()
            comm.elapse(SECONDS)
            take_step("", model, optimizer, comm.rank, steps)
            steps += 1
        if world.leaving:
            return steps
        optimizer.finish()
        return world.size, [p.detach() for p in model.parameters()]

    first, left, *others = SimulatedWorld(RANKS).run(body)
    assert 5 <= left <= 5 + every + delay
    assert first[0] == RANKS - 1
    assert all(all(map(torch.equal, first[1], end)) for _, end in others)


SHARES = pytest.mark.parametrize(
    "shares",
    [{"buffers": "average"}, {"inner_state": "average"}, {"verify": 2}, {}],
    ids=["buffers", "inner_state", "verify", "averaged_model"],
)


@pytest.mark.parametrize("kind", ["Overlap", "CoCoD", "EASGD"])
@SHARES
def test_a_rank_dies_where_the_faster_have_launched_and_the_slower_have_not(kind, shares):
    """All that is shared comes in one order on the survivors, whatever each had begun in the group before."""

    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        model, optimizer = new(kind, Elastic(comm), **shares)
        for step in range(3 * EVERY):
            comm.elapse(SECONDS * (1 + 1.3 * (comm.rank > 0)))
            launches[comm.rank, step] = comm.clock()
            take_step(kind, model, optimizer, comm.rank, step)
            if not shares:
                with optimizer.averaged_model():
                    pass
        optimizer.finish()
        return kept(model, optimizer, alike=True)

    launches = {}
    SimulatedWorld(3).run(body)  # when the slower launch first, the faster come to the next boundary
    first, second, _ = SimulatedWorld(3, faults=[Dies(2, at=launches[1, EVERY - 1] - 0.1 * SECONDS)]).run(body)
    assert same(first, second)


@pytest.mark.parametrize("counts", [(4, 6, 7), (7, 5, 5)])
@pytest.mark.parametrize("delay", [0, 1, 3])
@SHARES
def test_fragments_of_ranks_with_different_numbers_of_steps(shares, delay, counts):
    def body(comm):
        comm.elapse(comm.rank * 1e-9)
        model = Model()
        optimizer = StreamingDiLoCo(
            SGD(model.parameters()), comm=Elastic(comm), model=model, sync_every=2, fragments=2, delay=delay, **shares
        )
        for step in range(counts[comm.rank]):
            comm.elapse(SECONDS)
            take_step("", model, optimizer, comm.rank, step)
        optimizer.finish()
        return kept(model, optimizer, alike=True)

    first, *others = SimulatedWorld(3).run(body)
    assert all(same(first, other) for other in others)
