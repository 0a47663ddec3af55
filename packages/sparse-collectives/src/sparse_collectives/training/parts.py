"""What the exchange keeps of gradients between steps."""

PARTS = ("residuals", "velocities")
