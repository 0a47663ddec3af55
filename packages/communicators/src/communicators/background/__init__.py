"""Calls under way over a transport: the engine that drives them, and how all ranks fail for the same reason."""
