"""Partial allreduces: rounds that do not wait for the last rank, and lose nothing of what it brings later."""
