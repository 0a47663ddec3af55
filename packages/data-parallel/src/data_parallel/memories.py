"""Names of the memories that the exchange keeps between steps."""

MEMORIES = ("residuals", "velocities")
