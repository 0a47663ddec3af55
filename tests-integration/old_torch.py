"""What the oldest torch that the packages take cannot do."""

import pytest
import torch

OLD = torch.__version__ < (2, 7)


def since_2_7(reason):
    """Mark of a test of what came with torch 2.7."""
    return pytest.mark.skipif(OLD, reason=f"torch {torch.__version__} {reason}")
