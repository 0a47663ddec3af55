"""Exchange of gradients for their mean, and the optimizer and DDP hook that call it."""
