"""Adapters for training frameworks: one module each, which imports its framework; none is a dependency."""
