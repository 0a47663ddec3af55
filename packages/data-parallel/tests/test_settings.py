"""Settings that are wrong, or would have no effect, are told at once, by the optimizer and the hook's state alike."""

from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import DistributedOptimizer, ExchangeSettings, SparseHookState, UpdateOptimizer, sparse_hsdp
from data_parallel.schemes.table import COMPRESSORS
from data_parallel.settings import Settings
from sparse_collectives import ALGORITHMS, ARCTopK
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.table import resolve
from sparse_compress import DGCTopK, RandomK, TopK, WarmUp
from torch import nn

pytestmark = pytest.mark.quick


def optimizer_of(kind=DistributedOptimizer, **settings):
    model = nn.Linear(3, 2)
    return kind(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **settings)


def state_of(**settings):
    return SparseHookState(named_parameters=nn.Linear(3, 2).named_parameters(), **settings)


either = pytest.mark.parametrize("make", [optimizer_of, state_of])


@either
@pytest.mark.parametrize("algorithm", ["oktopk", "spardl", "auto"])
def test_a_compressor_that_would_be_ignored(make, algorithm):
    for compressor in (RandomK(0.1), DGCTopK(0.1)):
        with pytest.raises(ValueError, match=r"would have no effect but its k: give TopK\(density\), or none"):
            make(algorithm=algorithm, compressor=compressor)
    make(algorithm=algorithm, compressor=TopK(0.1))


def test_auto_chooses_for_the_density_after_the_warm_up():
    """Before its first step that of the warm-up is set, at which dense is always the fastest."""

    def choice(comm):
        warm_up = WarmUp(0.25, steps=4, stages=(1.0,))
        return optimizer_of(UpdateOptimizer, comm=comm, algorithm="auto", density=warm_up).choice

    predictions = SimulatedWorld(2).run(choice)[0].predictions
    assert {p.density for p in predictions if p.algorithm != "dense"} == {2 / 8}


@either
@pytest.mark.parametrize("algorithm", ["dense", "dense-int8", "powersgd"])
def test_where_nothing_is_selected(make, algorithm):
    """A density may be left in place, so that algorithms can be compared by name."""
    with pytest.raises(ValueError, match=r"selects nothing, so DGCTopK\(.*\) would have no effect: leave it out"):
        make(algorithm=algorithm, compressor=DGCTopK(0.1))
    for settings in ({"density": 0.1}, {"density": WarmUp(0.1, steps=3)}, {"compressor": TopK(0.1)}):
        make(algorithm=algorithm, **settings)


class Every(TopK):
    """A density that cannot be set."""

    def __init__(self):
        pass

    @property
    def density(self):
        return 0.5


def test_a_schedule_beside_a_compressor_sets_its_density():
    assert state_of(density=WarmUp(0.2, steps=3), compressor=DGCTopK(0.05)).compressor.density == 0.25
    with pytest.raises(ValueError, match=r"density is a schedule, but that of .* cannot be set: leave out one"):
        state_of(density=WarmUp(0.2, steps=3), compressor=Every())


@pytest.mark.parametrize(
    ("density", "error"), [(0, ValueError), (2.0, ValueError), (True, TypeError), (None, TypeError)]
)
def test_what_a_schedule_gives_is_checked_for_a_compressor_of_ones_own(density, error):
    own = type("Own", (), {"density": 0.5, "entries": lambda self, n: n, "__call__": lambda self, x: None})()
    with pytest.raises(error, match=f"density is {density}"):
        state_of(density=lambda step: density, compressor=own)


def test_density_and_compressor():
    with pytest.raises(ValueError, match=r"density=0.1 and compressor=TopK\(density=0.2\) were given"):
        state_of(density=0.1, compressor=TopK(0.2))
    assert state_of().compressor.density == 0.01
    assert state_of(density=1).compressor.density == 1
    for wrong, error in ((2.0, ValueError), (0, ValueError), ("0.1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"density is .*0 < density ≤ 1"):
            state_of(density=wrong)


@either
@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"momentum": "0.9"}, TypeError, r"momentum is '0.9' \(str\), expected 0 ≤ momentum < 1"),
        ({"momentum": True}, TypeError, "momentum is True"),
        ({"momentum": float("nan")}, ValueError, "momentum is nan, expected 0 ≤ momentum < 1"),
        ({"momentum": 1}, ValueError, "momentum is 1, expected 0 ≤ momentum < 1"),
        ({"momentum": None}, TypeError, "momentum is None"),
        ({"verify": 1.5}, TypeError, r"verify is 1.5 \(float\), expected an integer: None or a number of steps"),
        ({"verify": True}, TypeError, "verify is True"),
        ({"verify": -1}, ValueError, "verify is -1, expected None or a number of steps, 0 or more"),
        ({"wire": 32}, TypeError, "wire is 32, expected a name: fp32"),
        ({"wire": None}, TypeError, "wire is None, expected a name"),
        ({"wire": "fp8"}, ValueError, "unknown wire 'fp8'"),
        ({"wire": "int8", "algorithm": "dense"}, ValueError, "one of fp32, bf16, fp16"),
        ({"wire": ["fp32"], "algorithm": "dense"}, ValueError, "one of fp32, bf16, fp16"),
        (
            {"algorithm": "top"},
            ValueError,
            f"unknown algorithm 'top'; known: {', '.join([*ALGORITHMS, *COMPRESSORS, 'auto'])}",
        ),
        ({"algorithm": None}, TypeError, "algorithm is None, expected a name"),
        ({"algorithm": "dense", "momentum": 0.9}, ValueError, "momentum=0.9 belongs into the"),
        ({"algorithm": ARCTopK(), "momentum": 0.9}, ValueError, "arc-topk takes all that has accumulated, so momentum"),
        ({"algorithm": "spardl", "options": {"team": 2}}, ValueError, "spardl has no option team; it takes: teams"),
        ({"densty": 0.1}, TypeError, r"has no setting 'densty' \(did you mean 'density'\?\); it takes .*density"),
        ({"options": [], "algorithm": "auto"}, ValueError, r"chooses options too, but \[\] was given"),
        ({"options": ["teams"]}, TypeError, r"options is \['teams'\], expected a dict"),
        ({"compressor": 0.01}, TypeError, r"compressor is 0.01, expected one such as TopK\(0.01\)"),
        ({"compressor": TopK}, TypeError, r"compressor is the class TopK, expected one of it, as TopK\(\)"),
    ],
)
def test_wrong_settings(make, settings, error, says):
    with pytest.raises(error, match=says):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"bucket_bytes": 1e6}, TypeError, r"bucket_bytes is 1000000.0 \(float\), expected an integer: None or"),
        ({"overlap": "yes"}, TypeError, "overlap is 'yes', expected True or False"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes is 0, expected None or a number of bytes, 1 or more"),
        ({"nonfinite": True}, ValueError, "nonfinite is True, expected 'raise' or 'skip'"),
        ({"nonfinite": "ignore"}, ValueError, "expected 'raise' or 'skip'"),
    ],
)
def test_wrong_settings_of_the_optimizer(settings, error, says):
    with pytest.raises(error, match=says):
        optimizer_of(**settings)


@pytest.mark.parametrize(
    "name",
    ["compressor", "algorithm", "wire", "momentum", "comm", "choice", "verify", "density", "options"],
)
@either
def test_settings_are_fixed_afterwards(make, name):
    made = make()
    with pytest.raises(AttributeError, match=f"{name} of .* is fixed when that is made"):
        setattr(made, name, None)


@either
def test_a_compressors_own_density_may_change(make):
    """As in a warm-up."""
    compressor = TopK(0.1)
    made = make(compressor=compressor)
    compressor.density = WarmUp(0.1, steps=4)(0)
    assert made.compressor.density == 0.25


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda **settings: optimizer_of(**settings), "comm, bucket_bytes, overlap, nonfinite, density, "),
        (lambda **settings: optimizer_of(UpdateOptimizer, **settings), "comm, bucket_bytes, nonfinite, density, "),
        (lambda **settings: state_of(**settings), "grad_scaler, named_parameters, density, "),
        (
            lambda **settings: sparse_hsdp(nn.Linear(3, 2), None, **settings),
            "nonfinite, density, ",
        ),  # named as it was called
    ],
)
def test_an_unknown_keyword_is_told_the_known_ones(make, own):
    with pytest.raises(TypeError, match=rf"has no setting 'sends'; it takes {own}compressor, algorithm, .*, verify$"):
        make(sends="updates")


def test_keywords_and_checked_settings_have_the_same_names():
    assert {field.name for field in fields(Settings)} == {*ExchangeSettings.__annotations__, "nonfinite"}


def test_torch_may_set_what_it_needs():
    """A learning-rate scheduler replaces step(), a GradScaler hands over its scale."""
    optimizer = optimizer_of(nonfinite="skip")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.grad_scale = None


def test_what_is_resolved_is_of_the_entry_as_it_is_now():
    assert resolve("gtopk", size=2, wire="bf16") == resolve("gtopk", size=2, wire="bf16")
    other = type("Other", (GTopK,), {})()
    with patch.dict(ALGORITHMS, {"gtopk": other}):  # puts the table's order back too, which messages go by
        assert resolve("gtopk", size=2) is other
        del ALGORITHMS["gtopk"]
        with pytest.raises(ValueError, match="unknown algorithm 'gtopk'"):
            resolve("gtopk", size=2)


def test_a_fault_of_a_schedule_is_not_the_compressors():
    with pytest.raises(AttributeError, match="no attribute 'shares'"):
        state_of(density=lambda step: object().shares[step])
