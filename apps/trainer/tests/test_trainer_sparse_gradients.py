"""An embedding whose gradients are sparse trains with every algorithm, as one whose are dense.

What a model makes sparse by itself is refused.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import streams
import torch
from resumed_runs import assert_same_bits, result, train
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError
from thinwire_trainer.synchronisers.table import TABLE
from torch import Tensor, nn
from torch.nn.functional import embedding


class Sparse(streams.Net):
    """Its embedding has rows that are not looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(3 * streams.SYMBOLS, streams.HIDDEN, sparse=sparse)


class Own(nn.Module):
    """Looks rows up by a function; `sparse` is a word of its own."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(streams.SYMBOLS, streams.HIDDEN))

    def forward(self, symbols: Tensor) -> Tensor:
        return embedding(symbols, self.rows, sparse=self.sparse)


class ByFunction(streams.Net):
    """No module of torch's says that its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Own()  # type: ignore[assignment]


def build_by_function(options: Options, device: torch.device) -> streams.Streams:
    return streams.Streams(ByFunction().to(device), options)


def build(sparse: bool, options: Options, device: torch.device) -> streams.Streams:
    return streams.Streams(Sparse(sparse).to(device), options)


@pytest.mark.few(3)
@pytest.mark.parametrize("algorithm", TABLE)
def test_a_sparse_embedding_trains_as_a_dense_one(tmp_path: Path, algorithm: str) -> None:
    """With momentum, clipping and weight decay, which torch's SGD refuses of sparse gradients."""
    results = []
    for sparse in (False, True):
        how = ["--overlap"] if TABLE[algorithm].overlaps and algorithm != "dense" else ["--clip-norm", "1"]
        words = ["--algorithm", algorithm, "--batch-size=3", "--max-epochs=1", "--weight-decay=1e-4", *how]
        app = replace(streams.APP, build=partial(build, sparse))
        options = parse([*words, f"--output={tmp_path / str(sparse)}"], app, world_size=2)
        train(app, options, 2)
        results.append(result(options))
    assert_same_bits(results[1], results[0])


@pytest.mark.few(19)
@pytest.mark.parametrize("algorithm", TABLE)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_a_function_makes_sparse_is_named(tmp_path: Path, algorithm: str, overlap: bool) -> None:
    """Neither some algorithm's own words, nor a training that others would refuse."""
    overlaps = ["--overlap"] if overlap and TABLE[algorithm].overlaps else []
    app = replace(streams.APP, build=build_by_function)
    words = ["--algorithm", algorithm, "--batch-size=3", "--max-epochs=1", *overlaps, f"--output={tmp_path / 'run'}"]
    with pytest.raises(AgreedError, match=r"gradient of embed\.rows is sparse .* give sparse=False"):
        train(app, parse(words, app, world_size=2), 2)
