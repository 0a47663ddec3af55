"""The table's numbers are those of the expressions: `python test_page_table.py` prints the rows."""

from pathlib import Path

import pytest
import torch
from sparse_collectives.algorithms.table import resolve

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[3] / "docs" / "algorithms" / "index.md"
HEADER = next(line for line in PAGE.read_text().splitlines() if line.startswith("| P | "))


def column(title):
    """A name, and its options as key=value."""
    name, *options = title.split()
    return name, {key: int(value) for key, value in (option.split("=") for option in options)}


COLUMNS = [column(title) for title in HEADER.strip("| ").split(" | ")[1:]]


def cell(size, name, options):
    entry = resolve(name, options, size=size)
    sent = [entry.typical(rank, size, 250_000, 25_000_000, torch.float32) for rank in range(size)]
    return f"{max(s.nbytes for s in sent) / 1e6:.2f} / {max(s.messages for s in sent)}"


def rows():
    for size in (2, 4, 8, 14, 16, 32, 64):
        yield f"| {size} | {' | '.join(cell(size, *column) for column in COLUMNS)} |"


def test_the_numbers_are_those_of_the_expressions():
    table = "\n".join(rows())
    assert table in PAGE.read_text(), f"write these rows into the page:\n{table}"


if __name__ == "__main__":
    print("\n".join(rows()))
