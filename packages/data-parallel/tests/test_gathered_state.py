"""One state of all ranks, for a checkpoint that rank 0 alone writes: who loads it goes on as from its own."""

import io
from contextlib import nullcontext

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer, reshard_residuals
from hypothesis import given
from hypothesis import strategies as st
from replicas.states import gather_states
from torch import nn

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Adam behind a sparse")]

KINDS = [
    {},
    {"momentum": 0.9, "algorithm": "oktopk"},
    {"inner": torch.optim.Adam},
    {"inner": torch.optim.Adam, "kind": UpdateOptimizer},
    {"algorithm": "powersgd", "options": {"dense_steps": 1}},
    {"algorithm": "dense"},
]


def made(comm, inner=torch.optim.SGD, kind=DistributedOptimizer, **options):
    shapes = {"a": (2, 3), "b": (40,)}
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    optimizer = kind(inner(model.parameters(), lr=0.1), model.named_parameters(), comm=comm, **options)
    return model, optimizer


def train(model, optimizer, rank, steps, *, updates=False):
    for step in steps:
        generator = torch.Generator().manual_seed(17 * step + rank)
        with optimizer.ahead() if updates else nullcontext():
            for p in model.values():
                p.grad = None
                (p * torch.randint(-9, 10, p.shape, generator=generator)).sum().backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat(model):
    return torch.cat([p.detach().view(-1) for p in model.values()])


def saved_at(step, size, options):
    """On rank 0, what all of them gathered; the model, which is the same everywhere; and where they end."""

    def rank(comm):
        model, optimizer = made(comm, **options)
        train(model, optimizer, comm.rank, range(step), updates="kind" in options)
        state, model_then = optimizer.gathered_state_dict(), {n: p.detach().clone() for n, p in model.items()}
        train(model, optimizer, comm.rank, range(step, step + 3), updates="kind" in options)
        return state, model_then, flat(model)

    return SimulatedWorld(size).run(rank)


@pytest.mark.slow
@given(size=st.integers(1, 5), step=st.integers(0, 4), options=st.sampled_from(KINDS))
def test_going_on_from_one_state_of_all_ends_in_the_same_bits(size, step, options):
    whole = saved_at(step, size, options)
    assert [state for state, *_ in whole[1:]] == [{}] * (size - 1)
    state, model_then, _ = whole[0]

    def resumed(comm):
        model, optimizer = made(comm, **options)
        model.load_state_dict(model_then)
        optimizer.load_state_dict(through_a_file(state))  # each reads it for itself
        train(model, optimizer, comm.rank, range(step, step + 3), updates="kind" in options)
        return flat(model)

    for ended, (*_, expected) in zip(SimulatedWorld(size).run(resumed), whole, strict=True):
        assert torch.equal(ended, expected)


@pytest.mark.parametrize("options", [{}, {"inner": torch.optim.Adam, "kind": UpdateOptimizer}])
def test_another_number_of_ranks_is_pointed_to_reshard_residuals(options):
    state, model_then, _ = saved_at(2, 4, options)[0]

    def resumed(comm):
        model, optimizer = made(comm, **options)
        before = optimizer.state_dict()
        said = r"holds those of 4 ranks, but there are 2 now: .* data_parallel.reshard_residuals\(states, size\)"
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(before)
        model.load_state_dict(model_then)
        optimizer.load_state_dict(reshard_residuals(state, comm.size)[comm.rank])
        train(model, optimizer, comm.rank, range(1), updates="kind" in options)
        return flat(model)

    one, other = SimulatedWorld(2).run(resumed)
    assert torch.equal(one, other)


def test_what_ranks_have_alike_is_held_once():
    state = saved_at(2, 4, {"inner": torch.optim.Adam})[0][0]
    assert "exp_avg" in str(state["state"])
    assert all(list(own) == ["distributed"] for own in state["distributed"]["ranks"])


def test_one_rank_that_cannot_is_named_on_all():
    def rank(comm):
        model, optimizer = made(comm)
        optimizer._synchronized = comm.rank == 1  # amid a step
        with pytest.raises((RuntimeError, CollectiveError)) as raised:
            optimizer.gathered_state_dict()
        optimizer._synchronized = False
        train(model, optimizer, comm.rank, range(1))
        return str(raised.value)

    others, own, _ = SimulatedWorld(3).run(rank)
    assert own == "state_dict() while a step is under way: call it after step()"
    assert others == f"rank 1 cannot give its state: RuntimeError: {own}"


def test_one_rank_alone_is_no_list_for_resharding():
    with pytest.raises(TypeError, match="one rank's state given, expected those of all ranks"):
        reshard_residuals(saved_at(1, 1, {})[0][0]["distributed"]["ranks"][0], 2)


@pytest.mark.parametrize("states", [[{"distributed": {"rank": 0, "world_size": 1, "algorithm": "LocalSGD"}}], [{}]])
def test_states_of_other_optimizers_are_not_resharded(states):
    with pytest.raises(ValueError, match=r"states that lack \[.*'algorithm_state'\] given, expected those of a Distri"):
        reshard_residuals(states, 2)


@given(size=st.integers(1, 5), numels=st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_chunks_of_any_size_arrive_whole(size, numels):
    def rank(comm):
        own = {"x": torch.arange(numels[comm.rank]) + comm.rank, "rank": comm.rank}
        states = gather_states(lambda: own, comm)
        return states if states is None else [(state["rank"], state["x"].tolist()) for state in states]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replicas.states.CHUNK_BYTES", 1000)  # a state is of about two of them
        first, *others = SimulatedWorld(size).run(rank)
    assert others == [None] * (size - 1)
    assert first == [(r, list(range(r, r + numels[r]))) for r in range(size)]
