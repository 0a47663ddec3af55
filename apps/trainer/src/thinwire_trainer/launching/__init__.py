"""Processes: where they run, how they start and meet, and how they end."""
