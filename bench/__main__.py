"""python -m bench: every benchmark at a size that ends within minutes; python -m bench NAME [--full] for one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench import collectives, compress, eager, overlap, partial, predictions, signals
from bench.slow_link.__main__ import main as slow_link

BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "collectives": collectives.main,
    "compress": compress.main,
    "eager": eager.main,
    "overlap": overlap.main,
    "partial": partial.main,
    "predictions": predictions.main,
    "signals": signals.main,
    "slow-link": lambda argv: slow_link(["check", *argv]),
}


def main(argv: Sequence[str]) -> int:
    """Runs what is asked for; returns the exit status."""
    if not argv:
        return max(_run(name, []) for name in BENCHMARKS)
    name, *options = argv
    if name not in BENCHMARKS:
        print(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return _run(name, options)


def _run(name: str, options: Sequence[str]) -> int:
    print(f"\n== {name}", flush=True)
    return BENCHMARKS[name](options)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
