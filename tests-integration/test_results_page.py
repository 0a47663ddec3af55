"""The pages of results are what `hatch run results` makes of the records: no figure on them is typed by hand."""

import json
import re
import subprocess

import pytest

from bench.pages import BLOCKS, MARKED, PICTURES, SHOWN, WHOLE, filled, main, names, pages, rendered
from bench.record import RESULTS, ROOT
from bench.scaling import published
from bench.time_to_quality.best import best_of

VERDICT = re.compile(r"^\| \[(?P<title>[^\]]+)\]\(#.*\*\*(?P<ours>.*)\*\* \|.*\| (?P<verdict>[^|]*) \|$", re.M)


def verdicts(page):
    """Verdict of each headline, by title."""
    return {found["title"]: found["verdict"] for found in VERDICT.finditer(page)}


@pytest.fixture(scope="module")
def records():
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def page(records):
    """Both pages, one after the other."""
    return "\n".join(rendered(name, records) for name in WHOLE.values())


def with_rows(records, name, change, part="rows"):
    """The records, with `change` of each row in one's rows."""
    return {**records, name: {**records[name], part: [{**row, **change(row)} for row in records[name][part]]}}


def section(text, title):
    """The section of a headline whose title begins so, and whether it was reached."""
    [found] = [part for part in text.split("\n## ") if part.startswith(title)]
    [verdict] = [verdict for headline, verdict in verdicts(text).items() if headline.startswith(title)]
    return found, verdict == "reached"


@pytest.mark.parametrize("path", WHOLE)
def test_the_page_is_what_the_generator_makes_of_the_records(records, path):
    assert path.read_text() == rendered(WHOLE[path], records), "run `hatch run results`"


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_marked_block_is_what_the_records_make(records, path):
    text = path.read_text()
    assert text == filled(text, records, BLOCKS, page=path.name), "run `hatch run results`"


CELL = re.compile(r"^\|(?! `--).*\| ?\**[-+]?\d+\.\d+ ?(?:%|×|ms|µs|s|points)?\** ?\|", re.MULTILINE)
"""A row of a table with a cell that is a decimal figure, which is how what was measured looks; flags have defaults."""


@pytest.mark.parametrize(
    "path", [path for path in pages() if path not in WHOLE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_table_outside_a_block_has_measured_figures(path):
    assert CELL.findall(MARKED.sub("", path.read_text())) == []


def test_every_block_stands_on_a_page():
    marked = {name for path in pages() for name in names(path.read_text())}
    assert marked == set(BLOCKS)


def test_a_changed_figure_changes_the_block_and_nothing_round_it(records):
    text = (ROOT / "README.md").read_text()
    rows = [row | {"seconds": row["seconds"] and row["seconds"] * 3} for row in records["time-to-quality"]["rows"]]
    changed = {**records, "time-to-quality": {**records["time-to-quality"], "rows": rows}}
    other = filled(text, changed, BLOCKS, page="README.md")
    assert other != text
    assert filled(other, records, BLOCKS, page="README.md") == text


@pytest.mark.parametrize("name", SHOWN)
def test_the_pages_pictures_are_the_records(name):
    assert (PICTURES / f"{name}.png").read_bytes() == (RESULTS / f"{name}.png").read_bytes(), "run `hatch run results`"


@pytest.mark.parametrize("name", WHOLE.values())
def test_every_headline_says_what_was_published_or_asked_for_and_what_makes_it(records, name):
    text = rendered(name, records)
    sections = [part for part in text.split("\n## ") if "\nHere, " in part]
    assert [part.splitlines()[0] for part in sections] == list(verdicts(text))
    for part in sections:
        assert re.search(r"\nHere, (simulated|measured): \*\*.*\*\*\. \S", part)
        assert ("\nPublished: " in part) is (name == "results")
        assert "- Command: `python -m bench " in part


def test_another_record_makes_another_page(records):
    assert page(with_rows(records, "scaling", lambda row: {"over_ring": row["over_ring"] * 1.5})) != page(records)


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
    slow = {"exchange_ms": 1e6, "exchange_of_slowest_sparse": 0.5}
    changed = with_rows(records, "scaling", lambda row: slow if row["algorithm"] == "spardl" else {})
    told, reached = section(page(changed), "SparDL over")
    assert not reached
    assert "Ahead of it: topk-allgather on VGG-16" in told


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


KERNELS = {
    "Exact top-k in read passes": ("compress", "rows", ("sweeps",), "is read from the cache"),
    "An error-feedback step": ("compress", "levels", ("c", "avx2", "avx512"), "is added to in the cache"),
    "Merging and cutting": ("compress", "levels", ("c", "avx2", "avx512"), "compared one after another"),
    "Sparse calls beside": ("collectives", "rows", ("x_mpi",), "Over shared memory bytes cost"),
}


@pytest.mark.parametrize("title", KERNELS)
def test_a_kernel_that_misses_its_mark_is_told_with_what_limits_it(records, title):
    name, part, columns, why = KERNELS[title]
    fast, slow = (with_rows(records, name, lambda row, x=x: dict.fromkeys(columns, x), part) for x in (0.01, 99.0))
    told, reached = section(page(fast), title)
    assert reached
    assert why not in told
    told, reached = section(page(slow), title)
    assert not reached
    assert "Above the mark: " in told
    assert re.search(r"\d ns|\d ms|\d in plain C", told.partition(why)[2])


@pytest.mark.parametrize(("lstm", "digits", "holds"), [(1.27, 1.29, True), (1.27, 1.28, False), (1.26, 1.29, False)])
def test_each_of_the_papers_eager_claims_is_held_against_its_own_task(records, lstm, digits, holds):
    speeds = {"digits": digits, "lstm": lstm, "speech": 1.0}
    changed = with_rows(records, "eager", lambda row: {"whole_speedup": speeds[row["task"]]})
    assert section(page(changed), "Eager-SGD (majority) over")[1] is holds


def test_a_step_that_is_slower_than_predicted_falls_short(records):
    title = "Real ranks behind 100 Mbit/s"
    as_told = with_rows(records, "predictions", lambda row: {"measured_ms": row["predicted_ms"]})
    assert section(page(as_told), title)[1]
    slower = with_rows(as_told, "predictions", lambda row: {"measured_ms": row["measured_ms"] * (1 + _sparse(row))})
    assert not section(page(slower), title)[1]


def _sparse(row):
    return row["algorithm"] == "gtopk"


@pytest.mark.parametrize(("load", "busy"), [("0.9", False), ("5.1", True)])
def test_the_page_says_which_record_is_of_a_busy_machine(records, load, busy):
    record = {**records["demo"], "circumstances": records["demo"]["circumstances"] | {"load": load, "cores": "2"}}
    told, _ = section(page({**records, "demo": record}), "gTop-k's accuracy")
    assert ("the machine was busy" in told) is busy


def test_a_slower_record_makes_another_verdict_and_a_faster_one_does_not(records):
    before = verdicts(page(records))
    assert verdicts(page(with_rows(records, "compress", lambda row: {"sweeps": row["sweeps"] * 0.99}))) == before
    slower = verdicts(page(with_rows(records, "compress", lambda row: {"speedup": 0.5})))
    title = "Exact top-k over torch.topk on a CPU core"
    assert {name for name in before if slower[name] != before[name]} == {title}
    assert (before[title], slower[title]) == ("reached", "falls short")


def test_time_to_quality_is_told_by_the_best_way_and_where_torchs_is_better_that_stands_there(records):
    rows = records["time-to-quality"]["rows"]
    place = {name: rows[0][name] for name in ("task", "link", "P")}
    [ours] = [row["way"] for row in [cell["ours"] for cell in best_of(rows) if place.items() <= cell.items()]]

    def told(seconds):
        def change(row):
            return {"seconds": seconds} if row["library"] == "thinwire" and place.items() <= row.items() else {}

        return page(with_rows(records, "time-to-quality", change))

    assert ours in told(0.01)
    assert "after 0.01 s with" in told(0.01)
    assert f"{place['task']} on {place['P']} ranks at {place['link']} (" not in told(0.01)
    assert f"{place['task']} on {place['P']} ranks at {place['link']} (" in told(1e9)
    assert f"{place['task']} on {place['P']} ranks at {place['link']} (" in told(None)


def test_a_default_seed_far_from_the_mean_falls_short(records):
    def told(change):
        return section(page(with_rows(records, "demo", change)), "gTop-k's accuracy")

    assert told(lambda row: {})[1]
    assert not told(lambda row: {"behind": row["behind"] + 0.6})[1]
    text, reached = told(lambda row: {"behind_at_default": 2.1 * row["error"] + row["behind"]})
    assert not reached
    assert ": an outlier" in text


def test_a_benchmark_that_fails_does_not_end_the_others(monkeypatch):
    started = []

    def run(command, **_):
        started.append(command[command.index("bench") + 1 :])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--check", "--run", "partial", "demo"]) == 1
    assert started == [["partial", "--full"], ["demo", "--full"]]


@pytest.mark.parametrize(("less", "holds"), [(0.0, True), (0.01, False)])
def test_real_eager_ranks_are_held_against_the_papers_speed_up(records, less, holds):
    speed = published()["claims"]["eager_lstm"]["speedup"] - less
    changed = with_rows(records, "eager", lambda row: {"whole_speedup": speed}, "ranks")
    assert section(page(changed), "Eager-SGD (majority) on 8 real ranks")[1] is holds


@pytest.mark.parametrize(("slower", "holds"), [(1.0, True), (1.4, False)])
def test_many_ranks_fall_short_where_the_gain_is_less_than_predicted(records, slower, holds):
    def change(row):
        return {"measured_ms": row["predicted_ms"] * (slower if _sparse(row) else 1)}

    many = with_rows(records["predictions"], "many", change)["many"]
    text = page({**records, "predictions": {**records["predictions"], "many": many}})
    assert section(text, "8 real ranks behind 10 Mbit/s and 10 ms")[1] is holds


def test_a_picture_stands_once_and_every_section_leads_to_it(records):
    texts = [rendered(name, records) for name in WHOLE.values()]
    for name in SHOWN:
        found = [text.count(f"](images/results/{name}.png)") for text in texts]
        assert max(found) == 1
    sections = [part for text in texts for part in text.split("\n## ") if "\n- Command: " in part]
    assert all("](images/results/" in part or "\nPicture: under [" in part for part in sections)


def test_every_record_is_linked_from_the_page(records):
    text = page(records)
    assert [name for name in records if f"../bench/results/{name}.csv" not in text] == []
