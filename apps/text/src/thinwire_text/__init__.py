"""Sentiment and language modelling with every synchronisation algorithm of thinwire."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire-text")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
