"""docs/results.md is what `hatch run results` makes of the committed records, and no figure on it is typed by hand."""

import json
import re

import pytest

from bench import results_run
from bench.conclusions import conclusions, differences
from bench.form import RESULTS, ROOT
from bench.headlines import kernels
from bench.headlines.every import HEADLINES
from bench.headlines.own import many_ranks, slow_link_predictions
from bench.headlines.papers import eager_on_ranks, eager_speedup, gtopk_accuracy, spardl_over_sparse
from bench.pages.blocks import BLOCKS
from bench.pages.marked import MARKED, filled, names, pages
from bench.published import published
from bench.results_page import PAGE, PEERS, PICTURES, SHOWN, page


@pytest.fixture(scope="module")
def records():
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def test_the_page_is_what_the_generator_makes_of_the_records(records):
    assert PAGE.read_text() == page(records), "run `hatch run results`"


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_marked_block_is_what_the_records_make(records, path):
    text = path.read_text()
    assert text == filled(text, records, BLOCKS, page=path.name), "run `hatch run results`"


CELL = re.compile(r"^\|(?! `--).*\| ?\**[-+]?\d+\.\d+ ?(?:%|×|ms|µs|s|points)?\** ?\|", re.MULTILINE)
"""A row of a table with a cell that is a decimal figure, which is how what was measured looks; flags have defaults."""


@pytest.mark.parametrize(
    "path", [path for path in pages() if path != PAGE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_table_outside_a_block_has_measured_figures(path):
    assert CELL.findall(MARKED.sub("", path.read_text())) == []


def test_every_block_stands_on_a_page():
    marked = {name for path in pages() for name in names(path.read_text())}
    assert marked == set(BLOCKS)


def test_a_changed_figure_changes_the_block_and_nothing_round_it(records):
    text = (ROOT / "README.md").read_text()
    rows = [row | {"measured_ms": row["measured_ms"] * 3} for row in records["predictions"]["rows"]]
    other = filled(text, {**records, "predictions": {**records["predictions"], "rows": rows}}, BLOCKS, page="README.md")
    assert other != text
    assert filled(other, records, BLOCKS, page="README.md") == text


@pytest.mark.parametrize("name", SHOWN)
def test_the_pages_pictures_are_the_records(name):
    assert (PICTURES / f"{name}.png").read_bytes() == (RESULTS / f"{name}.png").read_bytes(), "run `hatch run results`"


def test_every_headline_has_its_record_its_source_and_its_command(records):
    known = [(name, part, make) for name, part, make in HEADLINES if part in records.get(name, {})]
    made = [make(records[name][part]) for name, part, make in known]
    assert [headline.record for headline in made] == [name for name, _, _ in known]
    for headline in made:
        assert headline.how in ("simulated", "measured")
        assert headline.reached or headline.shortfall, f"{headline.title} falls short, and does not say why"
        assert headline.source or headline.published.startswith("(ours: ")
        assert f"python -m bench {headline.record}" in page(records)


def test_another_record_makes_another_page(records):
    changed = json.loads(json.dumps(records["scaling"]))
    for row in changed["rows"]:
        row["over_ring"] *= 1.5
    assert page({**records, "scaling": changed}) != page(records)


def test_the_sweeps_section_is_made_of_their_record(records):
    changed = json.loads(json.dumps(records["sweeps"]))
    for row in changed["rows"]:
        row["mean"] -= 50
    changed["delta"][0]["gtopk"] = 7.5
    text = page({**records, "sweeps": changed})
    assert "7.500" in text
    assert f"gtopk: {sum(p['gtopk'] > 1 for p in changed['delta'])} of {len(changed['delta'])}" in text
    assert f"{changed['rows'][0]['mean']:.1f}" in text


def test_a_shortfall_is_told(records):
    rows = [dict(row) for row in records["scaling"]["rows"]]
    for row in rows:
        if row["algorithm"] == "spardl":
            row["exchange_ms"], row["exchange_of_slowest_sparse"] = 1e6, 0.5
    headline = spardl_over_sparse(rows)
    assert not headline.reached
    assert "Ahead of it: topk-allgather on VGG-16" in headline.shortfall


def test_every_claim_names_a_known_source():
    found = published()
    assert {claim["source"] for claim in found["claims"].values()} <= set(found["sources"])


def test_the_citations_name_every_paper_that_a_claim_is_from():
    titles = re.findall(r'title: "([^"]+)"', (ROOT / "CITATION.cff").read_text())
    for words in (
        "Global Top-k",
        "SparDL",
        "Near-Optimal Sparse Allreduce",
        "Overlap Local-SGD",
        "Taming Unbalanced",
        "Convergence Analysis of",
    ):
        assert any(words in title for title in titles), f"CITATION.cff misses {words}"


def test_a_kernel_that_misses_its_mark_is_told(records):
    calls = [dict(row) for row in records["collectives"]["rows"]]
    for row in calls:
        row["x_mpi"] = 0.1
    assert kernels.calls(calls).reached
    for row in calls:
        row["x_mpi"] = 99.0
    short = kernels.calls(calls)
    assert not short.reached
    assert "gtopk at n = 25,000,000" in short.shortfall
    levels = [row | {"avx2": 0.01} for row in records["compress"]["levels"]]
    assert kernels.merge(levels).reached
    assert kernels.steps(levels).reached
    assert not kernels.merge([row | {"c": 99.0, "avx2": None, "avx512": None} for row in levels]).reached


def test_a_kernel_that_misses_its_mark_says_what_limits_it(records):
    rows, levels = records["compress"]["rows"], records["compress"]["levels"]
    slow = [row | {"sweeps": 99.0} for row in rows]
    slow_levels = [row | dict.fromkeys(kernels.LEVELS, 99.0) for row in levels]
    calls = [row | {"x_mpi": 99.0} for row in records["collectives"]["rows"]]
    why = published()["why"]
    found = (kernels.topk(slow), kernels.steps(slow_levels), kernels.merge(slow_levels), kernels.calls(calls))
    for headline, name in zip(found, ("topk", "step", "merge", "calls"), strict=True):
        assert why[name] in headline.shortfall
        assert re.search(r"\d ns|\d ms|\d in plain C", headline.shortfall.partition(why[name])[2])
    assert why["merge"] not in kernels.merge([row | {"avx2": 0.01} for row in levels]).shortfall


def test_each_of_the_papers_eager_claims_is_held_against_its_own_task():
    def rows(lstm, digits):
        speeds = {"digits": digits, "lstm": lstm, "speech": 1.0}
        return [
            {"task": task, "how": "majority", "whole_speedup": speed, "ideal": 2.0} for task, speed in speeds.items()
        ]

    assert eager_speedup(rows(1.27, 1.29)).reached
    assert not eager_speedup(rows(1.27, 1.28)).reached
    assert not eager_speedup(rows(1.26, 1.29)).reached


def test_a_step_that_is_slower_than_predicted_falls_short(records):
    rows = [row | {"measured_ms": row["predicted_ms"]} for row in records["predictions"]["rows"]]
    assert slow_link_predictions(rows).reached
    slower = [row | {"measured_ms": row["measured_ms"] * (2 if row["algorithm"] == "gtopk" else 1)} for row in rows]
    assert not slow_link_predictions(slower).reached


def test_the_page_says_what_a_record_lacks(records):
    told, untold = ({**records["scaling"], "samples": []}, {**records["scaling"]})
    untold.pop("samples", None)
    untold["circumstances"] = untold["circumstances"] | {"command": "python -m bench scaling (options not recorded)"}
    assert "and every single measurement" in page({"scaling": told})
    assert "single measurements not kept" in page({"scaling": untold})
    assert "`python -m bench scaling`, with options that were not recorded" in page({"scaling": untold})


@pytest.mark.parametrize(("load", "busy"), [("0.9", False), ("5.1", True)])
def test_the_page_says_which_record_is_of_a_busy_machine(records, load, busy):
    record = {**records["scaling"], "circumstances": records["scaling"]["circumstances"] | {"load": load, "cores": "2"}}
    assert ("the machine was busy" in page({"scaling": record})) is busy


def test_the_page_says_where_torchs_own_way_is_the_better_one(records):
    def row(way, library, speed, accuracy):
        speeds = {"over_ddp": speed, "whole_over_ddp": speed}
        return {**records[PEERS]["rows"][0], "way": way, "library": library, **speeds, "accuracy": accuracy}

    record = {**records[PEERS], "samples": [{"accuracy_samples": [0.9]}]}
    behind = page(
        {
            **records,
            PEERS: {**record, "rows": [row("low rank", "torch", 4.0, 0.98), row("ours", "thinwire", 3.8, 0.96)]},
        }
    )
    assert "take torch's low rank, not ours" in behind
    ahead = page(
        {
            **records,
            PEERS: {**record, "rows": [row("low rank", "torch", 4.0, 0.98), row("ours", "thinwire", 4.2, 0.96)]},
        }
    )
    assert "not ours" not in ahead
    assert "as low rank, ours." in ahead


def test_verdicts_that_became_others_are_told_and_figures_are_not(records):
    before = page(records)
    assert len(conclusions(before)) == before.count("| reached |\n") + before.count("| falls short |\n") - before.count(
        "| ≤ "
    )
    assert differences(before, before) == []
    faster = [row | {"sweeps": row["sweeps"] * 0.99} for row in records["compress"]["rows"]]
    assert differences(before, page({**records, "compress": {**records["compress"], "rows": faster}})) == []
    slower = [row | {"speedup": 0.5} for row in records["compress"]["rows"]]
    [told] = differences(before, page({**records, "compress": {**records["compress"], "rows": slower}}))
    assert "Exact top-k over torch.topk" in told
    assert "reached" in told.partition(", now ")[0]
    assert "falls short" in told.partition(", now ")[2]


def test_a_default_seed_far_from_the_mean_falls_short(records):
    rows = records["demo"]["rows"]
    assert gtopk_accuracy(rows).reached
    worse = [row | {"behind": row["behind"] + 0.6} for row in rows]
    assert not gtopk_accuracy(worse).reached
    outlier = [row | {"behind_at_default": 2.1 * row["error"] + row["behind"]} for row in rows]
    assert not gtopk_accuracy(outlier).reached
    assert ": an outlier" in gtopk_accuracy(outlier).shortfall


def test_a_benchmark_that_leaves_no_record_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    started = []

    def run(command, **_):
        name = command[command.index("bench") + 1]
        started.append(name)
        if name != "broken":
            written = {"circumstances": {"began": len(started), "seconds": 90}}
            (tmp_path / f"{name}.json").write_text(json.dumps(written))
        return results_run.subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(results_run, "RESULTS", tmp_path)
    monkeypatch.setattr(results_run.subprocess, "run", run)
    (tmp_path / "untouched.json").write_text('{"circumstances": {}}')
    assert results_run.remake(["broken", "late"]) == ["broken"]
    assert started == ["broken", "late"]
    said = capsys.readouterr().out
    assert "makes them: untouched" in said
    assert "broken: ended with status 1: something failed; it left no record, and the one there was is kept" in said
    assert "late: ended with status 1: not all that it found is as expected; its record is new" in said
    assert "late: 1 of unknown length" in said
    assert results_run.remake(["late"]) == []
    assert "[1/1] late: 1.5 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(("load", "busy"), [(0.3, False), (3.0, True)])
def test_a_busy_machine_is_told_of_before_anything_is_measured(monkeypatch, capsys, load, busy):
    monkeypatch.setattr(results_run.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(results_run.os, "cpu_count", lambda: 2)
    assert results_run.remake([]) == []
    assert ("the machine is busy (load average 3.0 on 2 cores)" in capsys.readouterr().out) is busy


def test_real_eager_ranks_are_held_against_the_papers_speed_up():
    def rows(speedup):
        row = {
            "P": 8,
            "steps": 40,
            "whole": 9.0,
            "expected_speedup": 1.3,
            "ideal": 1.4,
            "accuracy": 0.9,
            "link": "a link",
        }
        return [row | {"how": "synchronous", "whole_speedup": 1.0}, row | {"how": "majority", "whole_speedup": speedup}]

    claimed = published()["claims"]["eager_lstm"]["speedup"]
    assert eager_on_ranks(rows(claimed)).reached
    assert not eager_on_ranks(rows(claimed - 0.01)).reached


def test_many_ranks_fall_short_where_the_gain_is_less_than_predicted():
    def record(measured):
        row = {
            "P": 8,
            "wire": "fp32",
            "density": 1.0,
            "algorithm": "dense",
            "measured_ms": 6000.0,
            "predicted_ms": 6000.0,
        }
        gtopk = {"algorithm": "gtopk", "density": 0.01, "measured_ms": measured, "predicted_ms": 300.0}
        return {"link": "10 Mbit/s and 10 ms", "rows": [row, row | gtopk]}

    assert many_ranks(record(300.0)).reached
    assert many_ranks(record(300.0)).title.startswith("8 real ranks behind 10 Mbit/s and 10 ms")
    assert not many_ranks(record(400.0)).reached


def test_a_picture_stands_once_and_every_section_leads_to_it(records):
    text = page(records)
    assert all(text.count(f"](images/results/{name}.png)") == 1 for name in SHOWN)
    sections = text.split("\n## ")[1 : len(HEADLINES) + 1]
    led = [part for part in sections if "](images/results/" in part or "\nPicture: under [" in part]
    assert len(led) >= sum(part in records.get(name, {}) for name, part, _ in HEADLINES)


def test_what_is_not_on_record_is_named(records):
    ranks = {name: record for name, record in records["eager"].items() if name != "ranks"}
    text = page({**records, "eager": ranks})
    assert "`python -m bench eager --full` makes it: Eager-SGD's seconds on real ranks" in text


def test_every_record_is_linked_from_the_page(records):
    assert all(f"../bench/results/{name}.csv" in page(records) for name in records)
