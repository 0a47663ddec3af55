"""The tests of sparse-compress' kernels, with the kernels compiled under gcc's address and undefined sanitizers.

    python -m bench.sanitize [PYTEST OPTION …]

Exit status 0 where nothing was found. Needs gcc and its libasan and libubsan. Not among the checks: it takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sparse_compress.native.compiling import SWITCH, compile_kernels

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
TESTED = ("native", "packing", "topk", "merge", "fused")
TESTS = [
    *(f"packages/sparse-compress/tests/test_compress_{what}.py" for what in TESTED),
    "packages/sparse-collectives/tests/test_kth_largest.py",
]
# What a sanitizer says before it ends the process must not be captured.
PYTEST = ["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=3600"]


def main(options: Sequence[str]) -> int:
    """Compiles, and runs pytest with the sanitizers' libraries loaded first."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder, "kernels.so")
        reason = compile_kernels(kernels, extra=FLAGS)
        if reason is not None:
            print(f"cannot be compiled: {reason}", file=sys.stderr)
            return 1
        environment = {
            **os.environ,
            SWITCH: str(kernels),
            "LD_PRELOAD": " ".join(_library(name) for name in ("libasan.so", "libubsan.so")),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        }
        command = [sys.executable, "-m", "pytest", *PYTEST, *TESTS, *options]
        return subprocess.run(command, env=environment, check=False).returncode


def _library(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
