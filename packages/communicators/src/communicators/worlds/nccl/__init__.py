"""Messages of a GPU that never pass through host memory: opt-in, since they have never met a GPU."""
