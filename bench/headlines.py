"""The papers' headline claims beside what the records say: each a function of records and published figures alone.

No figure is typed here: published ones are read from bench/published.toml, ours from bench/results/*.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slow_link.check import TOLERANCE
from sparse_collectives.training.backward_order import BUCKET_BYTES

from bench.headline import MEASURED, SIMULATED, Headline, Rows, times
from bench.kernel_headlines import kernel_calls, kernel_merge, kernel_steps, kernel_topk
from bench.published import published

HIDDEN = 0.95
"""Of an exchange, so that it counts as hidden."""


def gtopk_over_dense(rows: Rows) -> Headline:
    """Scaling at P = 32."""
    claim = _claim("gtopk_over_dense")
    mine = [row for row in rows if row["published_over_dense"] and row["algorithm"] == "gtopk"]
    dense = {row["model"]: row for row in rows if row["published_dense_ms"]}
    short = [row["model"] for row in mine if row["over_ring"] < claim["low"]]
    slower = [dense[row["model"]]["published_dense_ms"] / row["ring_ms"] for row in mine]
    theirs = {
        name: (row["compute_ms"] + dense[name]["published_dense_ms"]) / row["step_ms"]
        for name, row in ((row["model"], row) for row in mine)
    }
    why = (
        "The ratio is to a dense ring that takes exactly what the authors' formula says; their dense exchanges took "
        f"{min(slower):.1f} to {max(slower):.1f} times as long, and with those the ratio "
        f"is {times(list(theirs.values()))}. "
        "Selecting and merging were measured on one CPU core of this machine, where the authors' ran on GPUs. "
    )
    why += f"Below the published range: {', '.join(short)}." if short else ""
    details = [
        {
            "model": row["model"],
            "computing, ms (published)": f"{row['compute_ms']:.0f}",
            "exchange, ms": f"{row['exchange_ms']:.1f}",
            "selecting + merging, ms (measured)": f"{row['select_ms'] + row['merge_ms']:.1f}",
            "over a dense ring": f"{row['over_ring']:.1f}×",
            "over the dense sum here": f"{row['over_dense']:.1f}×",
            "over the authors' dense": f"{theirs[row['model']]:.1f}×",
            "published, over dense": f"{row['published_over_dense']:.1f}×",
            "over Top-k": f"{row['over_topk']:.1f}×",
            "published, over Top-k": f"{row['published_over_topk']:.1f}×",
        }
        for row in mine
    ]
    return Headline(
        f"gTop-k over dense, {claim['ranks']} workers, 1 Gbit/s",
        f"{claim['low']:g}–{claim['high']:g}×",
        _source(claim),
        times([row["over_ring"] for row in mine]),
        SIMULATED,
        "scaling",
        not short,
        why,
        details,
    )


def gtopk_over_topk(rows: Rows) -> Headline:
    """Scaling at P = 32."""
    claim = _claim("gtopk_over_topk")
    mine = [row for row in rows if row["published_over_topk"]]
    short = [row["model"] for row in mine if row["over_topk"] < claim["low"]]
    why = "" if not short else f"Below the range: {', '.join(short)}. "
    shares = [_of(rows, row["model"], row["P"], "topk-allgather")["merge_ms"] for row in mine]
    why += f"Of Top-k's step {min(shares):.0f} to {max(shares):.0f} ms are merging, on this machine's one core."
    return Headline(
        f"gTop-k over Top-k, {claim['ranks']} workers, 1 Gbit/s",
        f"{claim['low']:g}–{claim['high']:g}×",
        _source(claim),
        times([row["over_topk"] for row in mine]),
        SIMULATED,
        "scaling",
        not short,
        why,
    )


def gtopk_accuracy(rows: Rows) -> Headline:
    """The demo's training."""
    claim = _claim("gtopk_accuracy")
    dense, gtopk = (next(row for row in rows if row["algorithm"] == name) for name in ("dense", "gtopk"))
    most = published()["marks"]["demo"]["points"]
    off = abs(gtopk["behind_at_default"] - gtopk["behind"])
    outlier = "no outlier" if off <= 2 * gtopk["error"] else "an outlier"
    details = [
        {
            "algorithm": row["algorithm"],
            "seeds": str(row["seeds"]),
            "mean, %": f"{row['mean']:.1f}",
            "of the seeds, %": f"{row['least']:.1f} … {row['most']:.1f}",
            "at the default seed, %": f"{row['at_default']:.1f}",
            "bytes a step": f"{row['bytes_a_step']:,.0f}",
        }
        for row in (dense, gtopk)
    ]
    return Headline(
        f"gTop-k's accuracy beside dense, the demo on {gtopk['seeds']} seeds",
        claim["text"],
        _source(claim),
        f"{-gtopk['behind']:+.1f} points ({gtopk['mean']:.1f} and {dense['mean']:.1f} %)",
        MEASURED,
        "demo",
        gtopk["behind"] <= most and outlier == "no outlier",
        f"Slight is here: at most {most:g} points in the mean. ResNet-20 on 8 × 8 digits, four real ranks. At the "
        f"demo's own seed gTop-k is {-gtopk['behind_at_default']:+.1f} points beside dense, {off:.1f} from the mean: "
        f"{outlier}, where the test images leave such a difference a standard error of {gtopk['error']:.1f}.",
        details,
    )


def spardl_over_sparse(rows: Rows) -> Headline:
    """Exchanges at P = 14."""
    claim = _claim("spardl_over_sparse")
    mine = [row for row in rows if row["P"] == claim["ranks"]]
    spardl = [row for row in mine if row["algorithm"] == "spardl"]
    ahead = [row for row in mine if row["algorithm"] not in ("spardl", "dense") and _faster_than_spardl(row, rows)]
    best = max(row["exchange_of_slowest_sparse"] for row in spardl)
    why = "Ahead of it: " + ", ".join(f"{row['algorithm']} on {row['model']}" for row in ahead) + ". " if ahead else ""
    why += (
        "Exchange alone, against the slowest other; network time of the schedules, without merging. It has twice the "
        "rounds of gTop-k, which is ahead where messages are so short that rounds are all that counts."
    )
    return Headline(
        f"SparDL over earlier sparse allreduces, {claim['ranks']} workers",
        f"up to {claim['high']:g}×",
        _source(claim),
        f"up to {best:.1f}×",
        SIMULATED,
        "scaling",
        best >= claim["high"],
        why,
    )


def oktopk_volume(rows: Rows) -> Headline:
    """Bytes that real ranks sent."""
    claim = _claim("oktopk_volume")
    sent = [row["sent"] / 4 / (row["n"] * row["density"]) for row in rows if row["algorithm"] == "oktopk"]
    return Headline(
        "Ok-Topk's volume",
        f"< {claim['below']:g}·k elements",
        _source(claim),
        f"{max(sent):.2f}·k at most",
        MEASURED,
        "collectives",
        max(sent) < claim["below"],
        "Counted at P = " + " and ".join(sorted({str(row["P"]) for row in rows})) + ", headers and keys included.",
    )


def overlap_overhead(rows: Rows) -> Headline:
    """Real ranks behind the emulated link."""
    claim = _claim("overlap_overhead")
    ways = {row["algorithm"]: row for row in rows}
    synchronous, overlapped = ways["synchronous"]["overhead"], ways["overlap-local-sgd"]["overhead"]
    return Headline(
        f"Overlap-Local-SGD's communication overhead, τ = {claim['sync_every']}",
        f"{claim['synchronous']:.1%} → {claim['overlapped']:.1%}",
        _source(claim),
        f"{synchronous:.1%} → {overlapped:.1%}; {ways['overlap-local-sgd']['hidden']:.1%} of the exchange hidden",
        MEASURED,
        "local-sgd",
        overlapped <= claim["overlapped"],
        f"2 ranks behind an emulated link instead of {claim['ranks']} machines. The exchange is hidden; what is "
        "left is its work on cores that the ranks share with it, where the paper's was on GPUs.",
    )


def eager_speedup(rows: Rows) -> Headline:
    """Virtual seconds of the same steps."""
    claim = _claim("eager_lstm")
    best = {row["task"]: row for row in rows if row["how"] == "majority"}
    return Headline(
        "Eager-SGD (majority) over synchronous SGD under imbalance",
        f"{claim['speedup']:g}× (LSTM), {_claim('eager_imagenet')['speedup']:g}× (ResNet-50)",
        _source(claim),
        ", ".join(f"{row['whole_speedup']:.2f}× ({task})" for task, row in best.items()),
        SIMULATED,
        "eager",
        min(row["whole_speedup"] for row in best.values()) >= claim["speedup"],
        "The ranks' real code trains on a virtual clock; the imbalance is drawn beforehand, the same for both.",
    )


def eager_on_ranks(rows: Rows) -> Headline:
    """Seconds of real ranks that sleep instead of computing."""
    claim = _claim("eager_lstm")
    ways = {row["how"]: row for row in rows}
    majority = ways["majority"]
    details = [
        {
            "way": row["how"],
            "seconds": f"{row['whole']:.1f}",
            "speed-up": f"{row['whole_speedup']:.2f}×",
            "simulated": f"{row['expected_speedup']:.2f}×",
            "accuracy": f"{row['accuracy']:.1%}",
        }
        for row in rows
    ]
    return Headline(
        f"Eager-SGD (majority) on {majority['P']} real ranks, one of them late in every step",
        f"{claim['speedup']:g}×",
        _source(claim),
        f"{majority['whole_speedup']:.2f}×",
        MEASURED,
        "eager",
        majority["whole_speedup"] >= claim["speedup"],
        f"gloo ranks behind {majority['link']}, {majority['steps']} steps that sleep instead of computing, so that the "
        f"ranks fit on this machine; {majority['ideal']:.2f}× is the bound for these delays.",
        details,
    )


def slow_link_predictions(rows: Rows) -> Headline:
    """Ours: is what is predicted measured?"""
    near = [row for row in rows if abs(row["ratio"] - 1) <= TOLERANCE]
    pairs = [pair for size in sorted({row["P"] for row in rows}) for pair in _dense_and_gtopk(rows, size)]
    told, kept = [], []
    for name, dense, gtopk in pairs:
        gain, predicted = (dense[way] / gtopk[way] for way in ("measured_ms", "predicted_ms"))
        told.append((name, f"{gain:.1f}× at P = {dense['P']}"))
        kept.append(gain >= (1 - TOLERANCE) * predicted)
    details = [
        {
            "P": str(dense["P"]),
            "which": name,
            "dense in": dense["wire"],
            "its step, ms (predicted)": f"{dense['measured_ms']:,.0f} ({dense['predicted_ms']:,.0f})",
            "gTop-k at, in": f"{gtopk['density']:.1%}, {gtopk['wire']}",
            "its step, ms (predicted) ": f"{gtopk['measured_ms']:,.0f} ({gtopk['predicted_ms']:,.0f})",
            "times as fast (predicted)": f"{dense['measured_ms'] / gtopk['measured_ms']:.1f}× "
            f"({dense['predicted_ms'] / gtopk['predicted_ms']:.1f}×)",
        }
        for name, dense, gtopk in pairs
    ]
    return Headline(
        "Real ranks behind 100 Mbit/s: gTop-k's step over dense, as predicted",
        "(ours)",
        "",
        "; ".join(f"{name}: " + ", ".join(text for other, text in told if other == name) for name in dict(told)),
        MEASURED,
        "predictions",
        all(kept),
        f"{sum(kept)} of {len(kept)} of these factors are at least {1 - TOLERANCE:.0%} of what `advise` predicts, and "
        f"{len(near)} of {len(rows)} whole steps are within {TOLERANCE:.0%}; the others compute most between their "
        "rounds, on cores that all ranks share. The warm-up, in which all is sent, is not in them.",
        details,
    )


def many_ranks(many: Mapping[str, Any]) -> Headline:
    """Ours: more ranks than cores."""
    rows = many["rows"]
    [size] = {row["P"] for row in rows}
    _, (_, dense, gtopk) = _dense_and_gtopk(rows, size)
    measured, predicted = (dense[way] / gtopk[way] for way in ("measured_ms", "predicted_ms"))
    return Headline(
        f"{size} real ranks behind {many['link']}: gTop-k's step over dense, as predicted",
        "(ours)",
        "",
        f"{measured:.1f}× ({predicted:.1f}× predicted)",
        MEASURED,
        "predictions",
        measured >= (1 - TOLERANCE) * predicted,
        f"Both in fp32, {gtopk['density']:.0%}: {dense['measured_ms']:,.0f} and {gtopk['measured_ms']:,.0f} ms. gloo's "
        f"ranks, which sleep while they wait; {size} of MPI's would keep the cores from each other. At so slow a link "
        "computing, which all ranks do on the same cores, is little beside the network.",
    )


def link_as_modelled(rows: Rows) -> Headline:
    """Ours: ready vectors against α + β·bytes."""
    near = [row for row in rows if abs(row["measured_less_software_to_model"] - 1) <= TOLERANCE]
    far = sorted({f"{row['by']} ({row['what']} of {row['bytes']:,} bytes)" for row in rows if row not in near})
    why = f"Not: {', '.join(far)}, where microseconds of software count beside the delay. " if far else ""
    return Headline(
        f"Messages behind the emulated link within {TOLERANCE:.0%} of α + β·bytes",
        "(ours)",
        "",
        f"{len(near)} of {len(rows)}",
        MEASURED,
        "slow-link",
        len(near) == len(rows),
        f"{why}Ready vectors, the tenth part of the repeats that was fastest, less what the same costs without a link.",
    )


def overlap_hides(rows: Rows) -> Headline:
    """Ours: exchanges during backward."""
    most = max(row["batch"] for row in rows)
    mine = [row for row in rows if row["batch"] == most]
    best: dict[str, Mapping[str, Any]] = {}
    for row in mine:
        best[row["algorithm"]] = max(best.get(row["algorithm"], row), row, key=lambda one: float(one["hidden"]))
    details = [
        {
            "algorithm": row["algorithm"],
            "bucket, MiB": f"{row['bucket_MiB']:g}"
            + (" (default)" if row["bucket_MiB"] * 2**20 == BUCKET_BYTES else ""),
            "computing, ms": f"{row['compute']:.0f}",
            "exchange, ms": f"{row['exchange']:.0f}",
            "hidden": f"{row['hidden']:.1%}",
            "forward, backward and step, ms": f"{row['overlapped']:.0f}",
        }
        for row in mine
    ]
    return Headline(
        "The share of an exchange that backward hides",
        "(ours)",
        "",
        ", ".join(f"{row['hidden']:.1%} ({name}, {row['bucket_MiB']:g} MiB)" for name, row in best.items()),
        MEASURED,
        "overlap",
        min(row["hidden"] for row in best.values()) >= HIDDEN,
        "Real ranks behind the emulated link, where computing takes twice as long as exchanging, with the bucket size "
        "that hides most; what hides most need not give the shortest step.",
        details,
    )


def late_rank(rows: Rows) -> Headline:
    """Ours: real ranks, one of them late."""
    ways = {row["how"]: row["delayed_ms"] for row in rows}
    return Headline(
        "An allreduce's milliseconds while one of four ranks is late",
        "(ours)",
        "",
        f"{ways['plain allreduce']:.0f} → {ways['majority']:.1f} (majority), {ways['solo']:.1f} (solo)",
        MEASURED,
        "partial",
        ways["majority"] < ways["plain allreduce"],
        "At the ranks that are not late; the late one's gradient goes to a later round.",
    )


def selection(rows: Rows) -> Headline:
    """Ours: exact top-k."""
    mine = [row["speedup"] for row in rows if row["what"] == "top-k"]
    return Headline(
        "Exact top-k over torch.topk on a CPU core",
        "(ours)",
        "",
        times(mine),
        MEASURED,
        "compress",
        min(mine) >= 1,
        "Ties by lowest index, which torch.topk does not promise.",
    )


HEADLINES: Sequence[tuple[str, str, Callable[[Any], Headline]]] = (
    ("scaling", "rows", gtopk_over_dense),
    ("scaling", "rows", gtopk_over_topk),
    ("demo", "rows", gtopk_accuracy),
    ("scaling", "rows", spardl_over_sparse),
    ("collectives", "rows", oktopk_volume),
    ("local-sgd", "rows", overlap_overhead),
    ("eager", "rows", eager_speedup),
    ("eager", "ranks", eager_on_ranks),
    ("partial", "rows", late_rank),
    ("overlap", "rows", overlap_hides),
    ("predictions", "rows", slow_link_predictions),
    ("predictions", "many", many_ranks),
    ("slow-link", "rows", link_as_modelled),
    ("compress", "rows", selection),
    ("compress", "rows", kernel_topk),
    ("compress", "levels", kernel_steps),
    ("compress", "levels", kernel_merge),
    ("collectives", "rows", kernel_calls),
)
"""Each with the record that it is made of, and the part of it."""


def _dense_and_gtopk(rows: Rows, size: int) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(name, dense, gTop-k): the fastest settings of both, and both in fp32 where most entries are sent."""
    dense, gtopk = ([row for row in rows if (row["algorithm"], row["P"]) == (n, size)] for n in ("dense", "gtopk"))
    fastest = [min(found, key=lambda row: float(row["measured_ms"])) for found in (dense, gtopk)]
    plain = [[row for row in found if row["wire"] == "fp32"] for found in (dense, gtopk)]
    alike = [max(found, key=lambda row: float(row["density"])) for found in plain]
    return [
        ("fastest of both", fastest[0], fastest[1]),
        (f"both in fp32, {alike[1]['density']:.0%}", alike[0], alike[1]),
    ]


def _claim(name: str) -> dict[str, Any]:
    found: dict[str, Any] = published()["claims"][name]
    return found


def _source(claim: Mapping[str, Any]) -> str:
    return str(published()["sources"][claim["source"]])


def _of(rows: Rows, model: str, size: int, algorithm: str) -> Mapping[str, Any]:
    return next(row for row in rows if (row["model"], row["P"], row["algorithm"]) == (model, size, algorithm))


def _faster_than_spardl(row: Mapping[str, Any], rows: Rows) -> bool:
    return bool(row["exchange_ms"] < _of(rows, row["model"], row["P"], "spardl")["exchange_ms"])
