"""Exact top-k, other compressors, sparse vectors and error feedback for gradient compression."""

from sparse_compress import arguments, spread_keys, vectors
from sparse_compress.arguments import MAX_NUMEL
from sparse_compress.codecs.dense_codec import DenseCodec
from sparse_compress.codecs.wire_codec import WireCodec, index_entropy
from sparse_compress.compressors.by_parts import ByParts
from sparse_compress.compressors.compressor import Compressor, StatefulCompressor
from sparse_compress.compressors.density import TopK, WarmUp
from sparse_compress.compressors.dgc import DGCTopK, clip_locally
from sparse_compress.compressors.gaussian_k import GaussianK
from sparse_compress.compressors.random_k import RandomK
from sparse_compress.compressors.threshold import Threshold, ThresholdReuse
from sparse_compress.error_feedback import ErrorFeedback
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.merge import add, add_all, cut_to_budgets, merge, merge_to_budgets, share, union_of
from sparse_compress.selection import Largest, LargestOfBlocks, Reaching, Selection, all_finite, topk
from sparse_compress.vector import FREE_BYTES, HEADER_BYTES, SparseVector, put, wire_nbytes
from sparse_compress.vectors import concatenate, pad
from sparse_compress.version import __version__

__all__ = [
    "FREE_BYTES",
    "HEADER_BYTES",
    "MAX_NUMEL",
    "ByParts",
    "Compressor",
    "DGCTopK",
    "DenseCodec",
    "ErrorFeedback",
    "GaussianK",
    "Largest",
    "LargestOfBlocks",
    "RandomK",
    "Reaching",
    "Selection",
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
    "all_finite",
    "arguments",
    "clip_locally",
    "concatenate",
    "cut_to_budgets",
    "index_entropy",
    "magnitude_keys",
    "merge",
    "merge_to_budgets",
    "pad",
    "put",
    "share",
    "spread_keys",
    "topk",
    "union_of",
    "vectors",
    "wire_nbytes",
]
