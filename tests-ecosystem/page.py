"""The table of docs/guides/frameworks.md, out of the items that the tests run.

usage: python tests-ecosystem/page.py    writes it into the page
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

MODULES = ("lightning_items", "accelerate_items", "transformers_items", "torchft_items")
PAGE = Path(__file__).parent.parent / "docs" / "guides" / "frameworks.md"
BEGIN, END = "<!-- items -->\n", "<!-- end of items -->"


def table():
    """A row an item: what, the lines that a user adds, the result."""
    rows = ["| framework | item | lines a user adds | result |", "|---|---|---|---|"]
    for module in MODULES:
        for item in import_module(module).ITEMS:
            lines = "<br>".join(f"`{line}`" for line in item.lines) or "none more"
            rows.append(f"| {item.framework} | {item.what} | {lines} | {item.result} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
