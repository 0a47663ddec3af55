"""Sentiment and language modelling with every synchronisation algorithm of thinwire."""
