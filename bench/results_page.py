"""docs/results.md, and marked blocks of other pages, of bench/results: `hatch run results`; --run: of new records.

    python -m bench.results_page [--run] [--only NAME ...] [--check]

--run: makes the records first, every benchmark of the page in full, one after another, on a machine with nothing else
to do; with --only those alone. Which of the page's verdicts become others is told, so that two runs can be compared.
--check: writes no page, and ends with 1 if a page is not what the records make. Blocks: see `bench.pages`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.conclusions import conclusions, differences
from bench.form import RESULTS, ROOT
from bench.headlines.every import HEADLINES
from bench.headlines.headline import Headline
from bench.pages.blocks import BLOCKS
from bench.pages.marked import NotOnRecordError, Records, filled, pages, table
from bench.results_run import BUSY, remake
from bench.sweeps import page as sweeps

PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "images" / "results"
RECORDS = tuple(dict.fromkeys(name for name, _, _ in HEADLINES))
PEERS, SWEEPS = "peers", "sweeps"
SHOWN = (*RECORDS, PEERS, SWEEPS)
SAMPLES = "samples"
"""Where a record keeps single measurements, if it does."""
UNTOLD = "(options not recorded)"
INTRODUCTION = """# Results

<!-- Made by `hatch run results` from bench/results/*.json and bench/published.toml: do not write here. -->

The headline results of the papers that are implemented here: what was published, what came out here, and where it falls
short, why. **published** figures are the papers'; **simulated** ones are the real schedules with real payloads on a
virtual clock that charges α + β·bytes a message; **measured** ones are seconds or bytes of real processes. **(ours)**:
no paper claims it; what we ask of it stands beside. What *density*, *k* or *P* means: [Words](how-it-works.md#words).

Each result leads to its section, which names the command that makes it anew, the commit and machine that it was made
with, and the record: a `.csv` of rows, and a `.json` with the circumstances and, under `samples`, every single
measurement where they were kept. Commands run in the project's environment: `hatch shell`, or `hatch run` before each.
`hatch run results --run` makes all records anew, `hatch run results` this page.
"""


def main(argv: Sequence[str] = ()) -> int:
    """Writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.results_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--run", action="store_true", help="make the records first")
    parser.add_argument("--only", nargs="+", choices=SHOWN, metavar="NAME", help=f"of these: {', '.join(SHOWN)}")
    parser.add_argument("--check", action="store_true", help="only tell whether pages are what the records make")
    options = parser.parse_args(argv)
    if options.only and not options.run:
        parser.error("--only says which records --run makes; give both")
    failed = remake(options.only or SHOWN) if options.run else []
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    before, text = PAGE.read_text(), page(records)
    print(compared(before, text))
    if failed:
        print(f"no new record: {', '.join(failed)}")
    others, lacking = changed(records)
    others |= {PAGE: text} if before != text else {}
    for path, missing in lacking.items():
        print(f"{path.relative_to(ROOT)} is kept as it is: {missing}")
    if options.check:
        for path in others:
            print(f"not what the records make: {path.relative_to(ROOT)}; run `hatch run results`")
        return 1 if others or lacking or failed else 0
    for path, made in others.items():
        path.write_text(made)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        if name in records:
            shutil.copyfile(RESULTS / f"{name}.png", PICTURES / f"{name}.png")
    print(f"written: {', '.join(str(path.relative_to(ROOT)) for path in others) or 'nothing, all is as the records'}")
    return 1 if lacking or failed else 0


def changed(records: Records) -> tuple[dict[Path, str], dict[Path, str]]:
    """Pages with a block that is not what the records make, as they are to be; and pages that lack a record: which.

    Raises:
        ValueError: if a page has a wrong mark.
    """
    made: dict[Path, str] = {}
    lacking: dict[Path, str] = {}
    for path in pages():
        text = path.read_text()
        try:
            new = filled(text, records, BLOCKS, page=str(path.relative_to(ROOT)))
        except NotOnRecordError as missing:
            lacking[path] = str(missing)
        else:
            if new != text:
                made[path] = new
    return made, lacking


def compared(before: str, after: str) -> str:
    """Which verdicts of a page are other ones than those of the page there was."""
    found, count = differences(before, after), len(conclusions(after))
    if found:
        return "\n".join([f"{len(found)} verdicts are other ones than on the page there was:", *found])
    return f"all {count} verdicts are those of the page there was{'' if before == after else '; figures are not'}"


def page(records: Mapping[str, Any]) -> str:
    """The whole text. records: the content of each .json, by name."""
    headlines = [make(records[name][part]) for name, part, make in HEADLINES if part in records.get(name, {})]
    lacking = [(name, make.__doc__ or "") for name, part, make in HEADLINES if part not in records.get(name, {})]
    lacking += [(name, name.capitalize()) for name in (PEERS, SWEEPS) if name not in records]
    parts = [INTRODUCTION, _kept({name: records[name] for name in SHOWN if name in records})]
    parts += [table([_line(headline) for headline in headlines])]
    parts += [_missing(name, what) for name, what in lacking]
    first = {headline.record: headline for headline in reversed(headlines)}
    parts += [_section(headline, records[headline.record], first[headline.record]) for headline in headlines]
    if PEERS in records:
        parts.append(_peers(records[PEERS]))
    if SWEEPS in records:
        parts.append(_sweeps(records[SWEEPS]))
    parts.append(_others({name: record for name, record in records.items() if name not in SHOWN}))
    return "\n".join(parts).rstrip() + "\n"


def _others(records: Mapping[str, Any]) -> str:
    """Records that other pages show, or only the folder does."""
    rows = [
        {
            "record": f"[{name}](../bench/results/{name}.csv)",
            "command": f"`{record['circumstances']['command'].partition(UNTOLD)[0].strip()}`",
            "compared with": record["against"],
        }
        for name, record in records.items()
    ]
    return "\n## Other records\n\n" + table(rows) + "\n" if rows else ""


def _kept(records: Mapping[str, Any]) -> str:
    """What the records behind the page have, and what they lack."""
    samples = sum(SAMPLES in record for record in records.values())
    options = sum(UNTOLD not in record["circumstances"]["command"] for record in records.values())
    return (
        f"Records: {len(records)}, of which {samples} with single measurements and {options} with the options of the "
        "command; each section says what its own has.\n"
    )


def _line(headline: Headline) -> dict[str, str]:
    return {
        "result": f"[{headline.title}](#{_anchor(headline.title)})",
        "published": headline.published,
        "here": f"**{headline.ours}**",
        "how": headline.how,
        "verdict": "reached" if headline.reached else "falls short",
    }


def _section(headline: Headline, record: Mapping[str, Any], first: Headline) -> str:
    """first: of the record's headlines; its section has the picture."""
    lines = [f'\n<a id="{_anchor(headline.title)}"></a>\n\n## {headline.title}\n']
    if headline.source:
        lines.append(f"Published: {headline.published} ({headline.source}).\n")
    lines.append(f"Here, {headline.how}: **{headline.ours}**. {headline.shortfall}\n")
    if headline.details:
        lines.append(table(headline.details))
    lines.append(_circumstances(headline.record, record))
    if headline is first:
        lines.append(_picture(headline.record))
    else:
        lines.append(f"Picture: under [{first.title}](#{_anchor(first.title)}).\n")
    return "\n".join(lines)


def _picture(name: str) -> str:
    return f"![{name}](images/results/{name}.png)\n"


def _peers(record: Mapping[str, Any]) -> str:
    rows = record["rows"]
    chosen = [
        {
            "way": row["way"],
            "library": row["library"],
            "P": str(row["P"]),
            "step, ms": f"{row['step_ms']:.0f}",
            "over plain DDP": f"{row['over_ddp']:.1f}×",
            "with the warm-up": f"{row['whole_over_ddp']:.1f}×" if "whole_over_ddp" in row else "not recorded",
            "accuracy": f"{row['accuracy']:.1%}",
            "use it where": row["use"],
        }
        for row in rows
    ]
    best = max(rows, key=lambda row: row["over_ddp"])
    head = (
        "\n## What should I use?\n\nOurs beside torch's own ways, in the same run, real gloo ranks behind "
        f"{rows[0]['link']}: measured. The fastest step was {best['way']}'s, {best['over_ddp']:.1f} times plain DDP's. "
        f"Accuracy: on the test digits after as many epochs; an image is {100 / record['test_images']:.2f} points.\n"
    )
    return "\n".join([head, _chosen(record), table(chosen), _circumstances(PEERS, record), _picture(PEERS)])


def _chosen(record: Mapping[str, Any]) -> str:
    """In words what the table shows: where torch's way is the better one, where ours, and how far to trust it."""
    lines = []
    for size in sorted({row["P"] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["P"] == size]
        torchs = [row for row in rows if row["library"] == "torch"]
        for row in rows:
            better = [other["way"] for other in torchs if row not in torchs and _beats(other, row)]
            if better:
                lines.append(
                    f"- P = {size}: take torch's {' or '.join(better)}, not {row['way']}: it is as fast or faster"
                    " and learnt as well or better."
                )
        best = [row["way"] for row in rows if not any(_beats(other, row) for other in rows if other is not row)]
        lines.append(f"- P = {size}: no other was both as fast and as accurate as {', '.join(best)}.")
    seeds = min(len(one["accuracy_samples"]) for one in record["samples"])
    lines.append(
        f"- The accuracies are of {seeds} {'seed' if seeds == 1 else 'seeds'} each"
        + (", where points between two may be chance" if seeds == 1 else "")
        + ". They are a small perceptron's after few epochs; "
        "gTop-k's accuracy in a whole training of ResNet-20 is the headline above."
    )
    if any("whole_over_ddp" not in row for row in record["rows"]):
        lines.append("- The sparse ways of this record ran without the warm-up that is recommended.")
    return "\n".join(lines) + "\n"


def _beats(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Nowhere worse, and somewhere better; seconds of a whole training where it has a warm-up."""
    mine, its = ((one.get("whole_over_ddp", one["over_ddp"]), one["accuracy"]) for one in (row, other))
    return bool(its[0] >= mine[0] and its[1] >= mine[1] and its != mine)


def _sweeps(record: Mapping[str, Any]) -> str:
    parts = [sweeps.introduction(record), table(sweeps.accuracies(record)), sweeps.readings(record)]
    parts += [sweeps.assumption(record), table(sweeps.deltas(record)), _circumstances(SWEEPS, record), _picture(SWEEPS)]
    return "\n".join(parts)


def _circumstances(name: str, record: Mapping[str, Any]) -> str:
    facts = record["circumstances"]
    busy = float(facts["load"]) > BUSY * int(facts["cores"])
    told = f"{facts['cores']} cores, load average {facts['load']} before it"
    told += " (the machine was busy: seconds are other ones than on an idle one), " if busy else ", "
    told += f"Python {facts['Python']}, torch {facts['torch']}"
    kept = "every row, and every single measurement" if SAMPLES in record else "every row; single measurements not kept"
    of = f"../bench/results/{name}"
    files = f"[{name}.csv]({of}.csv), [{name}.json]({of}.json) ({kept})"
    told += f"; {facts['link']}" if "link" in facts else ""
    told += f"; took {facts['seconds']:,} s" if "seconds" in facts else ""
    command = facts["command"].partition(UNTOLD)
    given = f"`{command[0].strip()}`" + (", with options that were not recorded" if command[1] else "")
    return (
        f"\n- Command: {given}, at {facts['commit']}; {told}.\n- Compared with: {record['against']}.\n"
        f"- Records: {files}.\n"
    )


def _missing(name: str, what: str) -> str:
    return f"\nNot on record yet, `python -m bench {name} --full` makes it: {what.partition('.')[0]}.\n"


def _anchor(title: str) -> str:
    """Of its section; headings' own anchors differ from site to site."""
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
