"""What a lost step leaves in error feedback of the tensors that spoiled it."""

import pytest
import torch
from sparse_compress import ErrorFeedback, TopK


def test_only_these_spans_begin_anew():
    feedback = ErrorFeedback(TopK(0.2), momentum=0.5)
    feedback.compress("a", torch.tensor([1.0, torch.nan, torch.inf, 2.0, torch.nan]))
    feedback.drop("a", [slice(1, 3), slice(4, 5)])
    state = feedback.state_dict()
    for memory in ("residuals", "velocities"):
        assert state[memory]["a"].tolist() == [1, 0, 0, 2, 0]
    with pytest.raises(KeyError, match="no residual of 'b'"):
        feedback.drop("b", [])
