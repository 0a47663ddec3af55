"""What the exchange keeps of gradients between steps."""

MEMORIES = ("residuals", "velocities")
