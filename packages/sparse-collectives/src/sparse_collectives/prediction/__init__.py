"""Predicted cost of an exchange: traffic, measured costs, and the choice of the fastest."""
