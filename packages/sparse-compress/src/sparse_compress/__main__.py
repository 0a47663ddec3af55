"""Prints what compresses on this machine: the compiled kernels, or NumPy.

python -m sparse_compress
"""

from sparse_compress import __version__
from sparse_compress.native.library import in_use

if __name__ == "__main__":
    print(f"sparse-compress {__version__}: on a CPU {in_use()}")
