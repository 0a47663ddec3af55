"""Runs that are killed again and again, each time at a random moment, and gone on with: do they end in the same bits?

    python -m bench kills [--kills N] [--algorithms NAME …] [--seed S] [--full] [--output DIR]

For each algorithm: a run that nobody touches, and one that is killed (SIGKILL to every process of it) N times, at a
random time after it has begun to train or, now and then, after its start, with `--resume` after each. At the end the
model, the metrics but for the seconds, and all that every rank holds must be the same, bit for bit. With --full N is 20
and there are 4 ranks. Exit status 1 where anything differs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.record import asked, parser_of, record

ALGORITHMS = {
    "dense": [],
    "gtopk": ["--density", "0.01"],
    "spardl": ["--density", "0.01", "--teams", "2"],
    "local-sgd": [],
    "overlap-local-sgd": [],
}
COMMON = "--checkpoint-every 3 --lr 0.05 --batch-size 64"
FROM_START = 0.2  # of the kills
LONGEST_WAIT = 1.0  # seconds, once it trains
LIMIT = 1500.0  # seconds for one launch, on a busy machine
SHOWN = 10  # differences


@dataclass(frozen=True)
class Run:
    """One run of `python -m cifar`, of a fresh or a continued one."""

    algorithm: str
    ranks: int
    epochs: int
    folder: Path

    def start(self) -> subprocess.Popen[bytes]:
        """In a session of its own, so that all of it can be killed at once."""
        flags = [*COMMON.split(), "--algorithm", self.algorithm, *ALGORITHMS[self.algorithm]]
        size = ["--max-epochs", str(self.epochs), "--nworkers", str(self.ranks), "--output", str(self.folder)]
        again = ["--resume"] if (self.folder / "config.json").exists() else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "cifar", *flags, *size, *again],
            env=environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """To the end."""
        if code := self.start().wait(LIMIT):
            raise RuntimeError(f"the run in {self.folder} ended with {code}")

    def killed(self, chance: random.Random) -> bool:
        """Go on with it and kill it at some time; whether it was still there."""
        reached, process = self.newest(), self.start()
        end = time.monotonic() + LIMIT
        from_start = chance.random() < FROM_START
        while not from_start and process.poll() is None and self.newest() == reached and time.monotonic() < end:
            time.sleep(0.01)
        try:
            process.wait(chance.uniform(0.0, LONGEST_WAIT * (4 if from_start else 1)))
            return False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._wait_for_ranks()
            return True

    def newest(self) -> str:
        """The newest checkpoint's name."""
        return max((path.parent.name for path in self.folder.glob("checkpoints/*/manifest.json")), default="")

    def _wait_for_ranks(self) -> None:
        """Launchers put ranks into sessions of their own: those end when they see that mpiexec has."""
        end = time.monotonic() + LIMIT
        while any(self._is_of_it(process) for process in Path("/proc").glob("[0-9]*")):
            if time.monotonic() > end:
                raise RuntimeError(f"ranks of the run in {self.folder} are left")
            time.sleep(0.05)

    def _is_of_it(self, process: Path) -> bool:
        try:
            return str(self.folder).encode() in (process / "cmdline").read_bytes()
        except OSError:
            return False


def result(run: Run) -> dict[str, Any]:
    """All that a run ends with, but for its seconds."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    states = {}
    for path in sorted(run.folder.glob(f"checkpoints/{run.newest()}/rank*.pt")):
        states[path.name] = torch.load(path, weights_only=True)
        states[path.name]["totals"] = _unmeasured(states[path.name]["totals"])
    model = torch.load(run.folder / "model.pt", weights_only=True)
    return {"metrics": [_unmeasured(row) for row in rows], "model": model, "states": states}


def _unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith(("seconds", "hidden_fraction"))}


def differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Where two results are not the same, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        if found.dtype != expected.dtype or found.numpy().tobytes() != expected.numpy().tobytes():
            yield place
    elif isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for key, value in expected.items():
            yield from differences(found[key], value, f"{place}/{key}")
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(found) == len(expected):
        for number, value in enumerate(expected):
            yield from differences(found[number], value, f"{place}/{number}")
    elif found != expected:
        yield f"{place}: {found!s:.60}, expected {expected!s:.60}"


def chain(algorithm: str, *, kills: int, ranks: int, chance: random.Random) -> dict[str, Any]:
    """One algorithm's row. Runs are long enough for so many kills."""
    began, epochs = time.perf_counter(), 2 + 3 * kills
    with tempfile.TemporaryDirectory() as folder:
        straight, broken = (Run(algorithm, ranks, epochs, Path(folder) / name) for name in ("straight", "broken"))
        straight.finish()
        done = 0
        while done < kills and broken.killed(chance):
            done += 1
        broken.finish()
        found = list(differences(result(broken), result(straight)))
    for place in found[:SHOWN]:
        print(f"{algorithm}: another {place}", flush=True)
    seconds = round(time.perf_counter() - began, 1)
    return {"algorithm": algorithm, "ranks": ranks, "kills": done, "same": not found, "seconds": seconds}


COLUMNS = ("algorithm", "ranks", "kills", "same", "seconds")
AGAINST = "the same run without kills, bit for bit"


def main(argv: Sequence[str] = ()) -> int:
    """Prints a line for each algorithm; returns the exit status."""
    parser = parser_of("kills", __doc__, full="20 kills, 4 ranks")
    parser.add_argument("--kills", type=int, help="of each run; default 3, with --full 20")
    parser.add_argument("--ranks", type=int, metavar="P", help="default 2, with --full 4")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0, help="of the times; default 0")
    options = asked(parser, argv, kills=(3, 20), ranks=(2, 4))
    one = partial(chain, kills=options.kills, ranks=options.ranks, chance=random.Random(options.seed))
    labels, chains = COLUMNS[:2], map(one, options.algorithms)
    rows = record(options, chains, labels=labels, values=("kills",), against=AGAINST, shown=COLUMNS)
    return 0 if all(row["same"] and row["kills"] == options.kills for row in rows) else 1
