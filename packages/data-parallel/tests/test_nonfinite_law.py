"""The law: a gradient that is not finite on any rank is an error, or a skipped step, on every rank.

Whatever the algorithm, wire and compressor; and nothing of it waits in a residual.
"""

import pytest
import torch
from communicators import CollectiveError, Schedule, SimulatedWorld
from data_parallel import DistributedOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, WIRES, Reduction
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_compress import DGCTopK, GaussianK, RandomK, SparseVector, Threshold, ThresholdReuse, TopK
from torch import nn

SHAPES = {"a": (5, 3), "b": (7,), "c": (40,), "d": (1,)}
HALF = ("bf16", "fp16")  # of whole gradients
COMPRESSORS = {
    "TopK": lambda: TopK(0.1),
    "RandomK": lambda: RandomK(0.05),
    "ThresholdReuse": lambda: ThresholdReuse(0.1, every=2),
    "DGCTopK": lambda: DGCTopK(0.1),
    "GaussianK": lambda: GaussianK(0.1),
    "Threshold": lambda: Threshold(1.0, 0.2),
}


def combinations():
    for name, entry in ALGORITHMS.items():
        prescribes = not entry.selects or entry.prescribes
        for compressor in ["TopK"] if prescribes else COMPRESSORS:
            yield pytest.param(name, COMPRESSORS[compressor], id=f"{name}-{compressor}")


def run(comm, bad, *, steps, nonfinite, name, compressor, wire, bucket_bytes, momentum):
    """Steps with drawn gradients; in the second one `bad` puts values into those of some ranks."""
    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(shape)) for key, shape in SHAPES.items()})
    momentum = momentum if ALGORITHMS[name].selects else 0.0
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        comm=comm,
        algorithm=name,
        compressor=compressor(),
        wire=wire,
        bucket_bytes=bucket_bytes,
        momentum=momentum,
        nonfinite=nonfinite,
    )
    told = None
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        for key, p in model.items():
            p.grad = torch.randn(p.shape, generator=generator)
            for element, value in bad.get((comm.rank, key), {}).items() if step == 1 else ():
                p.grad.view(-1)[element % p.numel()] = value
        try:
            optimizer.step()
        except CollectiveError as error:
            told = str(error)
            break
    kept = optimizer.state_dict()["distributed"]
    finite = all(bool(t.isfinite().all()) for part in ("residuals", "velocities") for t in kept[part].values())
    return told, optimizer.skipped, finite, all(bool(p.isfinite().all()) for p in model.values())


values = st.sampled_from([float("nan"), float("inf"), -float("inf")])


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "compressor"), list(combinations()))
@settings(max_examples=settings.default.max_examples // 4)
@given(
    wire=st.sampled_from(list(WIRES)),
    size=st.sampled_from([1, 2, 3, 4, 5, 8]),
    bad=st.dictionaries(
        st.tuples(st.integers(0, 7), st.sampled_from(list(SHAPES))),
        st.dictionaries(st.integers(0, 39), values, min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    ),
    bucket_bytes=st.sampled_from([None, 64]),
    momentum=st.sampled_from([0.0, 0.5]),
)
def test_an_error_or_a_skipped_step_on_every_rank(name, wire, compressor, size, bad, bucket_bytes, momentum):
    bad = {(rank % size, key): found for (rank, key), found in bad.items()}
    if not ALGORITHMS[name].selects and wire not in HALF:
        wire = "fp32"
    options = {"name": name, "compressor": compressor, "wire": wire, "bucket_bytes": bucket_bytes, "momentum": momentum}

    raised = SimulatedWorld(size).run(lambda comm: run(comm, bad, steps=2, nonfinite="raise", **options))
    assert len({told for told, *_ in raised}) == 1
    told, _, _, weights_finite = raised[0]
    assert told is not None
    assert weights_finite
    assert any(f"rank {rank}: the gradient of {key!r} is not finite" in told for rank, key in bad), told

    skipped = SimulatedWorld(size).run(lambda comm: run(comm, bad, steps=3, nonfinite="skip", **options))
    assert skipped == [(None, 1, True, True)] * size


class Hiding(GTopK):
    """Drops what is not finite where nobody else sees it."""

    name = "hiding"

    def schedule(self, sparse: SparseVector, rank: int, size: int, k: int, state=None) -> Schedule[Reduction]:
        bad = ~sparse.values.isfinite()
        kept = SparseVector(sparse.indices, torch.where(bad, 0.0, sparse.values), sparse.numel)
        reduction = yield from super().schedule(kept, rank, size, k)
        return Reduction(reduction.total, SparseVector(sparse.indices[bad], sparse.values[bad], sparse.numel))


@pytest.mark.quick
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_algorithm_that_hides_it_is_told(nonfinite, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "hiding", Hiding())
    bad = {(0, "c"): {3: float("nan")}}
    options = {
        "name": "hiding",
        "compressor": COMPRESSORS["TopK"],
        "wire": "fp32",
        "bucket_bytes": None,
        "momentum": 0.0,
    }
    [(told, *_)] = SimulatedWorld(1).run(lambda comm: run(comm, bad, steps=2, nonfinite=nonfinite, **options))
    assert "what rank 0 is to keep is not finite although the total is" in told
