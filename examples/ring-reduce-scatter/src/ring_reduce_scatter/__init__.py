"""A sparse allreduce of one's own: `algorithm=RING` wherever sparse-collectives takes a name."""

from sparse_collectives import Algorithm

from ring_reduce_scatter.reference import reference
from ring_reduce_scatter.schedule import merged, ring, sent

RING = Algorithm(ring, sent, merged=merged, reference=reference, name="ring-reduce-scatter")

__all__ = ["RING"]
