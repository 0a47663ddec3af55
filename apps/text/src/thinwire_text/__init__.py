"""Sentiment and language modelling with every synchronisation algorithm of thinwire."""

from thinwire_trainer import version_of

__version__ = version_of("thinwire-text")

__all__ = ["__version__"]
