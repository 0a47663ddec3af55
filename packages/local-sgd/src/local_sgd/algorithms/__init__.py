"""Algorithms, one per file: its equation, and the same equation as code."""
