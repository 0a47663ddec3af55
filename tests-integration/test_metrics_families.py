"""Metrics of every kind of training: all of stats() is exported, counters only grow, group and hash are told."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from communicators import SimulatedWorld, metrics
from communicators.metrics import METRICS
from data_parallel import DistributedOptimizer, UpdateOptimizer
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import DiLoCo, LocalSGD, SparseLoCo, StreamingDiLoCo
from partial_collectives import EagerSGD, PartialAllreduce

from release.packages import ROOT

pytestmark = pytest.mark.quick

FAMILIES = {
    "gtopk": partial(DistributedOptimizer, verify=2),
    "overlap": partial(DistributedOptimizer, overlap=True, bucket_bytes=64),
    "powersgd": partial(DistributedOptimizer, algorithm="powersgd", options={"dense_steps": 1}),
    "updates": partial(UpdateOptimizer, verify=1),
    "local-sgd": partial(LocalSGD, sync_every=2),
    "rounded": partial(DiLoCo, sync_every=2, compress="int4"),
    "rounds": partial(DiLoCo, sync_every=2, allreduce=partial(PartialAllreduce, quorum="majority", compress="int4")),
    "streaming": partial(StreamingDiLoCo, sync_every=2, fragments=2, delay=1),
    "sparseloco": partial(SparseLoCo, sync_every=2),
    "eager": partial(EagerSGD, quorum="majority"),
}
GROW = [key for key, metric in METRICS.items() if metric.grows and key != "seconds_awaited"]


def made(kind, model, comm):
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    names = [model.named_parameters()] * (kind.func in (DistributedOptimizer, UpdateOptimizer, EagerSGD))
    return kind(inner, *names, comm=comm)


def trained(comm, kind, steps):
    """Snapshots after each step, as a scrape would find them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 8)
    optimizer, found = made(kind, model, comm), []
    snapshots = metrics.Snapshots(optimizer.stats, every=0.0, clock=comm.clock)
    for step in range(steps):
        optimizer.zero_grad()
        with optimizer.ahead() if isinstance(optimizer, UpdateOptimizer) else nullcontext():
            model(torch.full((2, 9), float(step + comm.rank))).square().mean().backward()
        optimizer.step()
        if hasattr(optimizer, "average"):
            optimizer.average()
        comm.elapse(1e-3 * (1 + comm.rank))
        snapshots.update()
        found.append(snapshots.latest)
    if hasattr(optimizer, "finish"):
        optimizer.finish()
    if hasattr(optimizer, "close"):
        optimizer.close()
    snapshots.take()
    return [*found, snapshots.latest]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@given(size=st.integers(1, 3), steps=st.integers(2, 5))
def test_every_number_is_exported_and_counters_only_grow(tmp_path_factory, family, size, steps):
    ranks = SimulatedWorld(size).run(lambda comm: trained(comm, FAMILIES[family], steps))
    for rank, history in enumerate(ranks):
        last = history[-1]
        assert {key.partition("_of_")[0] for key in last} <= {*METRICS, "rank"}
        assert (last["rank"], last["ranks"], last["generation"], last["steps"]) == (rank, size, 1, steps)
        for key in GROW:
            values = [snapshot[key] for snapshot in history if key in snapshot]
            assert values == sorted(values), key
        assert last["seconds_waited"] <= last["seconds_exchanging"] + 1e-9
        path = tmp_path_factory.mktemp("metrics") / "rank.prom"
        snapshots = metrics.Snapshots(lambda last=last: last)
        metrics.write(snapshots, path)
        assert metrics.parsed(path.read_text()) == snapshots.latest
    verified = {(history[-1].get("verified_step"), history[-1].get("verified_hash")) for history in ranks}
    assert len(verified) == 1


def test_the_page_names_every_metric():
    page = (ROOT / "docs/guides/monitoring.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if "thinwire." in line
    ]
    told = {cells[1]: (cells[2], cells[3]) for cells in rows if len(cells) == 4}
    assert told == {m.name: (m.unit, m.prometheus + "_total" * m.grows) for m in METRICS.values()}
