"""The models: published sizes, what they carry, what they cannot see, what padding changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from thinwire_text.models.lstm import lstm, lstm_small
from thinwire_text.models.lstmimdb import lstmimdb
from thinwire_text.models.transformer import transformer, transformer_small
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    with torch.device("meta"):
        assert parameters(lstm(10_000, window=35)) == 66_034_000
        assert parameters(lstm(10_000, window=35, tied=True)) == 51_034_000
        assert parameters(lstmimdb(50_001)) == 2_561_052
        blocks = 6 * (2 * 768 + 384 * 1152 + 1152 + 384 * 384 + 384 + 8 * 384 * 384 + 1536 + 384)
        assert parameters(transformer(10_000, window=256)) == 2 * 10_000 * 384 + 256 * 384 + 768 + blocks


def foretelling(model: Any) -> Tensor:
    tokens = torch.randint(0, 10_000, (3, 2), generator=torch.Generator().manual_seed(1))
    logits, state = model(tokens[:-1], model.begin(2))
    assert logits.shape == (2, 2, 10_000)
    assert all(part.shape == (2, 2, 1500) for part in state)
    return cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())


def judging(model: nn.Module) -> Tensor:
    tokens = torch.randint(1, 50_001, (9, 2), generator=torch.Generator().manual_seed(1))
    return cross_entropy(model(tokens, torch.tensor([9, 5])), torch.tensor([0, 1]))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (lambda: lstm(10_000, window=35, dropout=0.0), foretelling),
        (lambda: transformer(10_000, window=35, dropout=0.0), foretelling),
        (lambda: lstmimdb(50_001), judging),
    ],
    ids=["lstm", "transformer", "lstmimdb"],
)
def test_models_of_published_size_take_a_step(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]
) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = loss(model)
    before.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    optimizer.step()
    with torch.no_grad():
        assert loss(model) < before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("build", [lstm_small, transformer_small])
def test_a_token_sees_what_came_before_and_nothing_else(build: type, tied: bool) -> None:
    torch.manual_seed(0)
    model = build(30, window=8, layers=2, hidden=32, tied=tied).eval()
    tokens = torch.randint(0, 30, (8, 3))
    changed = tokens.clone()
    changed[5] = (changed[5] + 1) % 30
    first, _ = model(tokens, model.begin(3))
    other, _ = model(changed, model.begin(3))
    torch.testing.assert_close(first[:5], other[:5])
    assert not torch.allclose(first[5:], other[5:])


def test_the_lstm_carries_its_state_and_the_transformer_nothing() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 30, (8, 3))
    model = lstm_small(30, window=8, hidden=16).eval()
    whole, _ = model(tokens, model.begin(3))
    first, state = model(tokens[:3], model.begin(3))
    rest, _ = model(tokens[3:], state)
    torch.testing.assert_close(torch.cat([first, rest]), whole)
    assert transformer_small(30, window=8).begin(3) == ()


def test_padding_changes_nothing_but_rounding() -> None:
    torch.manual_seed(0)
    model = lstmimdb(20, hidden=8).eval()
    tokens = torch.randint(1, 20, (5, 1))
    padded = torch.cat([tokens, torch.zeros(4, 1, dtype=torch.int64)])
    lengths = torch.tensor([5])
    torch.testing.assert_close(model(padded, lengths), model(tokens, lengths))


def test_a_width_that_heads_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="--hidden 100 is no multiple of 32"):
        transformer_small(30, window=8, hidden=100)
