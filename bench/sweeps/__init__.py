"""What decides how well a sparse training learns, one thing at a time: `python -m bench sweeps`."""
