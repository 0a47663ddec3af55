"""Fashion-MNIST (Xiao et al. 2017): articles of clothing, as many images and classes as MNIST, in its format.

The files have the names of MNIST's, so they are looked for in folders of their own first.
"""

from thinwire_cifar.data.mnist import Files, Published

SOURCE = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
PLACES = ("fashion-mnist", "FashionMNIST/raw", "")
"""Of Debian's dataset-fashion-mnist below /usr/share/datasets, of torchvision, and below none."""
FILES: Files = {
    "train": (
        60_000,
        [
            ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
        ],
    ),
    "test": (
        10_000,
        [
            ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
        ],
    ),
}
load = Published(SOURCE, PLACES, FILES, mean=72.9, deviation=90.0).load
