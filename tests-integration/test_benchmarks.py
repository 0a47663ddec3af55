"""What `python -m bench` promises of every benchmark that it names."""

import csv
import json
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from communicators import Link, SimulatedWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_collectives import PartialAllreduce
from partial_collectives.protocol.rules import Rules
from sparse_collectives.prediction.cost import Handling
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.synchronisers.table import TABLE

from bench import compress, scaling
from bench.__main__ import BENCHMARKS
from bench.__main__ import main as bench
from bench.cluster import Ranks, one_round
from bench.convergence.curves import points
from bench.convergence.training import trained
from bench.convergence.ways import Run
from bench.elastic_cluster import ElasticCluster
from bench.learning import TASKS, asking
from bench.record import QUICK, RESULTS, asked, commit, parser_of, record, with_quantiles
from bench.scaling import gtopk_link
from bench.troubles import Troubles


def test_help_names_every_benchmark(capsys):
    assert bench(["--help"]) == 0
    assert ", ".join(BENCHMARKS) in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "bits"])  # which compares, and records nothing
def test_every_benchmark_takes_full_and_says_where_its_record_goes(name, capsys):
    with pytest.raises(SystemExit) as left:
        resolve_name(BENCHMARKS[name])(["--full", "--help"])
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"usage: python -m bench {name} " in said
    assert "--full " in said
    assert f"{name}.csv, .json and .png are written; default bench/results/quick, with --full bench/results" in said


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), min_size=1, max_size=3))
@settings(max_examples=10)
def test_a_record_tells_its_circumstances_and_keeps_every_measurement(measured):
    rows = [{"way": f"way {number}", "ms_samples": samples} for number, samples in enumerate(measured)]
    with tempfile.TemporaryDirectory() as folder:
        options = asked(parser_of("try", "Tries.", full="more"), ["--output", folder])
        shown = {"labels": ("way",), "values": ("ms_p50",)}
        record(options, rows, **shown, against="nothing")
        found = json.loads((options.output / "try.json").read_text())
        table = list(csv.DictReader((options.output / "try.csv").read_text().splitlines()))
        assert (options.output / "try.png").exists()
    assert found["circumstances"]["command"] == f"python -m bench try --output {folder}"
    assert {"machine", "cores", "Python", "torch", "commit", "load", "seeds"} <= set(found["circumstances"])
    assert found["circumstances"]["seconds"] >= 0
    assert [row["ms_samples"] for row in found["samples"]] == measured
    for row, samples in zip(table, measured, strict=True):
        low, middle, high = (float(row[f"ms_p{percent}"]) for percent in (20, 50, 80))
        assert min(samples) <= low <= middle <= high <= max(samples)
        assert middle == pytest.approx(statistics.median(samples))


def test_a_quick_run_leaves_the_committed_records_alone():
    parser = parser_of("try", "Tries.", full="more")
    assert asked(parser, []).output == QUICK
    assert asked(parser, ["--full"]).output == RESULTS


def test_new_records_and_pages_of_them_make_no_tree_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.record.ROOT", tmp_path)
    files = [tmp_path / name for name in ("bench/results/a.json", "docs/results.md", "README.md", "bench/a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    person = ["-c", "user.name=any", "-c", "user.email=any@example.org"]
    for words in (["init", "-q"], ["add", "."], [*person, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = commit()
    assert len(clean) == 12
    for file in files[:3]:
        file.write_text("after")
    assert commit() == clean
    files[3].write_text("after")
    assert commit() == f"{clean}+"


@pytest.mark.parametrize(("words", "seeds"), [([], 1), (["--full"], 5), (["--full", "--seeds", "3"], 3)])
def test_the_circumstances_have_every_option_as_it_was_used(words, seeds):
    parser = parser_of("try", "Tries.", full="more")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rate", type=float, default=2.5)
    options = asked(parser, words, seeds=(1, 5))
    assert options.seeds == seeds
    assert options.facts["seeds"] == list(range(seeds))
    assert options.facts["options"] == {"full": "--full" in words, "seeds": seeds, "rate": 2.5}


@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk", "spardl"])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_scaling_simulates_what_the_expression_says(algorithm, size):
    """Where messages have fixed sizes; so that beyond the largest world the expression may be trusted."""
    link = gtopk_link()
    row = scaling._row("any", 20_000, size, algorithm, 0.01, link, [Handling()], 0.1)
    assert row["how"] == "simulated"
    assert row["exchange_ms"] == pytest.approx(row["expression_ms"], rel=0.03, abs=1.1e3 * link.alpha * (size == 5))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_record_has_its_circumstances_its_rows_and_its_plot(path):
    found = json.loads(path.read_text())
    assert {"machine", "cores", "Python", "command", "commit"} <= set(found["circumstances"])
    assert found["rows"]
    assert found["against"]
    assert path.with_suffix(".csv").exists()
    assert path.with_suffix(".png").exists()


def test_a_row_of_speeds_has_every_round():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    row = compress.compare("top-k", x, 10, 4, x.abs, x.sort)
    assert len(row["ours_ms_samples"]) == len(row["torch_ms_samples"]) == 4
    found = with_quantiles(row)
    assert found["ours_ms_p50"] == row["ours_ms"]
    assert found["torch_ms_p20"] <= found["torch_ms_p50"] <= found["torch_ms_p80"]


@given(
    st.integers(1, 6),
    st.one_of(st.just("solo"), st.just("majority"), st.integers(1, 6)),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 999),
)
def test_the_clusters_model_has_the_rounds_of_the_real_protocol(size, quorum, max_staleness, grace, seed):
    """Who contributes to each round, as in a simulated world whose messages take no time; until a rank ends."""
    quorum = min(quorum, size) if isinstance(quorum, int) else quorum
    table = np.random.default_rng(seed).lognormal(1.0, 0.8, (12, size))  # no two ranks arrive at once

    def body(comm):
        rounds, settings = {}, {"quorum": quorum, "max_staleness": max_staleness, "grace": grace, "seed": seed}
        with PartialAllreduce(torch.zeros(1), comm, **settings) as partial:
            for seconds in table[:, comm.rank]:
                comm.elapse(float(seconds))
                before_the_last = partial.round
                rounds |= {result.round: result.contributors for result in partial.allreduce(torch.ones(1))}
            for _ in partial.finish():
                pass
        return rounds, before_the_last

    outcomes = SimulatedWorld(size, link=Link(alpha=1e-9, beta=0.0)).run(body)
    until = min(before_the_last for _, before_the_last in outcomes)
    steps = [iter([*table[:, rank], 1.0, 1.0]) for rank in range(size)]
    ranks, now, found = Ranks(size, lambda who: np.array([next(steps[rank]) for rank in np.flatnonzero(who)])), 0.0, {}
    rules = Rules(quorum, max_staleness, bool(grace), seed)
    for number in range(until):
        now, contributes = one_round(ranks, rules, number, now, grace=grace, seconds=1e-6)
        found[number] = tuple(np.flatnonzero(contributes).tolist())
    assert found == {number: outcomes[0][0][number] for number in range(until)}


def test_an_elastic_cluster_without_troubles_loses_its_exchanges_alone():
    calm = Troubles(jitter=0.0, hang_share=0.0, slow_every=1e12, death_every=1e12)
    share, ranks = ElasticCluster(3, every=100, troubles=calm).shares(0.5, seed=0)
    assert ranks == 1.0
    assert share == pytest.approx(500 / 500.1 * (1 - 1 / 1800), abs=1e-4)  # who comes looks for the others every second


def test_an_elastic_cluster_goes_on_without_its_dead_and_takes_in_the_repaired():
    deadly = Troubles(slow_every=1e12, death_every=3600.0, repair=300.0)
    day = ElasticCluster(6, every=100, troubles=deadly).day(1.5, seed=0)
    assert day.deaths > 3
    assert day.joined > 3
    assert 2 <= min(day.ranks.values()) < max(day.ranks.values()) <= 6
    assert day.given == 100 * day.ranks.total()


def test_a_curve_has_the_bytes_that_were_sent_until_then():
    """A warm-up sends most of them in the first tenth; what comes after it grows evenly."""
    run = Run("cnn-digits", "sgd", "gtopk, momentum before", 0.01, 0.0, 2, 0, 20)
    found = {**asdict(run), **trained(run)}
    rows = {row["step"]: row for row in points([found])}
    assert rows[20]["bytes"] == pytest.approx(20 * found["bytes_a_step"], abs=20)
    assert rows[3]["bytes"] > 0.8 * rows[20]["bytes"]
    rest = {(rows[later]["bytes"] - rows[3]["bytes"]) / (later - 3) for later in (6, 18, 20)}
    assert len({round(bytes_a_step) for bytes_a_step in rest}) == 1
    before = {**found, "curve": [point[:2] for point in found["curve"]]}
    assert {row["bytes"] for row in points([before])} == {None}


@pytest.mark.parametrize("name", TASKS)
def test_an_algorithm_learns_a_task_with_its_own_settings(name):
    task = TASKS[name]
    for algorithm in TABLE:
        asked = parse(asking(task, algorithm, epochs=3, seed=1), task.app, world_size=4)
        given, flags = iter(task.settings.get(algorithm, "").split()), asked.flags()
        for flag in given:
            negated, name = flag.startswith("--no-"), flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            value = "False" if negated else next(given)
            assert str(flags[name]) in (value, f"{value}.0")
        assert (asked.algorithm, asked.max_epochs, asked.seed) == (algorithm, 3, 1)
