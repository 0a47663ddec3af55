"""Ports: what joins a rank to all others, where ranks are not joined alike; as text, in presets, between two ranks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

UNITS = {
    "rate": {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3},
    "delay": {"us": 1e-3, "ms": 1.0, "s": 1e3},
    "share": {"%": 1e-2},
}
SLOWEST, FASTEST, LONGEST = 1e-3, 1e6, 1e5  # Mbit/s and ms
EXAMPLES = {"rate": "100mbit or 1gbit", "delay": "1ms or 50us", "share": "0.1%"}


@dataclass(frozen=True, kw_only=True)
class Port:
    """Connection of a rank to all others. Of what lies between two ranks, theirs are halves: the mean counts.

    Attributes:
        up: Mbit/s that the rank sends.
        down: Mbit/s that it receives.
        delay: Milliseconds one way between two such ranks.
        jitter: Most milliseconds by which a packet's delay differs; packets of a pair stay in order.
        loss: Share of the packets between two such ranks that is lost.
        far: Milliseconds one way between two such ranks of unlike regions, besides `delay`.
        region: Name of the rank's region.

    Raises:
        ValueError: A value is out of range.
    """

    up: float = 100.0
    down: float = 100.0
    delay: float = 1.0
    jitter: float = 0.0
    loss: float = 0.0
    far: float = 0.0
    region: str = ""

    def __post_init__(self) -> None:
        rates = all(SLOWEST <= rate <= FASTEST for rate in (self.up, self.down))
        delays = all(0 <= delay <= LONGEST for delay in (self.delay, self.far)) and 0 <= self.jitter <= self.delay
        if not rates or not delays or not 0 <= self.loss < 1:
            raise ValueError(
                f"expected rates from {SLOWEST:g} to {FASTEST:g} Mbit/s, delays from 0 to {LONGEST / 1e3:g} s, a "
                f"jitter from 0 to the delay and a loss from 0 % to below 100 %: {self}"
            )


KINDS = {"up": "rate", "down": "rate", "delay": "delay", "jitter": "delay", "far": "delay", "loss": "share"}
PRESETS = {
    "datacentre": Port(up=1000, down=1000, delay=0.1),
    "home": Port(up=25, down=250, delay=15, jitter=3, loss=1e-4),
    "mobile": Port(up=10, down=50, delay=30, jitter=10, loss=1e-3),
    "two-regions": Port(up=200, down=200, delay=0.5, far=40),
}
"""two-regions: the first half of the ranks in one region, the others in another."""


def amount(text: str, kind: str) -> float:
    """Parses a rate into Mbit/s, a delay into milliseconds, a share of 100 %. ValueError says what is expected."""
    units = UNITS[kind]
    matched = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]+|%)", text.strip().lower())
    if matched is None or matched[2] not in units:
        raise ValueError(
            f"expected a {kind} such as {EXAMPLES[kind]} (units: {', '.join(units)}), got {text.strip()!r}"
        )
    return float(matched[1]) * units[matched[2]]


def ports_of(lines: Iterable[str], ranks: int, default: Port) -> list[Port]:
    """The ports of all ranks: `default`, changed by lines such as "3: up=5mbit, delay=30ms" or "0-3: home, loss=1%".

    Before the colon are ranks, or "all"; after it a preset, if any, and settings of what `Port` has. A later line
    changes what earlier ones made; a preset begins anew.

    Raises:
        ValueError: A line is not understood, or names a rank that there is not.
    """
    ports = [default] * ranks
    for line in lines:
        which, colon, settings = line.partition(":")
        try:
            if not colon:
                raise ValueError("expected RANKS:SETTINGS")
            for rank in _ranks(which, ranks):
                ports[rank] = _changed(ports[rank], settings, rank, ranks)
        except ValueError as error:
            raise ValueError(
                f"{line.strip()!r}: {error}, as in 3:up=5mbit,down=50mbit,delay=30ms or 0-2:home"
            ) from None
    if (len({port.region for port in ports}) > 1) != any(port.far for port in ports):
        raise ValueError("far is the delay between unlike regions, and one without the other has no effect: give both")
    return ports


def lines_of(path: Path) -> list[str]:
    """Lines of a file of ports, without empty ones and comments (#)."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def between(ports: Sequence[Port], source: int, target: int) -> tuple[float, float, float]:
    """Seconds of delay, seconds of jitter, and share that is lost, from one rank to another."""
    one, other = ports[source], ports[target]
    far = (one.far + other.far) / 2 if one.region != other.region else 0.0
    delay, jitter = (one.delay + other.delay) / 2 + far, (one.jitter + other.jitter) / 2
    return 1e-3 * delay, 1e-3 * jitter, (one.loss + other.loss) / 2


def _ranks(text: str, ranks: int) -> list[int]:
    """Parses "all", "3", "0-2" or "1,4-5"."""
    if text.strip() == "all":
        return list(range(ranks))
    found = list[int]()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if matched is None:
            raise ValueError(f"expected ranks such as 3, 0-2 or all, got {text.strip()!r}")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not first <= last < ranks:
            raise ValueError(f"ranks are 0 to {ranks - 1}, got {part.strip()!r}")
        found += range(first, last + 1)
    return found


def _changed(port: Port, text: str, rank: int, ranks: int) -> Port:
    changed: dict[str, Any] = {}
    for number, part in enumerate(text.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals and number == 0 and name in PRESETS:
            region = f"{2 * rank // ranks}" if PRESETS[name].far else ""
            port, changed = PRESETS[name], {"region": region}
        elif equals and name == "region":
            changed[name] = value
        elif equals and name in KINDS:
            changed[name] = amount(value, KINDS[name])
        else:
            known = f"settings are {', '.join(field.name for field in fields(Port))}; presets: {', '.join(PRESETS)}"
            raise ValueError(f"expected a preset or NAME=VALUE, got {part.strip()!r}; {known}")
    return replace(port, **changed)
