"""Independent seeds for every purpose, derived from the one that the user gives."""

import numpy as np

SHUFFLE, AUGMENT, DROPOUT = range(3)  # purposes


def derived_seed(seed: int, purpose: int, index: int) -> int:
    """A 64-bit seed for one purpose and one rank or epoch; equal on every machine and rank."""
    return int(np.random.SeedSequence([seed, purpose, index]).generate_state(1, np.uint64)[0])
