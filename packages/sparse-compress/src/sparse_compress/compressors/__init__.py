"""Compressors: callables from a tensor to the sparse vector that is sent of it."""

from sparse_compress.compressors.by_parts import ByParts, concatenate
from sparse_compress.compressors.compressor import Compressor, FusedCompressor, StatefulCompressor
from sparse_compress.compressors.dgc import DGCTopK, clip_locally
from sparse_compress.compressors.gaussian_k import GaussianK
from sparse_compress.compressors.random_k import RandomK
from sparse_compress.compressors.threshold import Threshold
from sparse_compress.compressors.threshold_reuse import ThresholdReuse
from sparse_compress.compressors.top_k import TopK
from sparse_compress.compressors.warm_up import WarmUp

__all__ = [
    "ByParts",
    "Compressor",
    "DGCTopK",
    "FusedCompressor",
    "GaussianK",
    "RandomK",
    "StatefulCompressor",
    "Threshold",
    "ThresholdReuse",
    "TopK",
    "WarmUp",
    "clip_locally",
    "concatenate",
]
