"""CIFAR-100 (Krizhevsky 2009): as CIFAR-10, with 100 classes (the fine labels)."""

from functools import partial

from thinwire_cifar.data import cifar_images, cifar_python
from thinwire_cifar.data.cifar_images import SOURCE
from thinwire_cifar.data.published import Layout, Remote

CLASSES = 100

# SHA-1 as published with the Gluon data sets (mxnet.gluon.data.vision.CIFAR100), MD5 on the page and by torchvision.
LAYOUTS = (
    Layout(
        folder="cifar-100-binary",
        archive=Remote(url=f"{SOURCE}cifar-100-binary.tar.gz", checksum="md5:03b5dce01913d631647c71ecec9e9cb8"),
        train={"train.bin": (50_000, "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e")},
        test={"test.bin": (10_000, "sha1:8fb6623e830365ff53cf14adec797474f5478006")},
        read=partial(cifar_images.read, label_bytes=2, classes=CLASSES),
    ),
    Layout(
        folder="cifar-100-python",
        archive=Remote(url=f"{SOURCE}cifar-100-python.tar.gz", checksum="md5:eb9058c3a382ffc7106e4002c42a8d85"),
        train={"train": (50_000, "md5:16019d7e3df5f24257cddd939b257f8d")},
        test={"test": (10_000, "md5:f0ef6b0ae62326f3e7ffdfab6717acfc")},
        read=partial(cifar_python.read, key="fine_labels", classes=CLASSES),
    ),
)
CIFAR100 = cifar_images.Published(LAYOUTS, CLASSES, mean=(129.3, 124.1, 112.4), deviation=(68.2, 65.4, 70.4))
load = CIFAR100.load
