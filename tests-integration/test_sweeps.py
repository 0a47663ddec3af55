"""The published variants that only the sweeps have: what their residual rules lose, and what δ is."""

from itertools import combinations

import torch
from communicators import SimulatedWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import sparse_allreduce
from sparse_compress import topk

from bench.convergence.training import trained
from bench.convergence.ways import Run
from bench.sweeps.delta import KEPT, Observed, deltas
from bench.sweeps.residuals import with_residuals
from bench.sweeps.settings import OURS, observed
from bench.sweeps.settings import settings as all_settings


def lost(algorithm, rule, inputs, k):
    """What is in no total and in no residual, by index."""
    entry = with_residuals(algorithm, rule)
    sent = [topk(x, k) for x in inputs]
    found = SimulatedWorld(len(inputs)).run(lambda comm: sparse_allreduce(sent[comm.rank], comm, k=k, algorithm=entry))
    kept = found[0].total.to_dense() + sum(one.dropped.to_dense() for one in found)
    return sum(vector.to_dense() for vector in sent) - kept


vectors = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-9, 9).map(float), min_size=12, max_size=12), min_size=size, max_size=size
    )
)


@given(vectors, st.integers(1, 6), st.sampled_from(["gtopk", "spardl"]))
@settings(max_examples=25, deadline=None)
def test_only_ours_loses_nothing_and_partial_loses_only_where_the_result_has_something(rows, k, algorithm):
    inputs = [torch.tensor(row) for row in rows]
    assert not lost(algorithm, "global", inputs, k).any()
    gone = lost(algorithm, "partial", inputs, k)
    sent = [topk(x, k) for x in inputs]
    whole = SimulatedWorld(len(inputs)).run(
        lambda comm: sparse_allreduce(sent[comm.rank], comm, k=k, algorithm=algorithm)
    )
    in_result = torch.zeros(12, dtype=torch.bool)
    in_result[whole[0].total.indices.long()] = True
    assert not gone[~in_result].any()


def test_the_published_rule_loses_what_is_cut_where_another_ranks_part_survives():
    """Rank 1's 2 is cut when it meets rank 0's 3; index 0 survives by ranks 2 and 3."""
    inputs = [torch.tensor(row) for row in ([0.0, 3.0], [2.0, 0.0], [9.0, 0.0], [9.0, 0.0])]
    assert lost("gtopk", "partial", inputs, 1).tolist() == [2.0, 0.0]
    assert lost("gtopk", "local", inputs, 1).tolist() == [2.0, 3.0]
    assert lost("gtopk", "global", inputs, 1).tolist() == [0.0, 0.0]


@given(st.lists(st.lists(st.floats(-9, 9), min_size=10, max_size=10), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=50)
def test_top_k_of_the_sum_is_never_worse_than_random_and_nothing_is_as_bad_as_all(rows, k):
    parts = [torch.tensor(row) for row in rows]
    whole = sum(part.double() for part in parts)
    if not float(whole.square().sum()) > 1e-12:
        return
    found = deltas(parts, k, torch.zeros(10))
    assert set(found) == set(KEPT)
    assert found["top-k of the sum"] <= 1 + 1e-9
    assert abs(found["gtopk"] - 1 / (1 - k / 10)) < 1e-9  # all of s is missing


def test_random_k_is_expected_to_miss_what_delta_divides_by():
    """Over every choice of k of n, not over draws."""
    s, k = torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0]), 2
    missed = [float(s.square().sum() - s[list(chosen)].square().sum()) for chosen in combinations(range(5), k)]
    delta = deltas([s], k, torch.zeros(5))["gtopk"]
    assert abs(float(s.double().square().sum()) / delta - sum(missed) / len(missed)) < 1e-9


def test_looking_at_a_training_changes_no_bit_of_it():
    run, watch = Run("cnn-digits", "sgd", "it", 0.01, 0.0, 3, 0, 14), Observed()
    assert trained(run, ways={"it": OURS}) == trained(run, ways={"it": observed(watch)})
    assert [point["step"] for point in watch.points()] == [1, 13]


def test_each_sweep_has_ours_at_every_density_that_it_has():
    rows = list(all_settings())
    ours = {(row.sweep, row.density) for row in rows if "ours" in row.name}
    assert ours == {(row.sweep, row.density) for row in rows}
