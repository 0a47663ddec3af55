"""Mutated checkpoints with sound checksums, as somebody would write them: resumed, or refused in one line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import as_communicator
from damaged_runs import STEPS, Stopped, alarm, train
from mutants import Foreign, mutated_archive, mutated_json, mutated_state, saved
from points import APP
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.launching.ending import exit_code
from thinwire_trainer.launching.placement import Placement
from thinwire_trainer.records.durable import sealed, unsealed
from thinwire_trainer.run import run
from thinwire_trainer.trained import trained

ALGORITHMS = ("dense", "gtopk", "local-sgd", "eager-majority")
CASES = 8
NEWEST = "checkpoints/00000008"
FLAGS = ["--batch-size", "4", "--max-epochs", "2", "--lr", "0.05", "--momentum", "0.9", "--checkpoint-every", "2"]


@pytest.fixture(params=ALGORITHMS)
def stopped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Options]:
    """Options of a run that was stopped in its second epoch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        output = str(tmp_path / "stopped")
        options = parse(["--algorithm", request.param, *FLAGS, "--output", output], APP, world_size=None)
        train(APP, options, steps=STEPS)
        yield options


def resealed(folder: Path, content: bytes) -> None:
    """Puts a state of rank 0 into the newest checkpoint, and its checksum into the manifest."""
    (folder / NEWEST / "rank0.pt").write_bytes(content)
    manifest = unsealed(folder / NEWEST / "manifest.json")
    manifest["files"][0] |= {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / NEWEST / "manifest.json").write_text(sealed(manifest))


def for_a_step() -> App:
    """The app, which stops at the second step."""

    def build(options: Options, device: torch.device) -> Any:
        task = APP.build(options, device)
        loss, steps = task.loss, iter([1])

        def once(*batch: Any) -> Any:
            if not next(steps, 0):
                raise Stopped
            return loss(*batch)

        task.loss = once
        return task

    return replace(APP, build=build)


def resumed(options: Options) -> str:
    """Line in which a run is refused; "" where training goes on by a step."""
    error, place = io.StringIO(), Placement(launcher="mpiexec", rank=0, size=1)
    options = replace(options, resume="latest")
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()), alarm():
        try:
            code = exit_code(lambda: run(for_a_step(), options, as_communicator(None)), place, program="points")
        except Stopped:
            return ""
    said = error.getvalue()
    if (
        "the parameters are not those that the loaded state was saved with" in said
    ):  # at the first step, which sees them
        return ""
    assert code == 1, said
    assert said.count("\n") == 1, said
    assert said.startswith("points: error: ")
    assert len(said) < 1500
    return said


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "lock"
    }


def mutants(folder: Path, dice: random.Random) -> Iterator[Callable[[Path], object]]:
    """Changes of a copy of the run's folder."""
    archive = (folder / NEWEST / "rank0.pt").read_bytes()
    state = torch.load(io.BytesIO(archive), weights_only=True)
    for _ in range(CASES):
        yield lambda copy: resealed(copy, saved(mutated_state(state, dice)))
        part = dice.choice(["position", "totals"])
        yield lambda copy, part=part: resealed(copy, saved(state | mutated_state({part: state[part]}, dice)))  # type: ignore[misc]
        yield lambda copy: resealed(copy, mutated_archive(archive, dice))

        def manifest(copy: Path) -> None:
            told = json.dumps(unsealed(copy / NEWEST / "manifest.json"))
            with contextlib.suppress(ValueError, RecursionError):
                (copy / NEWEST / "manifest.json").write_text(sealed(json.loads(mutated_json(told, dice))))

        yield manifest


@pytest.mark.filterwarnings("ignore")
def test_resumed_or_refused_in_one_line_and_nothing_is_lost(stopped: Options, tmp_path: Path) -> None:
    folder, copy, refused = stopped.output, tmp_path / "copy", 0
    assert folder is not None
    for change in mutants(folder, random.Random(stopped.algorithm)):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy)
        before = files(copy)
        if resumed(replace(stopped, output=copy)):
            refused += 1
            assert files(copy) == before
    assert CASES < refused < 4 * CASES


@pytest.mark.parametrize("stopped", ["dense"], indirect=True)
def test_what_a_checkpoint_would_call_is_not_called(stopped: Options, tmp_path: Path) -> None:
    folder, made = stopped.output, tmp_path / "made"
    assert folder is not None
    resealed(folder, saved({"model": Foreign(made)}))
    assert "UnpicklingError" in resumed(stopped)
    (folder / "model.pt").write_bytes(saved({"weight": Foreign(made)}))
    with pytest.raises(Exception, match=r"model.pt is damaged \(UnpicklingError\)"):
        trained(APP, folder)
    assert not made.exists()
    torch.load(folder / "model.pt", weights_only=False)  # so this shows something
    assert made.exists()
