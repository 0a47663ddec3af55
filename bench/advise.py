"""What selecting and merging cost here: from it `advise` predicts, and docs/advise.md shows what it then says.

    python -m bench advise [--repeats N] [--full] [--output DIR]

Measured by the functions that `advise` measures with, on one rank, for the training that the page shows: selecting in
ns an element of the gradient, merging in ns an entry, by algorithm and wire; the work of ways that select nothing in ns
an element, fixed and per rank; and what the optimizer does around a selection. `advised` makes a record's advice.
"""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from communicators import as_communicator
from sparse_collectives import WIRES
from sparse_collectives.prediction import BACKWARD_SHARE, Handling, measure_handling
from thinwire.advice import report
from thinwire.advice.own_work import measure_around, measure_work
from thinwire.advice.recommendation import recommend
from thinwire.advice.situation import DENSITIES, LINKS, Situation, with_around
from thinwire.advice.ways import BY_NAME, DENSE, Work, assumed_shapes

from bench.record import asked, parser_of, record

PARAMETERS, RANKS, STEP_SECONDS = 25_000_000, 32, 0.25
"""The training whose advice is shown."""
SHAPES = assumed_shapes(PARAMETERS)
COLUMNS = ("density", "what", "ns")
AGAINST = "nothing; `advise` adds the link's α and β"
SELECTING, MERGING, AROUND = "selecting", "merging", "the optimizer around a selection"
COMMAND = f"thinwire advise --parameters {PARAMETERS / 1e6:g}e6 --step-seconds {STEP_SECONDS:g}"
LEFT_OUT = "…"


def main(argv: Sequence[str] = ()) -> None:
    """Measures, prints the table."""
    parser = parser_of("advise", __doc__, full="10 repeats instead of 1")
    parser.add_argument("--repeats", type=int, help="measurements of each, default 1, with --full 10")
    options = asked(parser, argv, repeats=(1, 10))
    samples: dict[tuple[float, str], list[float]] = {}
    for number in range(options.repeats):
        print(f"turn {number + 1} of {options.repeats}", flush=True)
        for name, work in measure_work(SHAPES, torch.device("cpu")).items():
            for part, seconds in work._asdict().items():
                samples.setdefault((1.0, f"{name}, {part}"), []).append(1e9 * seconds)
        around = measure_around(SHAPES, torch.device("cpu"), optimizer="sgd", density=DENSITIES[0])
        samples.setdefault((DENSITIES[0], AROUND), []).append(1e9 * around)
        for density in DENSITIES:
            for what, seconds in _named(_measured(density)).items():
                samples.setdefault((density, what), []).append(1e9 * seconds)
    rows = [
        {"density": density, "what": what, "ns": statistics.median(ns), "ns_samples": ns}
        for (density, what), ns in samples.items()
    ]
    record(options, rows, labels=COLUMNS[:2], values=COLUMNS[2:], against=AGAINST)


def advised(rows: Sequence[Mapping[str, Any]], link: str) -> Situation:
    """The training that is shown, joined by one of `LINKS`, on the machine that a record's rows are from."""
    costs: dict[float, dict[str, float]] = {}
    for row in rows:
        costs.setdefault(float(row["density"]), {})[str(row["what"])] = 1e-9 * float(row["ns"])
    others, around = costs.pop(1.0), costs[DENSITIES[0]].pop(AROUND)
    handling = {density: _handling(named) for density, named in costs.items()}
    handling = with_around(handling, max(0.0, around - handling[DENSITIES[0]].compress))
    work = {
        name: Work(*(others[f"{name}, {part}"] for part in Work._fields))
        for name in (*BY_NAME, DENSE.name)
        if f"{name}, fixed" in others
    }
    return Situation(
        numel=PARAMETERS,
        ranks=RANKS,
        device="cpu",
        compute=STEP_SECONDS,
        hidden=BACKWARD_SHARE * STEP_SECONDS,
        link=LINKS[link],
        link_name=link,
        pairs=None,
        handling=handling,
        shapes=SHAPES,
        work=work,
    )


def shown(rows: Sequence[Mapping[str, Any]], link: str, *, whole: bool = True) -> str:
    """The command and its output for a page. whole: all of it, not only the advice in its last paragraph."""
    situation = advised(rows, link)
    told = recommend(situation).text
    broken = "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in told.splitlines())
    said = report.as_text(situation).replace(told, broken) if whole else f"{LEFT_OUT}\n{broken}"
    return f"```\n$ {COMMAND} --link {link} --ranks {RANKS}\n{said}\n```"


def _measured(density: float) -> Handling:
    given: dict[str, Any] = {"numel": PARAMETERS, "size": RANKS, "wires": WIRES}
    return measure_handling(as_communicator(None), density=density, device=torch.device("cpu"), **given)


def _named(own: Handling) -> dict[str, float]:
    prescribed = {f"{SELECTING} by {name}": seconds for name, seconds in own.prescribed.items()}
    return {SELECTING: own.compress, **prescribed, **{f"{MERGING} {name}": own.merge[name] for name in own.merge}}


def _handling(named: Mapping[str, float]) -> Handling:
    """`_named`, back."""

    def after(word: str) -> dict[str, float]:
        return {what.removeprefix(word): seconds for what, seconds in named.items() if what.startswith(word)}

    return Handling(named[SELECTING], after(f"{SELECTING} by "), after(f"{MERGING} "))
