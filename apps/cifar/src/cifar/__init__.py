"""Image classification with every synchronisation algorithm: `python -m cifar --help`."""
