"""Engine of the protocol on real and simulated ranks: signals, collectives, and what has accumulated."""
