"""What `advise` says, of the costs that ``advise`` recorded: the program's own words, and a machine's figures."""

from __future__ import annotations

from collections.abc import Callable

from sparse_collectives.advise.recommendation import recommend
from sparse_collectives.advise.report import as_text

from bench.advise import PARAMETERS, RANKS, STEP_SECONDS, advised
from bench.pages.marked import Records, prose

COMMAND = f"python -m sparse_collectives.advise --parameters {PARAMETERS / 1e6:g}e6 --step-seconds {STEP_SECONDS:g}"
LEFT_OUT = "…"


def advice(*links: str, whole: bool = True) -> Callable[[Records], str]:
    """The command and what it prints, for each network. whole: all of it, not only the advice in its last paragraph."""

    def text(records: Records) -> str:
        return "\n\n".join(_shown(records, link, whole) for link in links)

    return text


def _shown(records: Records, link: str, whole: bool) -> str:
    situation = advised(records["advise"]["rows"], link)
    told = recommend(situation).text
    broken = "\n".join(prose(line) for line in told.splitlines())
    said = as_text(situation).replace(told, broken) if whole else f"{LEFT_OUT}\n{broken}"
    return f"```\n$ {COMMAND} --link {link} --ranks {RANKS}\n{said}\n```"
