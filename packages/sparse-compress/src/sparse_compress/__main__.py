"""What does the work here.

python -m sparse_compress
"""

from importlib.metadata import version

from sparse_compress.native.library import in_use

if __name__ == "__main__":
    print(f"sparse-compress {version('sparse-compress')}: on a CPU {in_use()}")
