"""Reading ahead changes no bit: any number of threads, interrupted or not; and each sample has numbers of its own."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import small_files
import torch
from communicators import SimulatedWorld
from thinwire_cifar.__main__ import APP
from thinwire_cifar.classification import Classification, build
from thinwire_cifar.data import imagenet
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run


def trained(tmp_path: Path, name: str, flags: str) -> tuple[dict[str, Any], list[Any]]:
    argv = (
        f"--dnn mlp --lr 0.01 --batch-size 8 --data-dir {tmp_path / 'data'} --output {tmp_path / name} {flags}".split()
    )
    options = parse(argv, APP, world_size=2)
    SimulatedWorld(2).run(lambda comm: run(APP, options, comm))
    rows = read_metrics(tmp_path / name / "metrics.jsonl")
    figures = [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in rows]
    return torch.load(tmp_path / name / "model.pt", weights_only=True), figures


def same(one: tuple[dict[str, Any], list[Any]], other: tuple[dict[str, Any], list[Any]]) -> bool:
    return one[1] == other[1] and all(torch.equal(one[0][name], other[0][name]) for name in one[0] | other[0])


class Killed(Exception):  # noqa: N818 - not an error of ours
    """In place of a signal."""


@pytest.mark.parametrize("dataset", ["cifar10", "imagenet"])
def test_any_number_of_readers_and_a_resume_give_the_same_bits(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire_cifar.data.imagenet.SIZE", 20)
    {"cifar10": small_files.cifar10_binary, "imagenet": small_files.imagenet}[dataset](tmp_path / "data", 10)
    flags = f"--dataset {dataset} --max-epochs 2 --checkpoint-every 1"
    uninterrupted = trained(tmp_path, "none", f"{flags} --readers 0")
    assert same(uninterrupted, trained(tmp_path, "three", f"{flags} --readers 3"))
    assert not same(uninterrupted, trained(tmp_path, "other", f"{flags} --seed 1"))

    from thinwire_trainer.training import loop

    real, taken = loop.save_if_due, []

    def saved_then_killed(training: Any) -> None:
        real(training)
        taken.append(training.steps)
        if taken.count(1) == 2:  # both ranks, in the middle of the first epoch or at its end
            raise Killed("Killed")

    monkeypatch.setattr(loop, "save_if_due", saved_then_killed)
    with pytest.raises(Exception, match=r"Killed|ended|left"):
        trained(tmp_path, "resumed", f"{flags} --readers 2")
    monkeypatch.setattr(loop, "save_if_due", real)
    assert same(uninterrupted, trained(tmp_path, "resumed", f"{flags} --readers 1 --resume"))


def test_every_epoch_and_run_has_a_seed_of_its_own_that_ranks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    real = Classification.read_train
    monkeypatch.setattr(
        Classification, "read_train", lambda self, indices, seed: seeds.append(seed) or real(self, indices, seed)
    )
    small_files.cifar10_binary(tmp_path / "data")
    for run_seed in (0, 1):
        trained(tmp_path, f"seed-{run_seed}", f"--dataset cifar10 --max-epochs 3 --seed {run_seed}")
    steps = 2  # of 30 images on 2 ranks with batches of 8
    assert Counter(seeds) == dict.fromkeys(set(seeds), 2 * steps)
    assert len(set(seeds)) == 6


def test_epochs_and_samples_are_augmented_unlike(tmp_path: Path) -> None:
    small_files.cifar10_binary(tmp_path)
    options = parse(["--dnn", "mlp", "--dataset", "cifar10", "--data-dir", str(tmp_path)], APP, world_size=None)
    task = build(options, torch.device("cpu"))
    everything = torch.arange(task.train_size)
    first, again, next_epoch = (task.read_train(everything, seed).pixels for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != next_epoch).flatten(1).any(1).sum() > 25  # of 30; one in 162 is as it was


def test_images_are_listed_in_the_order_of_classes_and_names(tmp_path: Path) -> None:
    root = small_files.imagenet(tmp_path, images=6, classes=3)
    (root / "train" / "n00000001" / "notes.txt").write_text("no image")
    assert imagenet.listing(root / "train") == [
        (f"n0000000{place}", f"{image}.JPEG") for place in range(3) for image in (place, place + 3)
    ]
