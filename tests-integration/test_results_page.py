"""docs/results.md is what `hatch run results` makes of the committed records, and no figure on it is typed by hand."""

import json
import re

import pytest

from bench import results_run
from bench.conclusions import conclusions, differences
from bench.form import RESULTS, ROOT
from bench.headlines import (
    HEADLINES,
    eager_on_ranks,
    gtopk_accuracy,
    many_ranks,
    slow_link_predictions,
    spardl_over_sparse,
)
from bench.kernel_headlines import kernel_calls, kernel_merge, kernel_steps
from bench.published import published
from bench.results_page import PAGE, PEERS, PICTURES, SHOWN, page


@pytest.fixture(scope="module")
def records():
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def test_the_page_is_what_the_generator_makes_of_the_records(records):
    assert PAGE.read_text() == page(records), "run `hatch run results`"


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
        assert headline.source or headline.published == "(ours)"
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
    assert kernel_calls(calls).reached
    for row in calls:
        row["x_mpi"] = 99.0
    short = kernel_calls(calls)
    assert not short.reached
    assert "gtopk at n = 25,000,000" in short.shortfall
    levels = [row | {"avx2": 0.01} for row in records["compress"]["levels"]]
    assert kernel_merge(levels).reached
    assert kernel_steps(levels).reached
    assert not kernel_merge([row | {"c": 99.0, "avx2": None, "avx512": None} for row in levels]).reached


def test_a_step_that_is_slower_than_predicted_falls_short(records):
    rows = [row | {"measured_ms": row["predicted_ms"]} for row in records["predictions"]["rows"]]
    assert slow_link_predictions(rows).reached
    slower = [row | {"measured_ms": row["measured_ms"] * (2 if row["algorithm"] == "gtopk" else 1)} for row in rows]
    assert not slow_link_predictions(slower).reached


def test_the_page_says_what_a_record_lacks(records):
    told, untold = ({**records["scaling"], "samples": []}, {**records["scaling"]})
    untold["circumstances"] = untold["circumstances"] | {"command": "python -m bench scaling (options not recorded)"}
    assert "and every single measurement" in page({"scaling": told})
    assert "single measurements not kept" in page({"scaling": untold})
    assert "`python -m bench scaling`, with options that were not recorded" in page({"scaling": untold})


def test_the_page_says_where_torchs_own_way_is_the_better_one(records):
    def row(way, library, speed, accuracy):
        return {**records[PEERS]["rows"][0], "way": way, "library": library, "over_ddp": speed, "accuracy": accuracy}

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
    assert "late: 1 of unknown length" in said
    assert results_run.remake(["late"]) == []
    assert "[1/1] late: 1.5 minutes" in capsys.readouterr().out


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


def test_every_record_is_linked_from_the_page(records):
    assert all(f"../bench/results/{name}.csv" in page(records) for name in records)
