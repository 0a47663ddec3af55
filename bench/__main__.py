"""python -m bench: every benchmark at a size that ends within minutes; python -m bench NAME [--full] for one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from slow_link import enter_user_namespaces

BENCHMARKS = {
    "advise": "bench.advise:main",
    "bits": "bench.bits:main",
    "cluster": "bench.cluster:main",
    "collectives": "bench.collectives:main",
    "compress": "bench.compress:main",
    "compress-gpu": "bench.compress_gpu:main",
    "convergence": "bench.convergence.command:main",
    "demo": "bench.demo:main",
    "eager": "bench.eager:main",
    "elastic": "bench.elastic:main",
    "elastic-learning": "bench.elastic_learning:main",
    "input": "bench.input:main",
    "learning": "bench.learning:main",
    "local-sgd": "bench.local_sgd:main",
    "local-sgd-peers": "bench.local_sgd_peers:main",
    "overlap": "bench.overlap:main",
    "partial": "bench.partial:main",
    "peers": "bench.peers:main",
    "predictions": "bench.predictions:main",
    "scaling": "bench.scaling:main",
    "kills": "bench.kills:main",
    "slow-link": "bench.slow_link_check:main",
    "sweeps": "bench.sweeps.command:main",
    "trainer": "bench.trainer:main",
    "walk": "bench.walk:main",
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
    status: int = resolve_name(BENCHMARKS[name])(options)
    return status


if __name__ == "__main__":
    enter_user_namespaces()  # where links are emulated, if this is not root
    raise SystemExit(main(sys.argv[1:]))
