"""Texts as numbers of their tokens: the most frequent first, ties in alphabetical order, the same everywhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from thinwire_trainer.errors import RunError
from torch import Tensor

END, UNKNOWN = "<eos>", "<unk>"
WORDS = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, and every other sign that is not space by itself."""
    return WORDS.findall(text)


@dataclass(frozen=True)
class Vocabulary:
    """tokens: each once; a token's number is its place."""

    tokens: tuple[str, ...]

    @classmethod
    def of(
        cls, counted: Counter[str], *, first: Sequence[str] = (), least: int = 1, most: int | None = None
    ) -> Vocabulary:
        """Number counted tokens. first: before all others. least, most: how frequent, and how many of these."""
        ranked = sorted(counted, key=lambda token: (-counted[token], token))
        chosen = [token for token in ranked if counted[token] >= least and token not in first]
        return cls((*first, *chosen[:most]))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """token -> its number."""
        return {token: number for number, token in enumerate(self.tokens)}

    def encode(self, tokens: Iterable[str], *, unknown: str = UNKNOWN) -> Tensor:
        """Their numbers, int64; that of `unknown` for others; KeyError if that is not there, either."""
        numbers = self.numbers
        return torch.tensor([numbers[t] if t in numbers else numbers[unknown] for t in tokens], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """train, test: int64 [tokens]."""

    vocabulary: Vocabulary
    train: Tensor
    test: Tensor


def folder_with(name: str, *, data_dir: Path, places: tuple[str, ...], source: str) -> Path:
    """The first of the places in data_dir that has such a file or folder; RunError that says where it was looked for.

    source: where it is from.
    """
    for place in places:
        if (data_dir / place / name).exists():
            return data_dir / place
    looked = ", ".join(str(data_dir / place / name) for place in places)
    raise RunError(f"there is no {looked}: get it from {source}, and name its folder with --data-dir")
