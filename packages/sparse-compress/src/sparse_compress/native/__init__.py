"""Compiled kernels for float32 on a CPU (``kernels.c``), where the package was installed with them.

Without them NumPy computes the same bits in more passes: it is the reference of the kernels.
"""
