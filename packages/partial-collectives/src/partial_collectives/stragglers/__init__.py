"""Ranks that are late: who they are, what they cost, and how to make some for an experiment."""
