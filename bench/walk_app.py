"""Way of a command from its start to its first optimizer step: the files and functions of ours in apps/ it enters.

    python -m bench.walk_app [--list] [-- MODULE FLAGS …]

The command is `python -m cifar`, and again with --nworkers 2, unless another is given. A file counts once one of its
functions is entered, on any thread of rank 0 or of the process that starts the workers; module bodies, class bodies
and comprehensions do not count. The walk ends where SGD's or AdamW's own `step` is entered first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

FOUND = "THINWIRE_WALK"
"""Environment variable: the folder where each process of the command leaves what it entered."""

INSIDE = f'''
import atexit, json, os, sys, threading

entered, ended = set(), []

def leave():
    if not ended:
        ended.append(True)
        sys.setprofile(None)
        rank = os.environ.get("PMI_RANK", "0")
        with open(os.path.join(os.environ["{FOUND}"], f"{{rank}}-{{os.getpid()}}.json"), "w") as file:
            json.dump(sorted(entered), file)

def walk(frame, event, argument):
    if event != "call" or ended:
        return
    code = frame.f_code
    head, apps, place = code.co_filename.rpartition("/apps/")
    if apps and "/src/" in place and not code.co_name.startswith("<") and "__qualname__" not in code.co_names:
        entered.add((place.partition("/src/")[2], code.co_qualname))
    elif code.co_name == "step" and code.co_filename.endswith(("torch/optim/sgd.py", "torch/optim/adamw.py")):
        leave()

atexit.register(leave)
threading.setprofile(walk)
sys.setprofile(walk)
'''
"""`sitecustomize.py` of every Python process of the command; multiprocessing's and mpiexec's children have it, too."""


def walked(command: Sequence[str]) -> set[tuple[str, str]]:
    """Files and functions that `python -m COMMAND` enters on rank 0, and in the process that starts it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(INSIDE)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {FOUND: folder, "PYTHONPATH": path}
        command = [sys.executable, "-m", *command, f"--output={folder}/run"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("0-*.json")]
    return {(file, name) for each in found for file, name in each}


def main(argv: Sequence[str]) -> int:
    """Prints the counts; returns the exit status."""
    parser = ArgumentParser(prog="python -m bench.walk_app", description=__doc__)
    parser.add_argument("--list", action="store_true", help="every function")
    parser.add_argument("command", nargs="*", metavar="MODULE FLAGS …")
    given = parser.parse_args(argv)
    short = ["cifar", "--max-epochs", "1", "--batch-size", "360"]
    for command in [given.command] if given.command else [short, [*short, "--nworkers", "2"]]:
        found = walked(command)
        print(f"python -m {' '.join(command)}: {len({file for file, _ in found})} files, {len(found)} functions")
        for file in sorted({file for file, _ in found}) if given.list else ():
            print(f"  {file}: {', '.join(sorted(name for place, name in found if place == file))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
