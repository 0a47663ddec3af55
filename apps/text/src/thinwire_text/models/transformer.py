"""A small GPT (Radford et al. 2019): learned positions, blocks that normalise first, GELU, causal attention.

Every window stands for itself: nothing is carried from one to the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from thinwire_text.catalogue import UNITS_A_HEAD
from thinwire_text.models.language import State

DEVIATION = 0.02  # of the first weights


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attend, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[streams, n, hidden] -> the same."""
        streams, n, hidden = x.shape
        shape = (streams, n, 3, self.heads, hidden // self.heads)
        query, key, value = self.attend(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
        heard = scaled_dot_product_attention(query, key, value, is_causal=True)  # [streams, heads, n, units]
        x = x + self.dropout(self.project(heard.transpose(1, 2).reshape(streams, n, hidden)))
        mixed: Tensor = self.dropout(self.narrow(gelu(self.widen(self.second(x)))))
        return x + mixed


class Transformer(nn.Module):
    """window: the longest that it takes. tied: the output's weights are the embedding's."""

    def __init__(self, words: int, *, window: int, layers: int, hidden: int, dropout: float, tied: bool) -> None:
        super().__init__()
        if hidden % UNITS_A_HEAD:
            raise ValueError(f"--hidden {hidden} is no multiple of {UNITS_A_HEAD}, the units of an attention head")
        self.window = window
        self.embedding, self.position = nn.Embedding(words, hidden), nn.Embedding(window, hidden)
        self.blocks = nn.ModuleList(Block(hidden, hidden // UNITS_A_HEAD, dropout) for _ in range(layers))
        self.norm, self.decode = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.decode.weight = self.embedding.weight

    def begin(self, streams: int) -> State:
        """Nothing."""
        del streams
        return ()

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits and no state (`Language`); n ≤ window."""
        places = torch.arange(len(tokens), device=tokens.device)
        x = self.dropout(self.embedding(tokens.T) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.decode(self.norm(x)).transpose(0, 1)
        return logits, state


def transformer(words: int, *, window: int, **sizes: Any) -> Transformer:
    """6 × 384, 12 heads: nanoGPT's for a small text; `sizes` are the options of `Transformer` that are to be others."""
    return Transformer(words, window=window, **{"layers": 6, "hidden": 384, "dropout": 0.2, "tied": False} | sizes)


def transformer_small(words: int, *, window: int, **sizes: Any) -> Transformer:
    """2 × 128, 4 heads."""
    return transformer(words, window=window, **{"layers": 2, "hidden": 128, "dropout": 0.1} | sizes)
