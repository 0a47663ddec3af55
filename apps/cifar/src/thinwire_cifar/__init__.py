"""Image classification with every synchronisation algorithm: `python -m thinwire_cifar --help`."""

from thinwire_cifar.version import __version__

__all__ = ["__version__"]
