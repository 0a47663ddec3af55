"""What decides how well a sparse training learns, one thing at a time: `python -m bench sweeps`."""

from bench.sweeps.command import main

__all__ = ["main"]
