"""SparDL: teams, budgets, the state, bytes and what it becomes in the limits."""

import copy

import pytest
import torch
from communicators import CollectiveError, Dies, SimulatedWorld, testing
from data_parallel import DistributedOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import sparse_allreduce
from sparse_collectives.algorithms.spardl import SparDL
from sparse_collectives.algorithms.spardl_blocks import block_budgets
from sparse_compress import SparseVector, topk
from torch import nn

pytestmark = pytest.mark.quick

TEAMS = [  # ranks, teams, Spar-All-Gather
    (2, 2, "r-sag"),
    (6, 2, "r-sag"),
    (8, 4, "r-sag"),
    (3, 3, "b-sag"),
    (6, 3, "b-sag"),
    (8, 2, "b-sag"),
    (14, 7, "auto"),
]


def spardl(vectors, k, state=None, **options):
    """Results in rank order; states, one a rank, are changed."""
    world = SimulatedWorld(len(vectors))

    def body(comm):
        own = None if state is None else state[comm.rank]
        return sparse_allreduce(vectors[comm.rank], comm, k=k, algorithm="spardl", options=options, state=own)

    return world.run(body), world


def integers(size, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [topk(torch.randint(-99, 100, (n,), generator=generator).float(), k) for _ in range(size)]


@pytest.mark.few(5)
@pytest.mark.parametrize(("size", "teams", "sag"), TEAMS)
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_laws_in_teams(size, teams, sag, data):
    dense = data.draw(testing.inputs(sizes=st.just(size), numels=st.integers(1, 60)))
    k, step = data.draw(st.integers(1, len(dense[0]) + 3)), data.draw(st.integers(0, 20))
    state = {**SparDL().initial_state(), "step": step, "entries": data.draw(st.integers(1, 9)), "of": [k, size, teams]}
    options = {"teams": teams, "sag": sag}

    def traffic(rank, size):
        sent = SparDL(**options).sent(rank, size, k, len(dense[0]), torch.float32, state=state)
        return sent.nbytes, sent.messages

    testing.check_laws(
        lambda comm, sparse: sparse_allreduce(
            sparse, comm, k=k, algorithm="spardl", options=options, state=copy.deepcopy(state)
        ),
        [topk(x, k) for x in dense],
        dense=SparseVector.to_dense,
        total=lambda reduction: reduction.total.to_dense(),
        dropped=lambda reduction: reduction.dropped.to_dense(),
        traffic=traffic,
    )


@pytest.mark.parametrize(("size", "teams", "sag"), TEAMS)
def test_ranks_of_all_teams_agree_on_floats(size, teams, sag):
    """A sum that begins with the own team's part rounds otherwise in every team."""
    vectors = [topk(torch.randn(40, generator=torch.Generator().manual_seed(rank)), 30) for rank in range(size)]
    results, _ = spardl(vectors, 30, teams=teams, sag=sag)
    assert all(torch.equal(one.total.pack()[16:], results[0].total.pack()[16:]) for one in results)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 3, 20, 50])
def test_as_many_teams_as_ranks_are_gtopk_in_bits(size, k):
    vectors = [topk(torch.randn(50, generator=torch.Generator().manual_seed(rank)), k) for rank in range(size)]
    results, _ = spardl(vectors, k, teams=size, sag="r-sag")
    others = SimulatedWorld(size).run(lambda c: sparse_allreduce(vectors[c.rank], c, k=k, algorithm="gtopk"))
    for one, other in zip(results, others, strict=True):
        assert torch.equal(one.total.pack()[16:], other.total.pack()[16:])
        assert torch.equal(one.dropped.to_dense(), other.dropped.to_dense())


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 12, 14, 16, 33, 64])
def test_bytes_of_one_team_are_the_papers(size):
    """4k(P − 1)/P elements of 4 bytes in 2⌈log P⌉ messages, each with a slot of 16 bytes."""
    k, rounds = 2 * size, 2 * (size - 1).bit_length()
    _, world = spardl(integers(size, 4 * k, k), k)
    assert world.bytes_sent == [4 * 4 * k * (size - 1) // size + 16 * rounds] * size
    assert world.messages_sent == [rounds] * size


@pytest.mark.parametrize(("size", "d"), [(4, 2), (6, 2), (16, 4), (14, 2), (64, 8)])
def test_bytes_in_teams_are_the_papers(size, d):
    """2k(2P − 2d)/P elements inside the teams, and between them 2k·d·log d/P (R-SAG), 2k(d² − d)/P (B-SAG, first)."""
    k, inside, log = 2 * size, 2 * (size // d - 1).bit_length(), d.bit_length() - 1
    for sag, elements, headers in (
        ("r-sag", 2 * k * d * log // size, 32 * log),
        ("b-sag", 2 * k * (d * d - d) // size, 16 * log),
    ):
        _, world = spardl(integers(size, 4 * k, k), k, teams=d, sag=sag)
        elements += 2 * k * (2 * size - 2 * d) // size
        assert world.bytes_sent == [4 * elements + 16 * inside + headers] * size
        assert world.messages_sent == [inside + log] * size


@given(numel=st.integers(1, 99), blocks=st.integers(1, 20), k=st.integers(1, 110))
def test_budgets(numel, blocks, k):
    turns = [block_budgets(k, numel, blocks, step) for step in range(min(blocks, numel))]
    lengths = [(b + 1) * numel // blocks - b * numel // blocks for b in range(blocks)]
    for budgets in turns:
        assert 1 <= sum(budgets) <= min(k, numel)
        assert all(0 <= budget <= length for budget, length in zip(budgets, lengths, strict=True))
        assert k < numel or budgets == lengths
        assert k < blocks or all(budgets) or numel < blocks
    assert all(any(column) == bool(length) for *column, length in zip(*turns, lengths, strict=True))


def test_fewer_entries_than_ranks_still_send_every_index_in_turn():
    """The published code fails where k/P < 1; with fixed budgets three quarters of the indices would never be sent."""
    size, n, k = 8, 32, 2
    states, given = [SparDL().initial_state() for _ in range(size)], torch.ones(n)
    residuals, applied = [torch.zeros(n) for _ in range(size)], torch.zeros(n)
    for step in range(4 * size):
        accs = [residual + given * (step == 0) for residual in residuals]
        sent = [SparDL().select(acc, rank, size, k, states[rank])(acc) for rank, acc in enumerate(accs)]
        assert all(len(s) == k for s in sent)
        results, _ = spardl(sent, k, states)
        residuals = [acc - s.to_dense() + r.dropped.to_dense() for acc, s, r in zip(accs, sent, results, strict=True)]
        applied += results[0].total.to_dense()
    assert torch.equal(applied + sum(residuals), size * given)
    assert bool((applied > 0).all())


def test_what_is_cut_to_the_budgets_first_is_dropped():
    """All k largest lie in block 0, which may have one."""
    vectors = [topk(torch.tensor([5.0, 4, 0, 0]), 2), topk(torch.tensor([5.0, 4, 0, 0]), 2)]
    results, _ = spardl(vectors, 2)
    assert results[0].total.to_dense().tolist() == [10, 0, 0, 0]
    assert [result.dropped.to_dense().tolist() for result in results] == [[0, 4, 0, 0]] * 2


def test_a_selection_by_blocks_needs_no_cut():
    acc = torch.tensor([9.0, 8, 7, 0, 1, 0, 0, 2])
    chosen = SparDL().select(acc, 0, 2, 4, None)(acc)
    assert chosen.to_dense().tolist() == [9, 8, 0, 0, 1, 0, 0, 2]
    results, _ = spardl([chosen, chosen], 4)
    assert torch.equal(results[0].total.to_dense(), 2 * chosen.to_dense())
    assert not results[0].dropped.to_dense().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_value_that_is_not_finite_shows_even_where_its_block_has_no_budget(value, step):
    acc = torch.ones(8)
    acc[5] = value
    states = [{**SparDL().initial_state(), "step": step} for _ in range(4)]
    vectors = [SparDL().select(acc, rank, 4, 1, states[rank])(acc if rank == 2 else torch.ones(8)) for rank in range(4)]
    assert 5 in vectors[2].indices[~torch.isfinite(vectors[2].values)]
    results, _ = spardl(vectors, 1, states)
    assert all(not torch.isfinite(result.total.values).all() for result in results)


def test_entries_between_teams_adapt_to_how_much_they_overlap():
    """B-SAG: three teams of one; B = 12. Where all select alike the union has 12 entries, else 3h."""
    alike, apart = (
        [topk(torch.arange(36.0), 12)] * 3,
        [topk(torch.eye(3)[r].repeat_interleave(12), 12) for r in range(3)],
    )
    states = [SparDL().initial_state() for _ in range(3)]
    seen = []
    for vectors in (apart, apart, alike, alike, apart):
        results, world = spardl(vectors, 12, states, teams=3)
        assert len(results[0].total) == 12
        assert len({state["entries"] for state in states}) == 1
        seen.append((world.bytes_sent[0], states[0]["entries"]))
    entry = 2 * 8
    assert SparDL(teams=3).typical(0, 3, 12, 36, torch.float32).nbytes == seen[1][0]
    assert seen == [
        (12 * entry + 32, 4),
        (4 * entry + 32, 4),
        (4 * entry + 32, 12),
        (12 * entry + 32, 12),
        (12 * entry + 32, 4),
    ]


def test_entries_between_teams_start_anew_for_another_k():
    states = [SparDL().initial_state() for _ in range(3)]
    spardl(integers(3, 60, 12), 12, states, teams=3)
    assert states[0]["entries"] < 12
    _, world = spardl(integers(3, 60, 11), 11, states, teams=3)
    assert world.bytes_sent[0] == 2 * 11 * 8 + 32


def test_the_state_changes_only_on_success():
    states = [SparDL().initial_state() for _ in range(3)]

    def body(comm):
        with pytest.raises(CollectiveError):
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3, algorithm="spardl", state=states[comm.rank])

    SimulatedWorld(3, faults=[Dies(rank=1, message=3)]).run(body)
    assert [state["step"] for state in states if state["step"]] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"teams": 4}, "teams is 4, expected a divisor of the 6 ranks: 1, 2, 3, 6"),
        ({"teams": 0}, "teams is 0"),
        ({"teams": 3, "sag": "r-sag"}, "needs a power of two of teams, not 3: take sag='b-sag'"),
        ({"sag": "ring"}, "sag is 'ring', expected one of auto, r-sag, b-sag"),
        ({"team": 2}, "spardl has no option team; it takes: teams, sag"),
    ],
)
def test_wrong_options_are_told_on_every_rank(options, says):
    def body(comm):
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=says):
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3, algorithm="spardl", options=options)
        with pytest.raises(ValueError, match=says):
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 1.0),
                model.named_parameters(),
                comm=comm,
                algorithm="spardl",
                options=options,
            )
        return comm.bytes_sent

    assert SimulatedWorld(6).run(body) == [0] * 6


def test_ranks_with_other_options():
    def body(comm):
        with pytest.raises(CollectiveError, match=r"ranks disagree.*teams=1.*teams=2") as error:
            sparse_allreduce(
                topk(torch.ones(9), 3), comm, k=3, algorithm="spardl", options={"teams": 1 + comm.rank // 3}
            )
        return str(error.value)

    assert len(set(SimulatedWorld(4).run(body))) == 1
