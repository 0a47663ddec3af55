"""Predicted time of an exchange, from measured costs: α, β, and the seconds of selecting and merging.

    seconds = compression + exchange        exchange = Σ over rounds (α + β·bytes) + merging, of the busiest rank

Bytes, messages and rounds are the algorithms' own expressions (`Algorithm.sent`, `Algorithm.merged`), the same that
the tests hold against what a simulated world counts. Pure functions; seconds and bytes throughout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from communicators import Link, schedules
from sparse_compress import TopK, arguments

from sparse_collectives.algorithm import Algorithm, Traffic
from sparse_collectives.algorithms.table import ALGORITHMS, resolve
from sparse_collectives.wire import DENSE_WIRES, WIRES

DDP_BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default `bucket_cap_mb`."""

EXACT_RANKS = 64
"""Up to so many every rank is looked at. An expression of one rank takes O(P): of 1,000, in all variants, minutes."""

HANDLING = 5e-3
"""Seconds of α in which a rank has a message in hand, at most; of messages side by side the rest passes once."""

BACKWARD_SHARE = 2 / 3
"""Share of backward in forward and backward together: backward multiplies twice where forward does once."""


class Handling(NamedTuple):
    """Cost of a rank's own work at one k/n.

    Attributes:
        compress: Seconds per element of the gradient to accumulate, select and put back.
        prescribed: The same by name, for algorithms that prescribe the selection.
        merge: By algorithm and wire ("gtopk", "gtopk in bf16"), seconds of all work between rounds, per merged entry.
    """

    compress: float = 0.0
    prescribed: Mapping[str, float] = MappingProxyType({})
    merge: Mapping[str, float] = MappingProxyType({})


NO_WORK = Handling()


@dataclass(frozen=True, slots=True)
class Prediction:
    """One exchange of one gradient, as the busiest rank sees it.

    Attributes:
        algorithm: Its name.
        numel: n elements.
        density: k/n, 1 where whole gradients are sent.
        wire: Encoding of values, see `WIRES`.
        nbytes: Bytes that a rank sends.
        rounds: Rounds that it takes part in.
        compression: Seconds of selecting.
        latency: Seconds of the α of all rounds, and of the handling of messages beside them.
        transfer: Seconds of β·bytes.
        merging: Seconds of merging and coding.
        options: Settings of the algorithm that were given.
    """

    algorithm: str
    numel: int
    density: float
    wire: str
    nbytes: int
    rounds: int
    compression: float
    latency: float
    transfer: float
    merging: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exchange(self) -> float:
        """Seconds after the selection: network and merging."""
        return self.latency + self.transfer + self.merging

    @property
    def seconds(self) -> float:
        """Seconds of compression and exchange together."""
        return self.compression + self.exchange

    @property
    def name(self) -> str:
        """The variant, with the wire where that is not the usual one."""
        return on_wire(self.variant, self.wire)

    @property
    def variant(self) -> str:
        """The algorithm, with its settings where they are not the usual ones."""
        usual = ALGORITHMS[self.algorithm].options if self.algorithm in ALGORITHMS else {}
        settings = [f"{key}={value}" for key, value in self.options.items() if value != usual.get(key)]
        return " ".join([self.algorithm, *settings])


def on_wire(algorithm: str, wire: str) -> str:
    """Label of an algorithm on a wire: just its name on the usual wire."""
    return algorithm if wire == "fp32" else f"{algorithm} in {wire}"


def predict(
    algorithm: str | Algorithm,
    *,
    size: int,
    numel: int,
    k: int,
    link: Link,
    handling: Handling = NO_WORK,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
    wire: str = "fp32",
) -> Prediction:
    """One algorithm's exchange of k of n elements a rank, over P ranks, as the busiest rank sees it.

    algorithm: a name, or one of your own. dtype: of the gradient. options: the algorithm's own settings. wire: in
    `WIRES`, for "dense" in `DENSE_WIRES`. ValueError or TypeError for what is none of these, or does not fit.
    """
    entry = resolve(algorithm)
    name, selects = entry.name, entry.selects
    for what, value, expected in (("size", size, "ranks"), ("numel", numel, "elements"), ("k", k, "entries of a rank")):
        arguments.integer(value, what, least=1, expected=f"the number of {expected}")
    if not selects and wire not in DENSE_WIRES:
        raise ValueError(f"unknown wire {wire!r} of {name}; known: {', '.join(DENSE_WIRES)}")
    dtype = dtype if selects else DENSE_WIRES[wire] or dtype
    settings = dict(options or {})
    found = _loads(entry, tuple(sorted(settings.items())), wire, size, numel, k, dtype)
    per_entry = handling.merge.get(on_wire(name, wire), 0.0)
    return Prediction(
        name,
        numel,
        min(k, numel) / numel if selects else 1.0,
        wire,
        compression=handling.prescribed.get(name, handling.compress) * numel if selects else 0.0,
        options=settings,
        **network_seconds([traffic for traffic, _ in found], [per_entry * merged for _, merged in found], link),
    )


def with_whole(prediction: Prediction, count: int, *, size: int, link: Link) -> Prediction:
    """The prediction with this many elements summed dense in float32 beside the selection, by the same busiest rank."""
    if not count or prediction.density == 1:
        return prediction
    more = network_seconds([Traffic.allreduce(4 * count, rank, size) for rank in range(size)], [0.0] * size, link)
    found = {name: getattr(prediction, name) + value for name, value in more.items()}
    found["rounds"] = max(prediction.rounds, more["rounds"])
    found["latency"] -= hidden_latency(link) * (min(prediction.latency, more["latency"]) / (link.alpha or 1.0))
    return replace(prediction, **found)


def hidden_latency(link: Link) -> float:
    """Seconds of α that a message does not cost where another one is under way beside it."""
    return max(0.0, link.alpha - HANDLING)


def predict_all(*, size: int, numel: int, link: Link, handling: dict[float, Handling]) -> list[Prediction]:
    """Every variant, fastest first, on the densities and wires that `handling` knows; dense in float32 and bfloat16."""
    given: dict[str, Any] = {"size": size, "numel": numel, "link": link}
    found = []
    for name, entry in ALGORITHMS.items():
        if entry.selects:
            for density, costs in handling.items():
                k = TopK(density).entries(numel)
                for wire in (wire for wire in WIRES if wire == "fp32" or on_wire(name, wire) in costs.merge):
                    found += predict_variants(name, k=k, handling=costs, wire=wire, **given)
        else:
            found += [predict(name, k=numel, wire=wire, **given) for wire in ("fp32", "bf16")]
    return fastest_first(found)


def predict_variants(algorithm: str, *, size: int, **given: Any) -> list[Prediction]:
    """Predictions for all settings of the algorithm that are worth comparing."""
    variants = ALGORITHMS[algorithm].variants(size)
    return [predict(algorithm, size=size, options=options, **given) for options in variants]


def fastest_first(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Sorts by seconds, then by density, densest first, then by name: the same order on every rank."""
    return sorted(predictions, key=lambda p: (p.seconds, -p.density, p.name))


def step_seconds(prediction: Prediction, *, compute: float, backward: float = 0.0) -> float:
    """One training step: forward and backward (`compute` seconds), compression, and what is not hidden of the exchange.

    backward: seconds of `compute` during which buckets travel already; 0 where the exchange comes after it. Buckets
    cost their α each; the last one, whose gradients come when backward ends, is never hidden (Li et al., VLDB 2020).
    """
    if not backward:
        return compute + prediction.seconds
    buckets = max(1, math.ceil(4 * prediction.numel / DDP_BUCKET_BYTES))
    exchange = buckets * prediction.latency + prediction.transfer + prediction.merging
    return compute + prediction.compression + max(exchange / buckets, exchange - backward)


def network_seconds(sent: Sequence[Traffic], merging: Sequence[float], link: Link) -> dict[str, Any]:
    """The largest traffic of all ranks, and the seconds of the one that takes longest. merging: seconds of each."""
    collided = _collisions(sent)
    costs = [(*_network(traffic, link, collided), own) for traffic, own in zip(sent, merging, strict=True)]
    latency, transfer, slowest = max(costs, key=sum)
    most = {"nbytes": max(traffic.nbytes for traffic in sent), "rounds": max(traffic.rounds for traffic in sent)}
    return {**most, "latency": latency, "transfer": transfer, "merging": slowest}


def _network(traffic: Traffic, link: Link, collisions: int) -> tuple[float, float]:
    """Seconds of latency and of transfer of one rank.

    Links are full duplex, so a round takes what its longer direction takes. Where a rank sends in fewer messages than
    it has rounds, it receives in the others, and messages as long as its own.
    """
    if not traffic.messages:
        return 0.0, 0.0
    turns = max(traffic.messages, traffic.rounds) + collisions
    return turns * link.alpha, link.beta * traffic.nbytes * turns / traffic.messages


def _collisions(sent: Sequence[Traffic]) -> int:
    """Messages that wait for others which came early: 1 where some ranks take part in more rounds than others.

    So it is in gtopk where P is no power of two: ranks with a folded partner begin later, and what the others have
    sent by then is in the way. In simulated worlds it is 0 or 1, mostly 1, as events fall.
    """
    return int(len({traffic.rounds for traffic in sent}) > 1)


def ranks_of_interest(size: int) -> Sequence[int]:
    """All ranks or, if there are very many, the first and the last of each role that an algorithm has.

    The roles: r < P − Q with a partner that folds into it, Q the largest power of two; other r < Q; r ≥ Q. Ranks of
    one role differ by an entry or an element a message, as blocks fall.
    """
    if size <= EXACT_RANKS:
        return range(size)
    group = schedules.largest_power_of_two(size)
    return sorted({0, size - group - 1, size - group, group - 1, group, size - 1} & set(range(size)))


@lru_cache(maxsize=1 << 11)  # every link and every simulated rank asks for the same
def _loads(
    entry: Algorithm,
    options: tuple[tuple[str, Any], ...],
    wire: str,
    size: int,
    numel: int,
    k: int,
    dtype: torch.dtype,
) -> list[tuple[Traffic, int]]:
    """Traffic and merged entries of the ranks of interest; if bytes depend on the data, those of random selections."""
    values = torch.promote_types(dtype, torch.float32)  # in which 16 bits travel
    entry = resolve(entry, dict(options), size=size, wire=wire if entry.selects else "fp32", dtype=values)
    return [
        (entry.typical(rank, size, k, numel, dtype), entry.merged(rank, size, k, numel) if size > 1 else 0)
        for rank in ranks_of_interest(size)
    ]
