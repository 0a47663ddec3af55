"""Data that users bring: files, and what is done about their faults."""
