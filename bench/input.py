"""Whether the input keeps up: samples a second that are read, and those that the model takes, on one rank.

    python -m bench input [--models NAME ...] [--readers N ...] [--seconds S] [--full] [--output DIR]

Files in the data sets' own formats, generated: CIFAR-10 in memory, cropped and mirrored; JPEG of 500 × 375 (ImageNet's
most usual size) from their files. input: samples a second that N threads read when nobody else works (0: the step reads
for itself). need: those that the model takes when they are there already, forward, backward and update. fed: those that
it takes while they read ahead, and waits: the share of that time that it waits for them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from thinwire_cifar.__main__ import APP
from thinwire_cifar.classification import Classification, build
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.launching.device import clock_of, own_device
from thinwire_trainer.training.batches import train_input
from torch import Tensor

from bench.record import asked, parser_of, record

COLUMNS = ("model", "dataset", "batch", "readers", "input", "need", "fed", "waits")
MODELS = {  # -> data set, batch
    "resnet20": ("cifar10", 32),
    "vgg16": ("cifar10", 16),
    "resnet18": ("imagenet", 8),
    "resnet50": ("imagenet", 8),
}
WIDTH, HEIGHT, PHOTOGRAPHS, PICTURES = 500, 375, 64, 2000

AGAINST = "the training step that the batches are for"


def main(argv: Sequence[str] = ()) -> None:
    """Prints a row for each model and number of readers."""
    parser = parser_of("input", __doc__, full="the numbers to report")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default resnet20, resnet18; with --full all")
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 2, 4], help="default 0 1 2 4")
    parser.add_argument("--seconds", type=float, help="a measurement at least; default 1, with --full 5")
    options = asked(parser, argv, seconds=(1.0, 5.0), models=(["resnet20", "resnet18"], list(MODELS)))
    with tempfile.TemporaryDirectory() as folder:
        _write_cifar10(Path(folder))
        _write_imagenet(Path(folder))
        every = (_measured(model, Path(folder), options.readers, options.seconds) for model in options.models)
        rows, labels, values = chain.from_iterable(every), ("model", "readers"), ("input", "need")
        record(options, rows, labels=labels, values=values, against=AGAINST, shown=COLUMNS)


def _measured(model: str, folder: Path, readers: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    dataset, batch = MODELS[model]
    device = own_device(0)
    argv = ["--dnn", model, "--dataset", dataset, "--data-dir", str(folder)]
    task = build(parse(argv, APP, world_size=None), device)
    task.model.train()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3, momentum=0.9)
    shard = _endless(task.train_size, batch)
    ready = task.read_train(shard[0], 0)
    need, _, needed = _rate(lambda: ready, lambda given: _step(task, optimizer, given), device, batch, seconds)
    for count in readers:
        alone = _reading(task, shard, count, lambda given: None, device, seconds)
        fed = _reading(task, shard, count, lambda given: _step(task, optimizer, given), device, seconds)
        row = dict(zip(COLUMNS, (model, dataset, batch, count, alone[0], need, *fed[:2]), strict=True))
        yield row | {"need_ms_samples": needed, "input_ms_samples": alone[2], "fed_ms_samples": fed[2]}


def _endless(samples: int, batch: int) -> list[Tensor]:
    """More batches than are ever read; no two the same."""
    order = torch.randint(samples, (20_000, batch), generator=torch.Generator().manual_seed(0))
    return list(order)


def _reading(
    task: Classification,
    shard: Sequence[Tensor],
    readers: int,
    use: Callable[[Any], None],
    device: torch.device,
    seconds: float,
) -> tuple[float, float, list[float]]:
    """Samples a second through `use`, the share of the time that was spent waiting, and each batch's milliseconds."""
    with closing(train_input(task, shard, seed=0, readers=readers)) as read:
        for _ in islice(read, 2 * readers + 2):  # until all threads are at work, and the first ones are used up
            pass
        return _rate(lambda: next(read), use, device, len(shard[0]), seconds)


def _rate(
    take: Callable[[], Any], use: Callable[[Any], None], device: torch.device, batch: int, seconds: float
) -> tuple[float, float, list[float]]:
    clock, taking, using = clock_of(device), list[float](), list[float]()
    use(take())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(using) < 5:
        began = clock()
        given = take()
        taken = clock()
        use(given)
        taking.append(taken - began)
        using.append(clock() - taken)
    whole = sum(taking) + sum(using)  # no medians: batches may come in bursts
    each = [round(1e3 * (waited + used), 3) for waited, used in zip(taking, using, strict=True)]
    return batch * len(taking) / whole, sum(taking) / whole, each


def _step(task: Classification, optimizer: torch.optim.Optimizer, given: Any) -> None:
    optimizer.zero_grad()
    task.loss(given, torch.Generator()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _write_cifar10(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    target = folder / "cifar-10-batches-bin"
    target.mkdir()
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = drawn.integers(0, 256, (PICTURES, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (target / name).write_bytes(records.tobytes())


def _write_imagenet(folder: Path) -> None:
    """Smooth images with some noise, which compress about as photographs do."""
    drawn = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(PHOTOGRAPHS):
            target = folder / "imagenet" / split / f"n{number % 4:08}"
            target.mkdir(parents=True, exist_ok=True)
            rough = Image.fromarray(drawn.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            smooth = np.asarray(rough.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
            noisy = smooth + drawn.normal(0, 8, (HEIGHT, WIDTH, 1)).astype(np.int16)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(target / f"{number}.JPEG", quality=90)
