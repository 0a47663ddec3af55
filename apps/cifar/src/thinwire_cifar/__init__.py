"""Image classification with every synchronisation algorithm: `python -m thinwire_cifar --help`."""

from thinwire_trainer import version_of

__version__ = version_of("thinwire-cifar")

__all__ = ["__version__"]
