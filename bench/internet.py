"""Hours and gigabytes of trainings over the internet, computed for the guide: no measurement is in them."""

from collections.abc import Callable
from typing import Any

from communicators import Link
from sparse_collectives import Traffic, prediction

RANKS, FLOPS, TOKENS_A_STEP = 8, 100e12, 1 << 19
"""Machines; FLOP/s that each does in training; tokens of a step of all together."""
FLOPS_A_TOKEN = 6
"""Per parameter, forward and backward (Kaplan et al., 2020)."""
PARAMETERS = {"125 million": 125e6, "1.3 billion": 1.3e9, "7 billion": 7e9}
LINKS = {"25 Mbit/s": Link(20e-3, 8e-6 / 25), "100 Mbit/s": Link(20e-3, 8e-6 / 100), "1 Gbit/s": Link(1e-3, 8e-9)}
DAY, HOUR = 86_400, 3600


def _whole(bytes_each: int, numel: int) -> Traffic:
    return Traffic.allreduce(bytes_each * numel, 0, RANKS, bytes_each)


WAYS: dict[str, tuple[int, Callable[[int], Traffic]]] = {
    "gradients in bf16, every step": (1, lambda numel: _whole(2, numel)),
    "DiLoCo, τ = 100": (100, lambda numel: _whole(4, numel)),
    'DiLoCo, τ = 100, `compress="int2"`': (100, lambda numel: Traffic.quantised(numel, 0, RANKS, bits=2)),
    'DiLoCo, τ = 500, `compress="int2"`': (500, lambda numel: Traffic.quantised(numel, 0, RANKS, bits=2)),
}
"""Steps from one exchange to the next, and the busiest rank's traffic in it."""


def hours() -> list[dict[str, Any]]:
    """One row a model, way and link: hours of a billion tokens, what is computing of them, and GB a day up."""
    rows = []
    for model, parameters in PARAMETERS.items():
        computing = FLOPS_A_TOKEN * parameters * TOKENS_A_STEP / (RANKS * FLOPS)
        for way, (every, sent) in WAYS.items():
            for name, link in LINKS.items():
                found = prediction.network_seconds([sent(round(parameters))], [0.0], link)
                step = computing + (found["latency"] + found["transfer"]) / every
                row = {"model": model, "way": way, "link": name, "computing": computing / step}
                row |= {
                    "hours": step * 1e9 / TOKENS_A_STEP / HOUR,
                    "gb_a_day": found["nbytes"] / every / step * DAY / 1e9,
                }
                rows.append(row)
    return rows
