"""A task that owns its batches, carries a hidden state from one to the next, and has flags and a command of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.command_line.parser import Parser
from thinwire_trainer.errors import RunError
from thinwire_trainer.trained import trained
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

SYMBOLS, HIDDEN, LENGTH, TESTS = 4, 5, 97, 5


class Piece(NamedTuple):
    """Of each of the streams, the symbols from `start` on."""

    streams: tuple[int, ...]
    start: int
    length: int


class Net(nn.Module):
    """A recurrent network over symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(SYMBOLS, HIDDEN), nn.GRU(HIDDEN, HIDDEN)
        self.decode = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, symbols: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[n, streams] symbols and a state [1, streams, hidden] -> logits, the state after them."""
        output, state = self.cell(self.embed(symbols), state)
        return self.decode(output), state


@dataclass
class Streams:
    """Each rank reads as many streams as a batch has samples, a few symbols a step; a test stream is one rank's."""

    model: nn.Module
    options: Options
    train_size: int = LENGTH
    test_size: int = TESTS
    tested: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        symbols = torch.randint(0, SYMBOLS, (LENGTH, 64), generator=drawn)
        self.train, self.test = symbols[:, :59], symbols[:, 59:]  # [length, streams]
        self.state = self._begin(self.options.batch_size)
        self.test_state = self._begin(0)

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Piece]:
        del seed, epoch
        streams = tuple(stream % 59 for stream in range(rank * batch_size, (rank + 1) * batch_size))
        return [Piece(streams, start, self._pieces) for start in range(0, LENGTH - self._pieces, self._pieces)]

    def test_batches(self, *, rank: int, size: int) -> Sequence[Piece]:
        streams = tuple(range(rank, TESTS, size))
        return [Piece(streams, start, 24) for start in range(0, LENGTH - 1, 24)]

    def weight(self, batch: Piece) -> int:
        return batch.length * len(batch.streams)

    def loss(self, batch: Piece, generator: Generator) -> Tensor:
        del generator
        if batch.start == 0:
            self.state = self._begin(len(batch.streams))
        logits, state = self.model(*self._given(self.train, batch, self.state))
        self.state = state.detach()
        return cross_entropy(logits.flatten(0, 1), self._wanted(self.train, batch))

    def score(self, batch: Piece) -> Tensor:
        if batch.start == 0:
            self.test_state = self._begin(len(batch.streams))
        self.tested.append(batch)
        if not batch.streams:
            return torch.zeros(2, dtype=torch.float64)
        logits, self.test_state = self.model(*self._given(self.test, batch, self.test_state))
        wanted = self._wanted(self.test, batch)
        loss = cross_entropy(logits.flatten(0, 1).double(), wanted, reduction="sum")
        return torch.stack([loss, torch.tensor(float(len(wanted)), dtype=torch.float64)])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"test_loss": float(sums[0] / sums[1]), "tested": float(sums[1])}

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["hidden"].clone()

    def kept(self) -> dict[str, Any]:
        return {"symbols": list("abcd")}

    @property
    def _pieces(self) -> int:
        return int(self.options.app["piece"])

    def _begin(self, streams: int) -> Tensor:
        return torch.zeros(1, streams, HIDDEN)

    def _given(self, symbols: Tensor, batch: Piece, state: Tensor) -> tuple[Tensor, Tensor]:
        return symbols[batch.start : batch.start + batch.length, list(batch.streams)][: LENGTH - 1 - batch.start], state

    def _wanted(self, symbols: Tensor, batch: Piece) -> Tensor:
        return symbols[batch.start + 1 : batch.start + batch.length + 1, list(batch.streams)].flatten()


def build(options: Options, device: torch.device) -> Streams:
    return Streams(Net().to(device), options)


def check(options: Options) -> None:
    if options.app["piece"] == 13:
        raise RunError("--piece 13 is unlucky: take another")


def decode(app: App, argv: Sequence[str]) -> int:
    """The command: what the model expects after a symbol."""
    parser = Parser(prog=f"{app.module} decode", usage="python -m %(prog)s RUN SYMBOL")
    parser.add_argument("run", type=Path)
    parser.add_argument("symbol", choices="abcd")
    given = parser.parse_args(argv)
    run = trained(app, given.run)
    model, symbols = run.into(Net()), run.kept["symbols"]
    logits, _ = model(torch.tensor([[symbols.index(given.symbol)]]), torch.zeros(1, 1, HIDDEN))
    print(symbols[int(logits.argmax())])
    return 0


APP = App(
    module="streams",
    models={"gru": ""},
    datasets={"symbols": ""},
    build=build,
    check=check,
    flags=(
        Flag(name="piece", default=8, read=quantities.count, metavar="N", says="symbols a step"),
        Flag(name="loud", default=False, says="nothing", shapes=False),
        Flag(name="limit", default=None, read=quantities.count, says="nothing either"),
    ),
    commands={"decode": "streams:decode"},
)
