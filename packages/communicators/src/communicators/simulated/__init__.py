"""The simulated world: many ranks in one process, deterministic, with a virtual clock."""
