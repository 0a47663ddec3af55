"""Which way to train pays over this network: predictions, what is on record of accuracy, and a recommendation."""
