"""A small GPT (Radford et al. 2019): learned positions, blocks that normalise first, GELU, causal attention.

Every window stands for itself: nothing is carried from one to the next.
"""

from typing import Any

import torch
from torch import Tensor, nn

from thinwire_text.catalogue import UNITS_A_HEAD
from thinwire_text.models.language import State

DEVIATION = 0.02  # of the first weights


def block(hidden: int, dropout: float) -> nn.TransformerEncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); [streams, n, hidden]; dropout also of attention, as in GPT."""
    how = {"activation": "gelu", "norm_first": True, "batch_first": True}
    heads = hidden // UNITS_A_HEAD
    return nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=dropout, **how)  # type: ignore[arg-type]


class Transformer(nn.Module):
    """window: the longest that it takes. tied: the output's weights are the embedding's."""

    def __init__(self, words: int, *, window: int, layers: int, hidden: int, dropout: float, tied: bool) -> None:
        super().__init__()
        if hidden % UNITS_A_HEAD:
            raise ValueError(f"--hidden {hidden} is no multiple of {UNITS_A_HEAD}, the units of an attention head")
        self.window = window
        self.embedding, self.position = nn.Embedding(words, hidden), nn.Embedding(window, hidden)
        self.blocks = nn.ModuleList(block(hidden, dropout) for _ in range(layers))
        self.norm, self.decode = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=DEVIATION)
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
        unseen = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).triu(1)
        for each in self.blocks:
            x = each(x, unseen, is_causal=True)
        logits: Tensor = self.decode(self.norm(x)).transpose(0, 1)
        return logits, state


def transformer(words: int, *, window: int, **sizes: Any) -> Transformer:
    """6 × 384, 12 heads: nanoGPT's for a small text; `sizes` are the options of `Transformer` that are to be others."""
    return Transformer(words, window=window, **{"layers": 6, "hidden": 384, "dropout": 0.2, "tied": False} | sizes)


def transformer_small(words: int, *, window: int, **sizes: Any) -> Transformer:
    """2 × 128, 4 heads."""
    return transformer(words, window=window, **{"layers": 2, "hidden": 128, "dropout": 0.1} | sizes)
