"""Sentiment and language modelling with every synchronisation algorithm of thinwire."""

from thinwire_text.version import __version__

__all__ = ["__version__"]
