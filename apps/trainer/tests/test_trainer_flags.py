"""The command line: published flags, and one clear message for each wrong one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sparse_collectives
import torch
from communicators import as_communicator
from sparse_collectives import ALGORITHMS
from sparse_collectives.wire.half import DENSE_WIRES as KNOWN_DENSE_WIRES
from sparse_collectives.wire.wire import WIRES as KNOWN_WIRES
from trainer.app import App
from trainer.command_line.flags import parse
from trainer.errors import RunError
from trainer.synchronisers.literals import literal_dict
from trainer.training.synchronisation import DENSE_WIRES, SYNCHRONISATIONS, WIRES


def test_the_published_command(app: App) -> None:
    flags = "--dnn plain --dataset points --compression --compressor gtopk --density 0.001 --batch-size 32 --lr 0.1"
    options = parse([*flags.split(), "--max-epochs", "140", "--nworkers", "4", "--data-dir", "D"], app, world_size=4)
    assert (options.algorithm, options.density, options.nworkers) == ("gtopk", 0.001, 4)
    assert (options.data_dir, options.output) == (Path("D"), Path("runs/points-plain-points-gtopk"))


@pytest.mark.parametrize(
    ("flags", "algorithm"),
    [
        ("", "dense"),
        ("--algorithm gtopk", "gtopk"),
        ("--compression", "gtopk"),
        ("--compression --compressor topk", "topk-allgather"),
        ("--compression --compressor topkA --algorithm topk-allgather", "topk-allgather"),
        ("--compression --compressor none", "dense"),
    ],
)
def test_two_spellings_of_the_algorithm(app: App, flags: str, algorithm: str) -> None:
    assert parse(flags.split(), app, world_size=None).algorithm == algorithm


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dnn vgg", "'plain', 'dropout'"),
        ("--density 0", "expected 0 < density <= 1"),
        ("--density 1.5", "given '1.5'"),
        ("--density much", "given 'much'"),
        ("--batch-size 0", "expected a whole number from 1 on"),
        ("--batch-size 2.5", "given '2.5'"),
        ("--lr nan", "expected a number above 0"),
        ("--momentum 1", "expected 0 <= momentum < 1"),
        ("--weight-decay -1", "expected a number from 0 on"),
        ("--max-epochs -3", "--max-epochs"),
        ("--compressor gtopk", "--compression"),
        ("--algorithm gtopk --teams 2", "has no effect on gtopk"),
        ("--algorithm spardl --teams 3", "--teams 3 does not divide the 4 workers"),
        ("--algorithm gtopk --wire fp8", "'fp32', 'bf16'"),
        ("--algorithm dense --wire int8", "a dense sum takes fp32, bf16, fp16"),
        ("--compression --compressor topk --algorithm gtopk", "differ"),
        ("--resume --overwrite", "give one of them"),
        ("--resume yesterday", "'latest', 'previous'"),
        ("--nworkers 3", "the launcher started 4"),
        ("--dens 0.1", "unrecognized"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected(app: App, flags: str, says: str) -> None:
    with pytest.raises(RunError) as refusal:
        parse(flags.split(), app, world_size=4)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_tensorboard_is_asked_for_only_where_it_is(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.command_line.flags.find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install tensorboard"):
        parse(["--tensorboard"], app, world_size=None)
    monkeypatch.setattr("trainer.command_line.flags.find_spec", lambda name: name)
    assert parse(["--tensorboard"], app, world_size=None).tensorboard


def test_every_sparse_algorithm_can_be_trained_with() -> None:
    assert list(ALGORITHMS) == list(SYNCHRONISATIONS)
    assert list(KNOWN_WIRES) == list(WIRES)
    assert list(KNOWN_DENSE_WIRES) == list(DENSE_WIRES)


def test_a_new_line_in_the_table_is_a_new_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise ImportError('only read')")
    (tmp_path / "mine" / "algorithms.py").write_text('ALGORITHMS: dict[str, object] = {"dense": f(1), "new": f(2)}')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert literal_dict("algorithms", "ALGORITHMS", package="mine") == ["dense", "new"]


def test_flags_are_checked_before_anything_heavy_is_imported() -> None:
    program = "import sys, trainer.command; sys.exit(bool({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_settings_leave_out_what_shapes_no_number(app: App) -> None:
    def settings(flags: str) -> object:
        return parse(flags.split(), app, world_size=None).settings()

    assert settings("") == settings("--output elsewhere --resume --checkpoint-every 5 --data-dir D")
    assert settings("") != settings("--lr 0.2")
    assert settings("--max-epochs 3") != settings("--max-epochs 4")
    constant = "--lr-schedule constant --max-epochs"
    assert settings(f"{constant} 3") == settings(f"{constant} 4")


@pytest.mark.parametrize("algorithm", ["dense", "gtopk"])
def test_verification_is_asked_of_the_optimizer(app: App, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def optimizer(*given: object, **named: object) -> None:
        asked.append(named.get("verify"))

    monkeypatch.setattr(sparse_collectives, "DistributedOptimizer", optimizer)
    for flags in ("", "--verify 25"):
        options = parse(["--algorithm", algorithm, *flags.split()], app, world_size=None)
        SYNCHRONISATIONS[algorithm](options, torch.nn.Linear(2, 2), as_communicator(None))
        assert options.settings() == parse(["--algorithm", algorithm], app, world_size=None).settings()
    assert asked == [0, 25]


def test_the_readme_lists_every_flag(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], app, world_size=None)
    table = (Path(__file__).parent.parent / "README.md").read_text().partition("## Flags")[2]
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(flags) > 20
    assert {flag for flag in flags if f"`{flag}" not in table and f" {flag}" not in table} == set()
