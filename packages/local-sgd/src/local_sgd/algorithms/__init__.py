"""One file per algorithm: its equation, and the same equation as code."""
