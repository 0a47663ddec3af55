"""`python -m cifar` on one rank: it trains, resumes, and says in one line what is wrong."""

import shutil
from pathlib import Path

import pytest
import small_files
from thinwire_cifar.__main__ import APP
from thinwire_trainer.command import main
from thinwire_trainer.launching.placement import LAUNCHERS
from thinwire_trainer.records.metrics import read_metrics


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variables in LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and message of a run that is refused; the message is one line."""
    capsys.readouterr()
    code = main(APP, flags.split())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("thinwire_cifar: error: ")
    return code, lines[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dnn resnet21", "given 'resnet21', expected one of 'resnet20', 'resnet32'"),
        ("--dnn resnet21", "or package.module:function for a model of your own"),
        ("--dnn nowhere_to_be_found:build", "there is no package 'nowhere_to_be_found'"),
        ("--dnn thinwire_cifar.models.mlp:", "given 'thinwire_cifar.models.mlp:'"),
        ("--dnn lstm", "lstm is a model of another app: python -m thinwire_text"),
        ("--dnn lstmimdb", "lstmimdb is a model of another app: python -m thinwire_text"),
        ("--dataset cifar", "'digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100', 'imagenet'"),
        ("--readers -1", "given '-1', expected a whole number from 0 on"),
        ("--download", "--download has no effect on digits, which come with scikit-learn: leave it out"),
        ("--data-dir /nowhere", "--data-dir /nowhere has no effect on digits"),
        ("--density 0", "expected 0 < density <= 1"),
        ("--density 1.01", "given '1.01'"),
        ("--lr fast", "given 'fast'"),
    ],
)
def test_wrong_flags(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal(flags, capsys)
    assert code == 2
    assert says in message


def test_missing_and_truncated_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal("--dataset cifar10 --data-dir nowhere", capsys)
    assert code == 1
    assert "missing: nowhere/cifar-10-batches-bin/{data_batch_1.bin, " in message
    assert " or nowhere/cifar-10-batches-py/{data_batch_1, " in message
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in message
    for file in small_files.cifar10_binary(tmp_path / "short").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    code, message = refusal("--dataset cifar10 --data-dir short", capsys)
    assert code == 1
    assert "data_batch_1.bin has 18,437 bytes, expected a multiple of 3,073" in message


@pytest.mark.parametrize("algorithm", ["dense", "gtopk"])
def test_a_gradient_that_is_not_a_number(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refusal(f"--algorithm {algorithm} --lr 1e30 --max-epochs 1", capsys)
    assert code == 1
    assert "rank 0: the gradient of 'conv.weight' is not finite" in message


def test_train_then_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--algorithm gtopk --max-epochs 1 --batch-size 256 --checkpoint-every 3 --output run"
    assert main(APP, flags.split()) == 0
    assert "test_accuracy" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["steps"] for row in rows] == [6]
    assert refusal(flags, capsys)[1].endswith("or another folder with --output")
    damaged = tmp_path / "run" / "checkpoints" / "00000006" / "rank0.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, message = refusal(f"{flags} --resume", capsys)
    assert code == 1
    assert "00000006/rank0.pt is damaged" in message
    assert "--resume previous" in message
    assert main(APP, [*flags.split(), "--resume", "previous"]) == 0
    again = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert again[0]["test_loss"] == rows[0]["test_loss"]


@pytest.mark.parametrize(("file", "part"), [("data_batch_2.bin", "train"), ("test_batch.bin", "test")])
@pytest.mark.parametrize("byte", [0, 700], ids=["label", "pixel"])
def test_a_run_goes_on_only_with_the_same_images(
    file: str, part: str, byte: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = small_run(small_files.cifar10_binary(tmp_path))
    path = tmp_path / "cifar-10-batches-bin" / file
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    code, message = refusal(f"{flags} --resume", capsys)
    assert code == 1
    assert f"run/task.json is not what these data give (other {part} data)" in message


def test_a_run_goes_on_with_the_same_images_in_other_files(tmp_path: Path) -> None:
    flags = small_run(small_files.cifar10_binary(tmp_path))
    shutil.rmtree(tmp_path / "cifar-10-batches-bin")
    small_files.cifar10_python(tmp_path)
    assert main(APP, f"{flags} --resume".split()) == 0


def test_a_run_goes_on_only_with_the_same_folders_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = small_files.imagenet(tmp_path, images=2)
    flags = small_run(root, dataset="imagenet", batch=2)
    image = root / "val" / "n00000000" / "0.JPEG"
    image.rename(image.with_name("another.JPEG"))
    code, message = refusal(f"{flags} --resume", capsys)
    assert code == 1
    assert "run/task.json is not what these data give (other test data)" in message


def test_a_run_without_the_checksums_of_its_images_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = small_run(small_files.cifar10_binary(tmp_path))
    (tmp_path / "run" / "task.json").unlink()
    code, message = refusal(f"{flags} --resume", capsys)
    assert code == 1
    assert "run/task.json is missing; it tells whether these data are those that the run began with" in message


def small_run(folder: Path, *, dataset: str = "cifar10", batch: int = 10) -> str:
    """The flags of a run that has had an epoch with the data in `folder`'s folder, and may have a second one."""
    flags = f"--dnn resnet20 --dataset {dataset} --data-dir {folder.parent} --batch-size {batch} --lr-schedule constant"
    flags = f"{flags} --lr 0.001 --algorithm dense --output run"
    assert main(APP, f"{flags} --max-epochs 1".split()) == 0
    return f"{flags} --max-epochs 2"
