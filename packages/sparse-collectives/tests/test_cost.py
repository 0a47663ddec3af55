"""The cost model against the virtual clock of the simulated world, which runs the real schedules."""

import pytest
import torch
from communicators import Link, SimulatedWorld, run, schedules
from sparse_collectives import ALGORITHMS, Traffic, sparse_allreduce
from sparse_collectives.algorithms import gtopk, spardl_blocks
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.algorithms.topk_dsa import TopKDSA
from sparse_collectives.prediction.cost import (
    HANDLING,
    Handling,
    Prediction,
    predict,
    predict_all,
    ranks_of_interest,
    step_seconds,
    with_whole,
)
from sparse_compress import topk, wire_nbytes

MERGING = Handling(merge=dict.fromkeys(ALGORITHMS, 4e-9))
OKTOPK = ALGORITHMS["oktopk"]


@pytest.mark.parametrize("size", [*range(1, 10), 16, 33])
def test_traffic_of_a_dense_sum_is_that_of_the_schedule(size):
    """On both sides of each change of schedule."""
    for numel in (0, 1, 819, 820, 1024, 1025, 4096, 4097, (1 << 14) - 1, 1 << 14):
        world = SimulatedWorld(size)
        world.run(lambda comm, n=numel: run(schedules.allreduce(torch.ones(n), comm.rank, size), comm))
        predicted = [Traffic.allreduce(4 * numel, rank, size, 4) for rank in range(size)]
        assert world.bytes_sent == [one.nbytes for one in predicted], numel
        assert world.messages_sent == [one.messages for one in predicted], numel


def simulated_seconds(name, size, numel, k, link, **options):
    """Virtual seconds of one call in the midst of training: a second one, whose gradients and residuals are larger."""
    world, states = SimulatedWorld(size, link=link), [ALGORITHMS[name].initial_state() for _ in range(size)]

    def body(comm, call):
        generator = torch.Generator().manual_seed(comm.rank + size * call)
        sparse = topk(call * torch.randn(numel, generator=generator), k)
        schedule = resolve(name, options, size=size).schedule(sparse, comm.rank, size, k, states[comm.rank])
        run(schedule, comm, facts="timed")

    for call in (1, 2) if states[0] is not None else (2,):
        world.run(lambda comm, call=call: body(comm, call))
    return world.elapsed


LATENCY, BANDWIDTH = Link(1e-3, 1e-10), Link(1e-6, 1e-7)


CASES = [*((size, link) for size in (2, 3, 6, 14) for link in (LATENCY, BANDWIDTH)), (33, LATENCY), (32, BANDWIDTH)]


@pytest.mark.few(9)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("size", "link"), CASES)
def test_model_and_simulated_world_agree(name, size, link):
    numel, k = 42_000, 840
    simulated = simulated_seconds(name, size, numel, k, link)
    predicted = predict(name, size=size, numel=numel, k=k, link=link)
    rounds = {ALGORITHMS[name].sent(rank, size, k, numel, torch.float32).rounds for rank in range(size)}
    if len(rounds) > 1:  # ranks out of step: whether a message finds its port free depends on the order of events
        message = link.seconds(wire_nbytes(k))
        assert predicted.exchange - 1.02 * message <= simulated <= predicted.exchange + 1.02 * message
    else:
        uneven = 0.0 if ALGORITHMS[name].exact else 0.1  # a block gets more or fewer of 840 entries by chance
        assert predicted.exchange == pytest.approx(simulated, rel=0.05 + uneven)


@pytest.mark.parametrize("link", [LATENCY, BANDWIDTH])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (12, {"teams": 2}),
        (12, {"teams": 4}),
        (12, {"teams": 3}),
        (14, {"teams": 7}),
        (12, {"teams": 6, "sag": "b-sag"}),
    ],
)
def test_model_and_simulated_world_agree_in_teams(size, options, link):
    numel, k = 8_400, 24 * size
    simulated = simulated_seconds("spardl", size, numel, k, link, **options)
    predicted = predict("spardl", size=size, numel=numel, k=k, link=link, options=options)
    assert predicted.exchange == pytest.approx(simulated, rel=0.1)


@pytest.mark.parametrize("size", [2, 6])
def test_typical_traffic_of_oktopk_is_the_mean_of_calls_in_training(size):
    """While gradients stay as large as they are. Of 32 calls one agrees on boundaries; in none are only k sums."""
    numel, k, calls = 20_000, 200, 32
    states, residuals = [OKTOPK.initial_state() for _ in range(size)], [torch.zeros(numel) for _ in range(size)]
    counts = torch.zeros(2)
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        accs = [residual + torch.randn(numel, generator=generator) for residual in residuals]
        sent = [OKTOPK.select(acc, rank, size, k, states[rank])(acc) for rank, acc in enumerate(accs)]
        world, given = SimulatedWorld(size), {"k": k, "algorithm": "oktopk"}
        results = world.run(
            lambda c, sent=sent, given=given: sparse_allreduce(sent[c.rank], c, state=states[c.rank], **given)
        )
        residuals = [acc - s.to_dense() + r.dropped.to_dense() for acc, s, r in zip(accs, sent, results, strict=True)]
        counts += torch.tensor([max(world.bytes_sent), max(world.messages_sent)]) / calls
    typical = [OKTOPK.typical(rank, size, k, numel, torch.float32) for rank in range(size)]
    said = [max(sent[part] for sent in typical) for part in (0, 1)]
    assert counts.tolist() == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
@pytest.mark.parametrize(
    ("name", "options"), [("gtopk", {}), ("spardl", {}), *(("spardl", {"teams": teams}) for teams in (2, 4))]
)
def test_merged_entries_are_those_that_are_merged(name, options, size, monkeypatch):
    """Of all ranks together: both vectors of each merge, and of SparDL's blocks twice those that come."""
    if size % options.get("teams", 1):
        return
    counted, merge, merge_to_budgets = [], gtopk.merge, spardl_blocks.merge_to_budgets

    def counting(a, b, k):
        counted.append(len(a) + len(b))
        return merge(a, b, k)

    def counting_blocks(mine, theirs, *budgets):
        counted.append(2 * len(theirs))
        return merge_to_budgets(mine, theirs, *budgets)

    monkeypatch.setattr(gtopk, "merge", counting)
    monkeypatch.setattr(spardl_blocks, "merge_to_budgets", counting_blocks)
    entry = resolve(name, options, size=size)
    SimulatedWorld(size).run(
        lambda comm: run(entry.schedule(topk(torch.ones(96), 24), comm.rank, size, 24), comm, facts="counted")
    )
    assert sum(counted) == sum(entry.merged(rank, size, 24, 96) for rank in range(size))


class Twice(GTopK):
    """gTop-k that says it sends everything twice."""

    name = "twice"

    def sent(self, rank, size, k, numel, dtype):
        one = super().sent(rank, size, k, numel, dtype)
        return Traffic.total(one, one)


def test_an_algorithm_of_ones_own_is_predicted():
    situation = {"size": 8, "numel": 1000, "k": 10, "link": Link()}
    mine, gtopk = predict(Twice(), **situation), predict("gtopk", **situation)
    assert (mine.name, mine.nbytes, mine.rounds) == ("twice", 2 * gtopk.nbytes, 2 * gtopk.rounds)
    assert predict("gtopk", **{**situation, "k": 5000}).density == 1


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8-packed"])
def test_gradients_of_16_bits_are_predicted_on_all_wires(wire):
    """They travel as float32 does."""
    situation = {"size": 8, "numel": 1000, "k": 10, "link": Link(), "wire": wire}
    assert predict("gtopk", **situation, dtype=torch.bfloat16) == predict("gtopk", **situation)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"algorithm": "powersgd"}, ValueError, "unknown algorithm 'powersgd'; known: dense, topk-allgather"),
        ({"algorithm": "dense", "wire": "int8"}, ValueError, "unknown wire 'int8' of dense; known: fp32, bf16, fp16"),
        ({"dtype": torch.float64, "wire": "bf16"}, TypeError, "carries float32 values"),
        ({"numel": 0}, ValueError, "numel is 0, expected the number of elements, 1 or more"),
        ({"size": 0}, ValueError, "size is 0, expected the number of ranks, 1 or more"),
        ({"k": 0.5}, TypeError, "k is 0.5"),
    ],
)
def test_what_cannot_be_predicted_says_what_can(wrong, error, says):
    situation = {"algorithm": "gtopk", "size": 8, "numel": 1000, "k": 10, "link": Link(), **wrong}
    with pytest.raises(error, match=says):
        predict(situation.pop("algorithm"), **situation)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("size", "k"), [(65, 7), (96, 2000), (127, 5000), (128, 90), (144, 3000), (200, 20_000)])
def test_the_ranks_of_interest_stand_for_all(name, size, k):
    """As many rounds and messages as the busiest of all, and each message as long but for an entry of 12 bytes."""
    numel = 100_003
    for options in ALGORITHMS[name].variants(size):
        for wire in ("fp32", "int8-packed") if ALGORITHMS[name].selects else ("fp32",):
            entry = resolve(name, options, size=size, wire=wire)
            sent = [entry.typical(rank, size, k, numel, torch.float32) for rank in range(size)]
            few = [sent[rank] for rank in ranks_of_interest(size)]
            most = max(sent)
            assert {traffic.rounds for traffic in few} == {traffic.rounds for traffic in sent}
            assert max(traffic.messages for traffic in few) == max(traffic.messages for traffic in sent)
            assert max(few).nbytes >= most.nbytes - 12 * most.messages
            merged = [entry.merged(rank, size, k, numel) for rank in range(size)]
            assert max(merged[rank] for rank in ranks_of_interest(size)) >= max(merged) - 2 * most.messages


def test_every_rank_is_looked_at_up_to_64():
    assert all(list(ranks_of_interest(size)) == list(range(size)) for size in (1, 2, 33, 64))


def test_a_thousand_ranks_cost_no_more_than_a_few(monkeypatch):
    """An expression of one rank costs O(P), so one for each rank and variant would take minutes."""
    asked = []

    class Counted(TopKDSA):
        def typical(self, rank, size, k, numel, dtype):
            asked.append(rank)
            return super().typical(rank, size, k, numel, dtype)

    monkeypatch.setitem(ALGORITHMS, "counted", Counted())
    predicted = predict("counted", size=1000, numel=10**6, k=10**4, link=BANDWIDTH, handling=MERGING)
    assert predicted.nbytes == predict("topk-dsa", size=1000, numel=10**6, k=10**4, link=BANDWIDTH).nbytes
    assert 0 < len(asked) <= 6
    for _ in range(3):
        predict("counted", size=1000, numel=10**6, k=10**4, link=LATENCY, handling=MERGING)
    assert len(asked) <= 6


def test_one_rank_exchanges_nothing():
    for name in ALGORITHMS:
        assert predict(name, size=1, numel=100, k=10, link=Link(), handling=MERGING).seconds == 0


def test_dense_in_bfloat16_sends_half_the_bytes():
    found = {p.name: p for p in predict_all(size=4, numel=10**6, link=Link(), handling={})}
    headers = 4 * 16
    assert found["dense in bf16"].nbytes - headers == (found["dense"].nbytes - headers) / 2


def test_fastest_first_over_every_density():
    found = predict_all(size=8, numel=10**6, link=Link(), handling={0.01: Handling(), 0.001: Handling()})
    sparse = sum(len(entry.variants(8)) for entry in ALGORITHMS.values() if entry.selects)
    assert len(found) == 2 * sparse + 2
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert found[0].density == 0.001


def test_overlap_hides_what_backward_covers_but_never_the_last_bucket():
    prediction = Prediction("dense", 25 << 20, 1.0, "fp32", 0, 1, 0.0, 0.0, 8.0, 0.0)  # 4 buckets of 2 s
    assert step_seconds(prediction, compute=10.0) == 18.0
    assert step_seconds(prediction, compute=10.0, backward=6.0) == 12.0
    assert step_seconds(prediction, compute=10.0, backward=7.5) == 12.0
    assert step_seconds(prediction, compute=10.0, backward=1.0) == 17.0


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.1e-3, HANDLING, 50e-3])
def test_what_is_summed_whole_beside_a_selection_costs_its_bytes_and_the_handling_of_its_messages(size, alpha):
    """Its messages travel while those of the selection do, which are no fewer."""
    count, link = 840, Link(alpha, BANDWIDTH.beta)
    sparse = predict("gtopk", size=size, numel=100_000, k=1000, link=link)
    dense = predict("dense", size=size, numel=count, k=count, link=link)
    both = with_whole(sparse, count, size=size, link=link)
    for name in ("nbytes", "transfer"):
        assert getattr(both, name) == pytest.approx(getattr(sparse, name) + getattr(dense, name)), name
    assert both.rounds == sparse.rounds >= dense.rounds
    assert both.latency == pytest.approx(sparse.latency + dense.rounds * min(alpha, 5e-3))
    assert with_whole(sparse, 0, size=size, link=link) == sparse
    assert with_whole(dense, count, size=size, link=link) == dense
