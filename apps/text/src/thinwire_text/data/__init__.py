"""Texts as tokens: one file a data set."""
