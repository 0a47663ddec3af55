"""Handwritten digits, 8×8, bundled with scikit-learn: 1,437 to train on and 360 to test with.

Half of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998). Nothing is downloaded.
"""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch

from thinwire_cifar.data.images import Images, Loaded

TEST_SIZE = 360
FILE = "sklearn/datasets/data/digits.csv.gz"


def load(data_dir: Path, *, download: bool = False) -> Images:
    """The data set; `data_dir` is not needed."""
    del data_dir, download
    rows = torch.from_numpy(_rows())
    pixels = rows[:, :-1].to(torch.uint8).view(-1, 1, 8, 8)  # 0 … 16
    labels = rows[:, -1].long()
    # The legacy generator, because NumPy promises that its stream never changes: the split is the same everywhere.
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[np.random.RandomState(0).permutation(len(labels))[:TEST_SIZE]] = True
    shown = pixels[~test].double()
    return Images(
        train=Loaded(pixels=pixels[~test], labels=labels[~test]),
        test=Loaded(pixels=pixels[test], labels=labels[test]),
        classes=10,
        channels=1,
        size=8,
        mean=(shown.mean().item(),),
        deviation=(shown.std().item(),),
    )


def _rows() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[1797, 65], 64 pixels and the class each: what sklearn.datasets.load_digits reads, by its file alone.

    Importing scikit-learn would take every rank a second.
    """
    rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    rows = np.loadtxt(str(distribution("scikit-learn").locate_file(FILE)), delimiter=",")
    return rows
