"""From gradients to their mean: the exchange, and the optimizer and DDP hook that call it."""
