"""SparDL's LSTM for film reviews: embedding of 50, one LSTM layer of 100, two classes from its last output.

With 50,001 words 2.56 million parameters, nearly all of them in the embedding.
"""

from typing import Any

import torch
from torch import Tensor, nn

EMBEDDING = 50


class Reader(nn.Module):
    """A classifier by the output at a review's last token; padding follows it."""

    def __init__(self, words: int, *, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, EMBEDDING, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(EMBEDDING, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.classify = nn.Linear(hidden, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens int64 [n, reviews] and how many of them are each review's [reviews] -> logits [reviews, 2]."""
        output, _ = self.lstm(self.dropout(self.embedding(tokens)))
        last = output[lengths - 1, torch.arange(len(lengths), device=output.device)]
        logits: Tensor = self.classify(self.dropout(last))
        return logits


def lstmimdb(words: int, **sizes: Any) -> Reader:
    """The published model: 1 × 100, without dropout; `sizes` are the options of `Reader` that are to be others."""
    return Reader(words, **{"layers": 1, "hidden": 100, "dropout": 0.0} | sizes)
