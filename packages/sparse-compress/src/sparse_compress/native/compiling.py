"""Compiles ``kernels.c`` with the machine's C compiler, during the package's build or in development.

    python -m sparse_compress.native.compiling      # beside kernels.c, unless what is there is up to date

Needs nothing but Python, because the build loads this file alone.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
COMPILED = Path(__file__).with_name("kernels.so")
SWITCH = "SPARSE_COMPRESS_NATIVE"
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden"]
UNLINKED = [] if sys.platform == "darwin" else ["-nostdlib"]  # no C library is named, so that one file serves them all


def compile_kernels(target: Path) -> str | None:
    """Compiles to ``target``; returns None, or one line that says why not.

    The compiler is $CC, or what Python was built with, or cc. Nothing is compiled where $SPARSE_COMPRESS_NATIVE is 0,
    nor on Windows.
    """
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if sys.platform == "win32":
        return "no kernels are compiled on Windows"
    reason = "no C compiler was found"
    for compiler in _compilers():
        partial = target.with_suffix(f".{os.getpid()}.part")
        command = [*compiler, *FLAGS, f'-DSOURCE="{digest()}"', "-o", str(partial), str(SOURCE), *UNLINKED]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            partial.replace(target)  # at once: another process may be loading it
            return None
        partial.unlink(missing_ok=True)
        reason = f"{compiler[0]} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"
    return reason


def digest() -> str:
    """Digest of the source, which is also in the compiled file, so that one of another source is seen."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def _compilers() -> list[list[str]]:
    if "CC" in os.environ:
        return [shlex.split(os.environ["CC"])]
    return [shlex.split(sysconfig.get_config_var("CC") or "cc"), ["cc"]]


def main() -> int:
    """Compiles beside the source; returns 0 even on failure, because the package works without kernels."""
    up_to_date = COMPILED.exists() and digest().encode() in COMPILED.read_bytes()
    reason = None if up_to_date else compile_kernels(COMPILED)
    print(f"sparse-compress: {'kernels compiled' if reason is None else f'without kernels, in NumPy: {reason}'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
