"""What `python -m bench` promises of every benchmark that it names."""

from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from communicators import Link, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import PartialAllreduce
from partial_collectives.protocol.rules import Rules
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.synchronisers.table import TABLE

from bench.__main__ import BENCHMARKS
from bench.cluster_model import Ranks, one_round
from bench.learning import TASKS, asking


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_full(name, capsys):
    with pytest.raises(SystemExit) as left:
        resolve_name(BENCHMARKS[name])(["--full", "--help"])
    assert left.value.code == 0
    assert "--full " in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("record", "page"),
    [("convergence", "packages/sparse-collectives/README.md"), ("learning-pydoc", "docs/apps/text.md")],
)
def test_the_pages_table_of_what_was_learnt_is_the_record(record, page):
    root = Path(__file__).parent.parent
    table = (root / "bench" / "results" / f"{record}.md").read_text()
    assert table in (root / page).read_text()


@pytest.mark.parametrize("name", TASKS)
def test_an_algorithm_learns_a_task_with_its_own_settings(name):
    task = TASKS[name]
    for algorithm in TABLE:
        asked = parse(asking(task, algorithm, epochs=3, seed=1), task.app, world_size=4)
        given = task.settings.get(algorithm, "").split()
        flags = asked.flags()
        for flag, value in zip(given[::2], given[1::2], strict=True):
            assert str(flags[flag.removeprefix("--").replace("-", "_")]) in (value, f"{value}.0")
        assert (asked.algorithm, asked.max_epochs, asked.seed) == (algorithm, 3, 1)
