"""Parts for wrappers of an optimizer on several ranks: an equal start, checks, averages, and places in a checkpoint."""

from replicas.unlike import hash_bits, refuse_unlike
from replicas.version import __version__

__all__ = ["__version__", "hash_bits", "refuse_unlike"]
