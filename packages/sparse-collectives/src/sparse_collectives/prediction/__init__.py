"""Predicted cost of an exchange: traffic, measured costs, and the choice of the fastest."""

from sparse_collectives.prediction.calibration import clock_of, measure_handling, measure_traffic, seconds_of, slowest
from sparse_collectives.prediction.cost import (
    BACKWARD_SHARE,
    HANDLING,
    Handling,
    Prediction,
    hidden_latency,
    network_seconds,
    predict,
    predict_all,
    ranks_of_interest,
    step_seconds,
    with_whole,
)
from sparse_collectives.prediction.plain_table import amount, milliseconds, table

__all__ = [
    "BACKWARD_SHARE",
    "HANDLING",
    "Handling",
    "Prediction",
    "amount",
    "clock_of",
    "hidden_latency",
    "measure_handling",
    "measure_traffic",
    "milliseconds",
    "network_seconds",
    "predict",
    "predict_all",
    "ranks_of_interest",
    "seconds_of",
    "slowest",
    "step_seconds",
    "table",
    "with_whole",
]
