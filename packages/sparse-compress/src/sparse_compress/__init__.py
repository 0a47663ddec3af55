"""Exact top-k, other compressors, sparse vectors and error feedback for gradient compression."""

from sparse_compress.codecs import DenseCodec, WireCodec, index_entropy
from sparse_compress.compressors import (
    ByParts,
    Compressor,
    DGCTopK,
    FusedCompressor,
    GaussianK,
    RandomK,
    StatefulCompressor,
    Threshold,
    ThresholdReuse,
    TopK,
    WarmUp,
    clip_locally,
    concatenate,
)
from sparse_compress.entries import pad
from sparse_compress.error_feedback import ErrorFeedback
from sparse_compress.merge import add, add_all, merge, share
from sparse_compress.topk import topk
from sparse_compress.vector import SparseVector
from sparse_compress.vector_format import HEADER_BYTES, MAX_NUMEL, wire_nbytes
from sparse_compress.version import __version__

__all__ = [
    "HEADER_BYTES",
    "MAX_NUMEL",
    "ByParts",
    "Compressor",
    "DGCTopK",
    "DenseCodec",
    "ErrorFeedback",
    "FusedCompressor",
    "GaussianK",
    "RandomK",
    "SparseVector",
    "StatefulCompressor",
    "Threshold",
    "ThresholdReuse",
    "TopK",
    "WarmUp",
    "WireCodec",
    "__version__",
    "add",
    "add_all",
    "clip_locally",
    "concatenate",
    "index_entropy",
    "merge",
    "pad",
    "share",
    "topk",
    "wire_nbytes",
]
