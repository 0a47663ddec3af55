"""SparseLoCo, built of sparse_compress and local_sgd by their arguments alone: its law, its messages, its bytes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from communicators import SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).parent.parent / "examples" / "sparseloco_digits.py"


@pytest.fixture(scope="module")
def example():
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("sparseloco_digits", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


NUMELS = st.sampled_from([1, 5, 64, 100, 4095, 4096, 4097, 9000])


@given(NUMELS, st.integers(1, 70), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.integers(0, 99))
def test_sent_and_error_are_the_decayed_error_and_the_change(example, numel, k, decay, seed):
    """sent + e′ = β·e + Δ, to the last place; k of each chunk are sent, or all where it has fewer."""
    generator = torch.Generator().manual_seed(seed)
    compressor, error = example.SparseLoCo(k, decay), torch.zeros(numel)
    for _ in range(4):
        delta = torch.randn(numel, generator=generator)
        sent = compressor.compress("x", delta)
        after = compressor.state_dict()["x"]
        torch.testing.assert_close(sent.to_dense() + after, decay * error + delta, rtol=1e-6, atol=1e-6)
        assert [int(((sent.indices // 4096) == c).sum()) for c in range(-(-numel // 4096))] == [
            min(k, numel - start) for start in range(0, numel, 4096)
        ]
        error = after


@given(NUMELS, st.integers(1, 70), st.integers(0, 99))
def test_messages_are_what_was_sent(example, numel, k, seed):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    sent = example.in_two_bits(example.by_chunks(x, k))
    message = example.encode(sent)
    decoded = example.decode(message, numel, k)
    assert torch.equal(decoded.indices, sent.indices)
    assert torch.equal(decoded.values, sent.values)
    entries, chunks = len(sent.indices), -(-numel // 4096)
    assert len(message) == 4 * chunks + -(-entries * 12 // 8) + -(-entries * 2 // 8)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_all_ranks_go_on_alike_and_nothing_is_lost(example, m):
    """With β = 1: what has been given is in the models, or in the errors. Resumed runs have the same bits."""

    def body(comm, stop):
        def begin():
            p = torch.nn.Parameter(torch.zeros(5000))
            return p, example.sparseloco(torch.optim.SGD([p], lr=0.1), k=8, decay=1.0, comm=comm, sync_every=1)

        p, optimizer = begin()
        given = torch.zeros(5000)
        for step in range(8):
            if step == stop:
                weights, state = p.detach().clone(), optimizer.state_dict()
                p, optimizer = begin()
                p.data.copy_(weights)
                optimizer.load_state_dict(state)
            p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            given -= 0.1 * p.grad
            optimizer.step()
            optimizer.average()
        error = optimizer.state_dict()["distributed"]["residuals"]["parts"]["sparsifier"]["parameter 0"].clone()
        return p.detach().clone(), given, error

    straight, resumed = (SimulatedWorld(m).run(lambda comm, s=stop: body(comm, s)) for stop in (None, 5))
    models, given, errors = zip(*straight, strict=True)
    assert all(torch.equal(model, models[0]) for model in models)
    torch.testing.assert_close(models[0] * m + sum(errors), sum(given), rtol=0, atol=1e-5)
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))


def test_it_learns(example, monkeypatch):
    """Digits on 4 ranks, for a while; at a hundredth of the bytes."""
    monkeypatch.setattr(example, "EPOCHS", 8)

    def trained(way):
        return SimulatedWorld(4).run(lambda comm: example.train(comm, example.WAYS[way], 0))[0]

    (accuracy, nbytes), (dense, many) = trained("SparseLoCo"), trained("DiLoCo")
    assert accuracy > dense - 0.05 > 0.85
    assert nbytes < many / 60
