"""Compressors: callables from a tensor to the sparse vector that is sent of it."""

from sparse_compress.compressors.compressor import Compressor, FusedCompressor
from sparse_compress.compressors.top_k import TopK

__all__ = ["Compressor", "FusedCompressor", "TopK"]
