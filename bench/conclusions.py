"""What docs/results.md concludes, and where two versions of it differ."""

from __future__ import annotations

import re

VERDICT = re.compile(
    r"^\| \[(?P<title>[^\]]+)\]\(#[^)]*\) \|.*\| (?P<ours>\*\*.*?\*\*) \|.*\| (?P<verdict>[^|]*) \|$", re.M
)


def conclusions(page: str) -> dict[str, tuple[str, str]]:
    """By headline: its verdict, and the figures that it is of."""
    return {found["title"]: (found["verdict"], found["ours"]) for found in VERDICT.finditer(page)}


def differences(before: str, after: str) -> list[str]:
    """A line for each verdict that is another one, or is on one page only."""
    old, new = conclusions(before), conclusions(after)
    lines = []
    for title in dict.fromkeys([*old, *new]):
        was, now = old.get(title, ("not on the page", "")), new.get(title, ("not on the page", ""))
        if was[0] != now[0]:
            lines.append(f"{title}: {' '.join(was).strip()}, now {' '.join(now).strip()}")
    return lines
