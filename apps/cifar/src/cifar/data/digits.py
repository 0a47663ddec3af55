"""Handwritten digits, 8×8, bundled with scikit-learn: 1,437 to train on and 360 to test with.

Half of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998). Nothing is downloaded.
"""

from pathlib import Path

import numpy as np
import torch

from cifar.data.images import Images, Loaded

TEST_SIZE = 360


def load(data_dir: Path, *, download: bool = False) -> Images:
    """The data set; `data_dir` is not needed."""
    from sklearn.datasets import load_digits

    del data_dir, download
    bundled = load_digits()
    pixels = torch.from_numpy(bundled.images).to(torch.uint8).unsqueeze(1)  # [1797, 1, 8, 8], 0 … 16
    labels = torch.from_numpy(bundled.target).long()
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
