"""What a lost step leaves of NaN and inf in error feedback."""

import torch
from sparse_compress import ErrorFeedback, TopK


def test_only_what_is_not_finite_is_dropped():
    feedback = ErrorFeedback(TopK(0.2), momentum=0.5)
    feedback.compress("a", torch.tensor([1.0, torch.nan, torch.inf, 2.0, torch.nan]))
    feedback.drop_nonfinite("a")
    state = feedback.state_dict()
    for memory in ("residuals", "velocities"):
        assert state[memory]["a"].tolist() == [1, 0, 0, 2, 0]
