"""Exact top-k, sparse vectors and error feedback for gradient compression."""

from sparse_compress.compressors import Compressor, TopK
from sparse_compress.error_feedback import ErrorFeedback
from sparse_compress.merge import add, merge, share
from sparse_compress.pad import pad
from sparse_compress.topk import topk
from sparse_compress.vector import SparseVector
from sparse_compress.wire import HEADER_BYTES, MAX_NUMEL, SLOT_BYTES, wire_nbytes

__all__ = [
    "HEADER_BYTES",
    "MAX_NUMEL",
    "SLOT_BYTES",
    "Compressor",
    "ErrorFeedback",
    "SparseVector",
    "TopK",
    "add",
    "merge",
    "pad",
    "share",
    "topk",
    "wire_nbytes",
]
