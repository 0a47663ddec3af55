"""Compiled kernels for float32 on a CPU (``kernels.c``), where the package was installed with them.

Without, NumPy does the same in more passes, to the same bits: it is the reference that the kernels are held to.
"""
