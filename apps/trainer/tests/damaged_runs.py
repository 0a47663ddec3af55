"""Hundreds of damaged and exchanged run folders: each is resumed to the same bits, or refused in one line.

PYTHONPATH=apps/trainer/tests python -m damaged_runs     all of them (minutes); the tests take some of each kind
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from communicators import CollectiveError, Communicator, SimulatedWorld, as_communicator
from points import APP
from resumed_runs import MEASURED
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.launching.ending import exit_code
from thinwire_trainer.launching.placement import Placement
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run

RUNS = (("dense", 1), ("oktopk", 1), ("gtopk", 2), ("spardl", 2), ("eager-majority", 2))
STEPS = 9  # of 12, 6 an epoch: checkpoints at 6 and 8, one epoch in the metrics
HANG = 120  # seconds; a busy machine stands still for long
OTHERS: dict[str, dict[str, Any]] = {
    "another seed": {"seed": 7},
    "another rate": {"lr": 0.01},
    "another model": {"dnn": "wide"},
}
ANOTHER = "another algorithm"


@dataclass(frozen=True)
class Case:
    """One damage. kind: what a sample has to have at least one of. refused: what must come of it, where that is sure.

    check: what else must hold afterwards, of the folder.
    """

    kind: str
    name: str
    damage: Callable[[Path], None]
    which: str = "latest"
    refused: bool | None = None
    check: Callable[[Path], bool] = lambda folder: True


class Stopped(BaseException):
    """Stands for kill −9."""


class Hung(BaseException):
    """The alarm went off."""


def train(app: App, options: Options, *, ranks: int = 1, steps: int | None = None) -> None:
    """A run to its end, or until so many steps have begun on rank 0."""

    def build(given: Options, device: torch.device) -> Any:
        task = app.build(given, device)
        loss, left = task.loss, steps

        def counted(*args: Any) -> Any:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise Stopped
            return loss(*args)

        task.loss = counted
        return task

    with contextlib.suppress(Stopped, CollectiveError), contextlib.redirect_stdout(io.StringIO()):
        on_ranks(ranks, lambda comm: run(replace(app, build=build), options, comm))


def on_ranks(ranks: int, body: Callable[[Communicator], None]) -> None:
    """A single rank in this thread, where an alarm ends what hangs."""
    if ranks == 1:
        body(as_communicator(None))
    else:
        SimulatedWorld(ranks).run(body)


def bits(value: Any) -> Any:
    """Comparable, tensors by their bits and without times, which no two runs share."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items() if "seconds" not in str(name) and name not in MEASURED}
    return [bits(part) for part in value] if isinstance(value, list | tuple) else value


def result(folder: Path) -> Any:
    """What the run came to: metrics, model, what all ranks hold at the end."""
    files = sorted(folder.glob("checkpoints/00000012/rank*.pt"))
    tensors = [torch.load(file, weights_only=True) for file in [folder / "model.pt", *files]]
    return bits([read_metrics(folder / "metrics.jsonl"), *tensors])


@dataclass
class Campaign:
    """A stopped run, others like it, what it should come to, and what came of the damaged ones."""

    app: App
    options: Options
    other: Options  # of another algorithm
    path: Path
    ranks: int = 1

    def __post_init__(self) -> None:
        self.tried, self.refused, self.faults = 0, 0, dict[str, str]()
        train(self.app, replace(self.options, output=self.path / "straight"), ranks=self.ranks)
        self.expected = result(self.path / "straight")
        train(self.app, replace(self.options, output=self.path / "stopped"), ranks=self.ranks, steps=STEPS)
        others = {name: replace(self.options, **changed) for name, changed in OTHERS.items()}
        for name, other in {**others, ANOTHER: self.other}.items():
            train(self.app, replace(other, output=self.path / name), ranks=self.ranks, steps=STEPS)

    def attempt(self, case: Case) -> None:
        """Damage a copy, resume it, and note what came of it if it is neither right nor refused in one line."""
        folder = self.path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.path / "stopped", folder)
        case.damage(folder)
        self.tried += 1
        before = self.refused
        fault = self._fault(folder, case.which)
        if not fault and case.refused not in (None, self.refused > before):
            fault = "was refused" if self.refused > before else "was not refused"
        if not fault and not case.check(folder):
            fault = "left something that it should not, or not what it should"
        if fault:
            self.faults[case.name] = fault

    @property
    def summary(self) -> str:
        return f"{self.tried} tried, {self.refused} refused, {len(self.faults)} wrong"

    def _fault(self, folder: Path, which: str) -> str:
        error, codes = io.StringIO(), []
        options = replace(self.options, output=folder, resume=which)

        def rank(comm: Communicator) -> None:
            place = Placement(launcher="mpiexec", rank=comm.rank, size=1)  # 1: nothing to abort
            codes.append(exit_code(lambda: run(self.app, options, comm), place, program="points"))

        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()), alarm():
            try:
                on_ranks(self.ranks, rank)
            except (Exception, Hung) as raised:
                return f"{type(raised).__name__}: {raised}"
        if codes == [0] * self.ranks:
            return "" if result(folder) == self.expected else "went on to other bits"
        lines = error.getvalue().splitlines()
        self.refused += 1
        if codes != [1] * self.ranks or len(lines) != 1 or not lines[0].startswith("points: error: "):
            return f"exit codes {codes}, {len(lines)} lines, the last: {lines[-1] if lines else ''}"
        return "" if len(lines[0]) < 1000 else f"a message of {len(lines[0])} characters"


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise Hung(f"nothing came of it within {HANG} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def build(options: Options, device: torch.device, app: App) -> Any:
    """The small task, or with a wider layer."""
    task = app.build(options, device)
    if options.dnn == "wide":
        task.model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
    return task


FILES = ("metrics.jsonl", "config.json", *(f"checkpoints/0000000{s}/{n}" for s in (6, 8) for n in ("manifest.json",)))
FOLDERS = ("checkpoints/00000006", "checkpoints/00000008")


def files(campaign: Campaign) -> list[str]:
    return [*FILES, *(f"{folder}/rank{rank}.pt" for folder in FOLDERS for rank in range(campaign.ranks))]


def flip(content: bytes, drawn: random.Random) -> bytes:
    place = drawn.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << drawn.randrange(8))]) + content[place + 1 :]


def zeroed(content: bytes, drawn: random.Random) -> bytes:
    place = drawn.randrange(len(content))
    return content[:place] + bytes(min(64, len(content) - place)) + content[place + 64 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped": flip,
    "flipped again": flip,
    "flipped elsewhere": flip,
    "zeroed from somewhere": zeroed,
    "truncated somewhere": lambda content, drawn: content[: drawn.randrange(len(content))],
    "without its last byte": lambda content, drawn: content[:-1],
    "empty": lambda content, drawn: b"",
    "all zeros": lambda content, drawn: bytes(len(content)),
    "garbage": lambda content, drawn: drawn.randbytes(len(content)),
    "garbage at the end": lambda content, drawn: content + drawn.randbytes(50),
    "twice": lambda content, drawn: content * 2,
    "a huge number": lambda content, drawn: b"9" * 6000,
    "deep": lambda content, drawn: b"[" * 100_000,
}


def damaged_files(campaign: Campaign) -> Iterator[Case]:
    for name in files(campaign):
        for number, (how, damage) in enumerate(DAMAGES.items()):

            def spoil(folder: Path, name: str = name, damage: Any = damage, number: int = number) -> None:
                content = (folder / name).read_bytes()
                (folder / name).write_bytes(damage(content, random.Random(f"{name} {number}")))

            for which in ("latest", "previous")[: 3 - campaign.ranks]:  # both on one rank
                yield Case(f"{how} {kind_of(name)}", f"{name} {how}, {which}", spoil, which)


def kind_of(name: str) -> str:
    """Of a file: without step and rank."""
    return re.sub(r"\d+", "", name)


def put(path: Path, kind: str) -> None:
    """Something else in place of a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "a dangling link": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path),
        "a link to a device": lambda: path.symlink_to("/dev/zero"),
        "a link to a folder": lambda: path.symlink_to(path.parent),
    }[kind]()


KINDS = (
    "nothing",
    "a folder",
    "a FIFO",
    "a dangling link",
    "a link to itself",
    "a link to a device",
    "a link to a folder",
)


def something_else_in_place_of_a_file_or_folder(campaign: Campaign) -> Iterator[Case]:
    for kind in KINDS:
        for name in [*files(campaign), *FOLDERS, "checkpoints", "model.pt", "model.pt.part"]:
            yield Case(
                f"{kind} {kind_of(name)}",
                f"{kind} in place of {name}",
                lambda folder, name=name, kind=kind: put(folder / name, kind),  # type: ignore[misc]
            )


def what_lies_about(campaign: Campaign) -> Iterator[Case]:
    """Is left alone."""
    del campaign

    def stray(folder: Path) -> None:
        (folder / "checkpoints" / "notes.txt").write_text("mine")
        (folder / "checkpoints" / "00000007").write_text("a file")
        for name in ("00000008 (copy)", "00000008.bak", "9", "00000099x", "٠٠٠٠٠٠٩٩", "000000099"):
            shutil.copytree(folder / "checkpoints" / "00000008", folder / "checkpoints" / name)
        os.mkfifo(folder / "checkpoints" / "pipe")
        (folder / "notes.txt").write_text("mine")

    def are_left(folder: Path) -> bool:
        left = {path.name for path in (folder / "checkpoints").iterdir()}
        kept = {"notes.txt", "00000007", "00000008.bak", "9", "pipe", "٠٠٠٠٠٠٩٩"} <= left
        return kept and stat.S_ISFIFO(os.stat(folder / "checkpoints" / "pipe").st_mode)

    def renamed(folder: Path) -> None:
        (folder / "checkpoints" / "00000006").rename(folder / "checkpoints" / "00000010")

    yield Case("stray files", "stray files", stray, refused=False, check=are_left)
    yield Case("renamed", "a renamed checkpoint", renamed)


def swapped_files(campaign: Campaign) -> Iterator[Case]:
    stopped, *others = (campaign.path / name for name in ("stopped", *OTHERS, ANOTHER))
    for name in files(campaign):
        for other in (*others, stopped):
            for source in {name, name.replace("00000006", "00000008"), name.replace("00000008", "00000006")}:
                if (other, source) == (stopped, name) or not (other / source).exists():
                    continue

                def swap(folder: Path, taken: Path = other / source, name: str = name) -> None:
                    (folder / name).write_bytes(taken.read_bytes())

                yield Case(f"{kind_of(name)} of {other.name}", f"{source} of {other.name} as {name}", swap)


def swapped_checkpoints(campaign: Campaign) -> Iterator[Case]:
    for other in (*OTHERS, ANOTHER):
        for folder in FOLDERS:

            def swap(damaged: Path, other: str = other, folder: str = folder) -> None:
                shutil.rmtree(damaged / folder)
                shutil.copytree(campaign.path / other / folder, damaged / folder)

            yield Case(f"of {other}", f"{folder} of {other}", swap)


def swapped_ranks(campaign: Campaign) -> Iterator[Case]:
    def swap(folder: Path) -> None:
        for checkpoint in FOLDERS:
            files = sorted((folder / checkpoint).glob("rank*.pt"))
            held = [file.read_bytes() for file in files]
            for file, content in zip(files, held[1:] + held[:1], strict=True):
                file.write_bytes(content)

    yield Case("ranks", "ranks swapped", swap, refused=campaign.ranks > 1)


def metrics_that_are_not_those_of_the_checkpoint(campaign: Campaign) -> Iterator[Case]:
    del campaign

    def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        return lambda folder: (
            (folder / "metrics.jsonl").write_bytes(change((folder / "metrics.jsonl").read_bytes())) and None
        )

    changes: dict[str, Callable[[bytes], bytes]] = {
        "the line twice": lambda held: held + held,
        "a line before it": lambda held: held[:40] + b"\n" + held[40:],
        "another number": lambda held: held.replace(b'"steps": ', b'"steps":9'),
        "another epoch": lambda held: held.replace(b'"epoch": 1', b'"epoch": 3'),
        "blanks": lambda held: b" " * len(held),
        "newlines": lambda held: b"\n" * len(held),
        "not UTF-8": lambda held: b"\xff\xfe" + held[2:],
        "no newline": lambda held: held[:-1] + b" ",
        "another line after it": lambda held: held + b"garbage\n",
    }
    for kind, change in changes.items():
        yield Case(kind, kind, rewritten(change))


GROUPS: tuple[Callable[[Campaign], Iterator[Case]], ...] = (
    damaged_files,
    something_else_in_place_of_a_file_or_folder,
    what_lies_about,
    swapped_files,
    swapped_checkpoints,
    swapped_ranks,
    metrics_that_are_not_those_of_the_checkpoint,
)


def begun(algorithm: str, ranks: int, path: Path) -> Campaign:
    """The runs that a campaign needs, in that folder."""
    wide = replace(APP, models={**APP.models, "wide": ""}, build=lambda o, d: build(o, d, APP))
    flags = f"--batch-size {4 // ranks} --max-epochs 2 --lr 0.05 --momentum 0.9 --checkpoint-every 2".split()

    def options(algorithm: str) -> Options:
        return parse(["--algorithm", algorithm, *flags, "--output", str(path / "run")], wide, world_size=None)

    return Campaign(wide, options(algorithm), options("topk-allgather"), path, ranks)


def sampled(cases: Iterator[Case], run: tuple[str, int]) -> list[Case]:
    """One of each kind, and each kind with one of the runs on one rank and one of those on two."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    drawn = random.Random(str(run))
    picked = [drawn.choice(same) for same in kinds.values()]
    return picked[RUNS.index(run) % 2 :: 2] or picked


def main() -> int:
    """All cases of all campaigns; 1 where one of them went wrong."""
    os.fsync = lambda descriptor: None  # nobody cuts the power here
    wrong = 0
    for algorithm, ranks in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            campaign = begun(algorithm, ranks, Path(folder))
            for case in (case for group in GROUPS for case in group(campaign)):
                campaign.attempt(case)
        print(
            f"{algorithm} on {ranks}: {campaign.tried} tried, {campaign.refused} refused, {len(campaign.faults)} wrong"
        )
        print("".join(f"  {name}: {fault}\n" for name, fault in campaign.faults.items()), end="")
        wrong += len(campaign.faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
