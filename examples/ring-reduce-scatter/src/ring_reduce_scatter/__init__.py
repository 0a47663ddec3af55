"""A sparse allreduce of one's own: `algorithm=RING` wherever sparse-collectives takes a name."""

from ring_reduce_scatter.schedule import Ring

RING = Ring()

__all__ = ["RING"]
