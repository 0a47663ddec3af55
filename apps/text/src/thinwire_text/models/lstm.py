"""Zaremba et al.'s regularised LSTM (2014): embedding, layers of LSTM, words; dropout between them, not in time.

`lstm` is the large one in gTop-k's configuration: two layers of 1,500, dropout 0.65, untied, 66.0 million parameters
with PTB's 10,000 words.
"""

from typing import Any

from torch import Tensor, nn

from thinwire_text.models.language import State

RANGE = 0.1  # of the first weights


class LSTM(nn.Module):
    """tied: the output's weights are the embedding's (Press & Wolf 2017)."""

    def __init__(self, words: int, *, layers: int, hidden: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decode = nn.Linear(hidden, words)
        if tied:
            self.decode.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -RANGE, RANGE)
        nn.init.uniform_(self.decode.weight, -RANGE, RANGE)
        nn.init.zeros_(self.decode.bias)

    def begin(self, streams: int) -> State:
        """Zeros: (h, c), each [layers, streams, hidden]."""
        zeros = self.decode.bias.new_zeros(self.layers, streams, self.hidden)
        return zeros, zeros.clone()

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits and the state after these tokens (`Language`)."""
        h, c = state
        output, (h, c) = self.lstm(self.dropout(self.embedding(tokens)), (h, c))
        logits: Tensor = self.decode(self.dropout(output))
        return logits, (h, c)


def lstm(words: int, *, window: int, **sizes: Any) -> LSTM:
    """The published model: 2 × 1,500; `sizes` are the options of `LSTM` that are to be others."""
    del window  # any length
    return LSTM(words, **{"layers": 2, "hidden": 1500, "dropout": 0.65, "tied": False} | sizes)


def lstm_small(words: int, *, window: int, **sizes: Any) -> LSTM:
    """1 × 128, for a corpus of a megabyte."""
    return lstm(words, window=window, **{"layers": 1, "hidden": 128, "dropout": 0.2} | sizes)
