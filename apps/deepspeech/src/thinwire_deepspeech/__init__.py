"""Speech recognition with every synchronisation algorithm; see `python -m thinwire_deepspeech --help`."""

from thinwire_deepspeech.version import __version__

__all__ = ["__version__"]
