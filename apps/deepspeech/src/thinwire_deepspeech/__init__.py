"""Speech recognition with every synchronisation algorithm; see `python -m deepspeech --help`."""

from thinwire_deepspeech.version import __version__

__all__ = ["__version__"]
