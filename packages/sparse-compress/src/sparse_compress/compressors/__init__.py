"""Compressors: callables from a tensor to the sparse vector that is sent of it."""
