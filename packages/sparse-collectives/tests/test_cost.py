"""The cost model against the virtual clock of the simulated world, which runs the real schedules."""

import pytest
import torch
from communicators import Link, SimulatedWorld, run
from sparse_collectives import ALGORITHMS
from sparse_collectives.algorithms import algorithm_named
from sparse_collectives.cost import Handling, Prediction, predict, predict_all, step_seconds
from sparse_compress import topk, wire_nbytes

MERGE = 20e-9


def simulated_seconds(name, size, numel, k, link):
    """Virtual seconds of one call."""

    def body(comm):
        entry = ALGORITHMS[name]
        sparse = topk(torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)), k)
        extra = {} if entry.initial_state is None else {"state": entry.initial_state()}
        schedule = entry.schedule(sparse, comm.rank, size, k, cost=lambda count: MERGE * count, **extra)
        run(schedule, comm, facts="timed")

    world = SimulatedWorld(size, link=link)
    world.run(body)
    return world.elapsed


LATENCY, BANDWIDTH = Link(1e-3, 1e-10), Link(1e-6, 1e-7)


CASES = [*((size, link) for size in (2, 3, 6, 14) for link in (LATENCY, BANDWIDTH)), (33, LATENCY), (64, BANDWIDTH)]


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.exact or entry.typical])
@pytest.mark.parametrize(("size", "link"), CASES)
def test_model_and_simulated_world_agree(name, size, link):
    numel, k = 4_200, 84
    simulated = simulated_seconds(name, size, numel, k, link)
    predicted = predict(name, size=size, numel=numel, k=k, link=link, handling=Handling(merge=MERGE))
    if name == "gtopk" and size & (size - 1):  # whether a message finds its port free depends on the order of events
        message = link.seconds(wire_nbytes(k))
        assert predicted.exchange - 1.02 * message <= simulated <= predicted.exchange + 1.02 * message
    else:
        uneven = 0.0 if ALGORITHMS[name].exact else 0.15  # of 84 entries a block gets more or fewer by chance
        assert predicted.exchange == pytest.approx(simulated, rel=0.05 + uneven)


@pytest.mark.parametrize(
    "name", [name for name, entry in ALGORITHMS.items() if entry.merged is not None and entry.exact]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 14])
def test_merged_entries_are_those_that_the_schedule_names(name, size):
    entry, counted = ALGORITHMS[name], [0] * size

    def body(comm):
        def cost(count):
            counted[comm.rank] += count
            return 0.0

        run(entry.schedule(topk(torch.ones(50), 4), comm.rank, size, 4, cost=cost), comm, facts="counted")

    SimulatedWorld(size).run(body)
    if size > 1:
        assert counted == [entry.merged(rank, size, 4, 50) for rank in range(size)]


@pytest.mark.parametrize("options", [{"teams": 2}, {"teams": 4}, {"teams": 3}, {"teams": 2, "sag": "b-sag"}])
def test_spardl_in_teams_counts_the_merges_between_them_too(options):
    def body(comm):
        def cost(count):
            counted[comm.rank] += count
            return 0.0

        entry = algorithm_named("spardl", options, size=12)
        run(entry.schedule(topk(torch.ones(96), 24), comm.rank, 12, 24, cost=cost), comm, facts="counted")
        return entry.merged(comm.rank, 12, 24, 96)

    counted = [0] * 12
    assert SimulatedWorld(12).run(body) == counted


def test_one_rank_exchanges_nothing():
    for name in ALGORITHMS:
        assert predict(name, size=1, numel=100, k=10, link=Link(), handling=Handling(0, 1e-9)).seconds == 0


def test_dense_in_bfloat16_sends_half_the_bytes():
    found = {p.name: p for p in predict_all(size=4, numel=10**6, link=Link(), handling={})}
    headers = 4 * 16
    assert found["dense in bf16"].nbytes - headers == (found["dense"].nbytes - headers) / 2


def test_fastest_first_over_every_density():
    found = predict_all(size=8, numel=10**6, link=Link(), handling={0.01: Handling(), 0.001: Handling()})
    sparse = sum(entry.compresses for entry in ALGORITHMS.values())
    assert len(found) == 2 * sparse + 2
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert found[0].density == 0.001


def test_overlap_hides_what_backward_covers_but_never_the_last_bucket():
    prediction = Prediction("dense", 25 << 20, 1.0, torch.float32, 0, 1, 0.0, 0.0, 8.0, 0.0)  # 4 buckets of 2 s
    assert step_seconds(prediction, compute=10.0) == 18.0
    assert step_seconds(prediction, compute=10.0, backward=6.0) == 12.0
    assert step_seconds(prediction, compute=10.0, backward=7.5) == 12.0
    assert step_seconds(prediction, compute=10.0, backward=1.0) == 17.0
