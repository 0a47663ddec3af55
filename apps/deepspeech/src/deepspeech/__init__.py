"""Speech recognition with every synchronisation algorithm; see `python -m deepspeech --help`."""

from deepspeech.version import __version__

__all__ = ["__version__"]
