"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, 32×32 in colour."""

from functools import partial

from thinwire_cifar.data import cifar_images, cifar_python
from thinwire_cifar.data.cifar_images import SOURCE
from thinwire_cifar.data.published import Layout, Remote

CLASSES = 10

# SHA-1 as published with the Gluon data sets (mxnet.gluon.data.vision.CIFAR10), MD5 on the page and by torchvision.
LAYOUTS = (
    Layout(
        folder="cifar-10-batches-bin",
        archive=Remote(url=f"{SOURCE}cifar-10-binary.tar.gz", checksum="md5:c32a1d4ab5d03f1284b67883e8d87530"),
        train={
            "data_batch_1.bin": (10_000, "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
            "data_batch_2.bin": (10_000, "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
            "data_batch_3.bin": (10_000, "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
            "data_batch_4.bin": (10_000, "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e"),
            "data_batch_5.bin": (10_000, "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628"),
        },
        test={"test_batch.bin": (10_000, "sha1:67eb016db431130d61cd03c7ad570b013799c88c")},
        read=partial(cifar_images.read, label_bytes=1, classes=CLASSES),
    ),
    Layout(
        folder="cifar-10-batches-py",
        archive=Remote(url=f"{SOURCE}cifar-10-python.tar.gz", checksum="md5:c58f30108f718f92721af3b95e74349a"),
        train={
            "data_batch_1": (10_000, "md5:c99cafc152244af753f735de768cd75f"),
            "data_batch_2": (10_000, "md5:d4bba439e000b95fd0a9bffe97cbabec"),
            "data_batch_3": (10_000, "md5:54ebc095f3ab1f0389bbae665268c751"),
            "data_batch_4": (10_000, "md5:634d18415352ddfa80567beed471001a"),
            "data_batch_5": (10_000, "md5:482c414d41f54cd18b22e5b47cb7c3cb"),
        },
        test={"test_batch": (10_000, "md5:40351d587109b95175f43aff81a1287e")},
        read=partial(cifar_python.read, key="labels", classes=CLASSES),
    ),
)
CIFAR10 = cifar_images.Published(LAYOUTS, CLASSES, mean=(125.3, 123.0, 113.9), deviation=(63.0, 62.1, 66.7))
load = CIFAR10.load
