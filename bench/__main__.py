"""python -m bench: every benchmark at a size that ends within minutes; python -m bench NAME [--full] for one."""

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from slow_link import enter_user_namespaces

NAMES = (
    "advise bits cluster collectives compress compress-gpu demo eager elastic elastic-learning input kills learning "
    "local-sgd local-sgd-peers mutants overlap partial predictions scaling trainer walk wide-area "
    "wide-area-day wide-area-learning"
)
BENCHMARKS = {name: f"bench.{name.replace('-', '_')}:main" for name in NAMES.split()} | {
    "convergence": "bench.convergence.command:main",
    "slow-link": "bench.slow_link_check:main",
    "sweeps": "bench.sweeps.command:main",
    "time-to-quality": "bench.time_to_quality.command:main",
}


def main(argv: Sequence[str]) -> int:
    """Runs what is asked for; returns the exit status."""
    if not argv:
        return max(_run(name, []) for name in BENCHMARKS)
    name, *options = argv
    if name in ("-h", "--help"):
        print(f"{__doc__}\n\nNAME, each with a --help of its own: {', '.join(BENCHMARKS)}")
        return 0
    if name not in BENCHMARKS:
        print(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return _run(name, options)


def _run(name: str, options: Sequence[str]) -> int:
    print(f"\n== {name}", flush=True)
    return resolve_name(BENCHMARKS[name])(options) or 0


if __name__ == "__main__":
    enter_user_namespaces()  # where links are emulated, if this is not root
    raise SystemExit(main(sys.argv[1:]))
