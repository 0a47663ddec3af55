"""Steps of many workers on 1 Gbit/s Ethernet: dense, Top-k, gTop-k and the others, on the papers' models.

    python -m bench scaling [--full] [--output DIR]

exchange: virtual seconds of the real schedules with real payloads in a simulated world ("simulated"), each message
charged α + β·bytes as gTop-k's authors measured them; selections are random, that is spread evenly, and share next to
nothing. Dense, and what is too large here, is what the algorithms' expressions give ("expression"; the tests hold them
to be what a simulated world counts). select: error feedback and exact top-k of n elements, merge: of all entries on
the way: measured on one core of this machine. step: the paper's computing time,
select, exchange and merge, nothing overlapped. over_dense, over_topk: the dense and the Top-k all-gather step in units
of this one; over_ring: a step with a dense ring by the paper's formula, ring_ms = 2(P − 1)α + 2(P − 1)/P·n·β; the dense
sum here has 2 log P rounds. published_dense_ms: what the dense exchange took the authors. Other published_…: the same
ratio of the paper's throughputs. The plot: over_ring against computing time.
"""

import statistics
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from communicators import Communicator, Link, SimulatedWorld, as_communicator
from sparse_collectives import sparse_allreduce
from sparse_collectives.prediction import Handling, measure_handling, predict
from sparse_compress import SparseVector, TopK

from bench.record import Row, asked, parser_of, record

PUBLISHED = Path(__file__).with_name("published.toml")
"""What the papers report."""
AGAINST = "the throughputs that gTop-k's authors measured on 32 workers"
SPARSE = ("topk-allgather", "topk-dsa", "gtopk", "oktopk", "spardl")
RANKS, PAPERS = (4, 8, 16, 32, 64), 32
MOST_RANKS = 1024
MANY = (128, 256, 512, MOST_RANKS)
MOST_ENTRIES = 1 << 25
"""Entries that all ranks of one world hold together; beyond it the expression is asked."""
TURNS = 3
"""Of measuring what selecting and merging cost; their medians count."""
MILLISECONDS = ("exchange_ms", "select_ms", "merge_ms", "step_ms")
PUBLISHED_COLUMNS = ("published_over_dense", "published_over_topk", "published_dense_ms")
OVER = ("over_ring", "over_dense", "over_topk", *PUBLISHED_COLUMNS[:2])
SHOWN = ("model", "P", "algorithm", "how", *MILLISECONDS, *OVER)


class Model(NamedTuple):
    """n: parameters. The others: see the file."""

    name: str
    n: int
    batch: int
    alone: float
    dense: float
    topk: float
    gtopk: float

    @property
    def compute(self) -> float:
        """Seconds of a step of one worker alone."""
        return self.batch / self.alone


def published() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads(PUBLISHED.read_text())


def gtopk_models() -> list[Model]:
    """Those whose throughput on 32 workers was published."""
    return [Model(**given) for given in published()["scaling"]["models"]]


def gtopk_link() -> Link:
    """1 Gbit/s Ethernet as measured by gTop-k's authors."""
    scaling = published()["scaling"]
    return Link(scaling["alpha"], scaling["beta"])


def main(argv: Sequence[str] = ()) -> None:
    """Prints the table."""
    parser = parser_of("scaling", __doc__, full="also other P than 32, of gtopk up to 1,024")
    options = asked(parser, argv)
    torch.set_num_threads(1)
    models, link = gtopk_models(), gtopk_link()
    ranks, many = (RANKS, models[:2]) if options.full else ((PAPERS,), ())
    parts = (*(_of_gtopk(model, link, ranks) for model in models), _of_spardl(link), _many(many, link))
    values, draw = ("over_ring", "published_over_dense"), partial(_draw, models=models)
    rows = chain.from_iterable(parts)
    record(options, rows, labels=SHOWN[:3], values=values, against=AGAINST, shown=SHOWN, draw=draw)


def _of_gtopk(model: Model, link: Link, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    density = published()["scaling"]["density"]
    own = _handlings(model.n, density)
    over_dense, over_topk, dense_ms = PUBLISHED_COLUMNS
    reported = {
        "dense": {dense_ms: 1e3 * (model.batch / model.dense - model.compute)},
        "gtopk": {over_dense: model.gtopk / model.dense, over_topk: model.gtopk / model.topk},
        "topk-allgather": {over_dense: model.topk / model.dense},
    }
    for size in ranks:
        rows = [_row(model.name, model.n, size, name, density, link, own, model.compute) for name in ("dense", *SPARSE)]
        yield from _compared([row | reported.get(row["algorithm"], {}) for row in rows] if size == PAPERS else rows)


def _of_spardl(link: Link) -> Iterator[dict[str, Any]]:
    """Exchanges alone: no computing times were published."""
    claim = published()["spardl"]
    for name, n in claim["models"].items():
        own = _handlings(n, claim["density"])
        rows = [_row(name, n, claim["ranks"], each, claim["density"], link, own, None) for each in ("dense", *SPARSE)]
        yield from _compared(rows)


def _many(models: Sequence[Model], link: Link) -> Iterator[dict[str, Any]]:
    density = published()["scaling"]["density"]
    for model in models:
        own = _handlings(model.n, density)
        for size in MANY:
            of = partial(_row, model.name, model.n, size, link=link, own=own, compute=model.compute)
            yield from _compared([of(name, density) for name in ("dense", "topk-allgather", "gtopk")])


def _row(
    model: str,
    n: int,
    size: int,
    algorithm: str,
    density: float,
    link: Link,
    own: Sequence[Handling],
    compute: float | None,
) -> dict[str, Any]:
    """One algorithm on so many ranks; milliseconds of the busiest one. own: the same, measured several times."""
    k = n if algorithm == "dense" else TopK(density).entries(n)
    turns = [predict(algorithm, size=size, numel=n, k=k, link=link, handling=one) for one in own]
    expected, selecting, merging = turns[0], [turn.compression for turn in turns], [turn.merging for turn in turns]
    exchange = expected.latency + expected.transfer
    small = algorithm == "gtopk" or size <= RANKS[-1]
    simulated = algorithm != "dense" and small and size * k * (1 if algorithm == "gtopk" else size) <= 8 * MOST_ENTRIES
    row: dict[str, Any] = {"model": model, "n": n, "P": size, "density": expected.density, "algorithm": algorithm}
    row |= {"how": "simulated" if simulated else "expression", "expression_ms": 1e3 * exchange}
    row["exchange_ms"] = 1e3 * _simulated(algorithm, n, k, size, link) if simulated else 1e3 * exchange
    row |= {"nbytes": expected.nbytes, "select_ms_samples": [1e3 * one for one in selecting]}
    row["merge_ms_samples"] = [1e3 * one for one in merging]
    row |= {"select_ms": 1e3 * statistics.median(selecting), "merge_ms": 1e3 * statistics.median(merging)}
    row["compute_ms"] = None if compute is None else 1e3 * compute
    row["step_ms"] = sum(row[part] or 0.0 for part in ("compute_ms", "select_ms", "exchange_ms", "merge_ms"))
    row["ring_ms"] = 1e3 * (2 * (size - 1) * link.alpha + 2 * (size - 1) / size * 4 * n * link.beta)
    return row | dict.fromkeys(PUBLISHED_COLUMNS)


def _compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    steps = {row["algorithm"]: row["step_ms"] for row in rows}
    exchanges = {row["algorithm"]: row["exchange_ms"] for row in rows}
    ring = steps["dense"] - exchanges["dense"] + rows[0]["ring_ms"]
    for row in rows:
        over = {"over_ring": ring / row["step_ms"], "over_dense": steps["dense"] / row["step_ms"]}
        over["over_topk"] = steps["topk-allgather"] / row["step_ms"]
        slowest = max(exchanges[name] for name in exchanges if name != "dense")
        yield {**row, **over, "exchange_of_slowest_sparse": slowest / row["exchange_ms"]}


def _simulated(algorithm: str, n: int, k: int, size: int, link: Link) -> float:
    """Virtual seconds until the last rank is done."""

    def body(comm: Communicator) -> None:
        draw = np.random.default_rng(comm.rank)
        indices = np.sort(draw.choice(n, k, replace=False)).astype(np.int32)
        values = draw.standard_normal(k, dtype=np.float32)
        sparse = SparseVector(torch.from_numpy(indices), torch.from_numpy(values), n)
        sparse_allreduce(sparse, comm, k=k, algorithm=algorithm)

    world = SimulatedWorld(size, link=link)
    world.run(body)
    return world.elapsed


def _handlings(n: int, density: float) -> list[Handling]:
    """What selecting and merging cost here, in every turn."""
    comm, device = as_communicator(None), torch.device("cpu")
    return [measure_handling(comm, numel=n, density=density, device=device) for _ in range(TURNS)]


def _draw(path: Path, rows: Sequence[Row], *, models: Sequence[Model]) -> None:
    """How many times faster than dense, at P = 32, for any computing time; dots where the papers' models are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for model, colour in zip(models, ("C0", "C1", "C2", "C3", "C4"), strict=True):
        mine = {row["algorithm"]: row for row in rows if (row["model"], row["P"]) == (model.name, PAPERS)}
        rest = mine["gtopk"]["step_ms"] - mine["gtopk"]["compute_ms"]
        computing = np.geomspace(1, 1e4, 100)
        axes.plot(computing, (computing + mine["gtopk"]["ring_ms"]) / (computing + rest), colour, label=model.name)
        ours = mine["gtopk"]
        axes.plot([ours["compute_ms"]], [ours["over_ring"]], "o", color=colour)
        axes.plot([ours["compute_ms"]], [ours["published_over_dense"]], "x", color=colour)
    claim = published()["claims"]["gtopk_over_dense"]
    axes.axhspan(claim["low"], claim["high"], alpha=0.1, label="published range")
    axes.set(xscale="log", yscale="log", xlabel="computing, ms a step", ylabel="step with a dense ring / gTop-k step")
    axes.set_title(f"{PAPERS} workers, 1 Gbit/s: o with the paper's computing time, x as published")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
