"""Speech recognition with every synchronisation algorithm; see `python -m thinwire_deepspeech --help`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire-deepspeech")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
