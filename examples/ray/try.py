"""Runs the examples of this folder on a Ray cluster of this machine's, one after another; nothing of it is left.

pip install "ray[train]" scikit-learn
python examples/ray/try.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
COMMANDS = (["digits.py", "hook"], ["digits.py", "updates"], ["digits.py", "diloco"], ["elastic.py"])
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}


def tried(words: list[str], folder: str) -> int:
    """Runs one, shows what it says, or why it failed, and returns its exit code; Ray's processes end with it."""
    print(f"$ python examples/ray/{' '.join(words)}", flush=True)
    environment = {**os.environ, **QUIET, "RAY_TMPDIR": folder}
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    own = [line for line in done.stdout.splitlines() if not line.startswith("\033")]  # not what Ray says, in colours
    print(*own, *(done.stderr.splitlines() if done.returncode else []), sep="\n", flush=True)
    return done.returncode


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is below is tidied up
    with TemporaryDirectory(prefix="ray") as folder:
        sys.exit(max(tried(words, folder) for words in COMMANDS))
