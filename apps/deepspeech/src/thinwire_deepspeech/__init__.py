"""Speech recognition with every synchronisation algorithm; see `python -m thinwire_deepspeech --help`."""

from thinwire_trainer import version_of

__version__ = version_of("thinwire-deepspeech")

__all__ = ["__version__"]
