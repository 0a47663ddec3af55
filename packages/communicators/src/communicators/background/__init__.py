"""Calls in flight over a transport: the engine that drives them, and how all ranks fail for the same reason."""
