"""What several test files advise without."""

import pytest
from sparse_collectives import ALGORITHMS, Handling


@pytest.fixture
def costs_nothing(monkeypatch):
    """Advice within milliseconds, by costs of nothing: measuring a rank's own takes two seconds."""
    free = Handling(0.0, {}, dict.fromkeys(ALGORITHMS, 0.0))
    monkeypatch.setattr("sparse_collectives.prediction.measure_handling", lambda comm, **situation: free)
    monkeypatch.setattr("thinwire.advice.measuring.measure_work", lambda shapes, device: {})
    monkeypatch.setattr("thinwire.advice.measuring.measure_around", lambda *shapes, **asked: 0.0)
    monkeypatch.setattr("thinwire.advice.measuring.share_taken", lambda comm: 0.0)
