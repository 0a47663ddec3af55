"""Image classification with every synchronisation algorithm: `python -m thinwire_cifar --help`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire-cifar")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
