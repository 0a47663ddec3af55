"""Prints what compresses on this machine: the compiled kernels, or NumPy.

python -m sparse_compress
"""

from importlib.metadata import PackageNotFoundError, version

from sparse_compress.native.library import in_use


def _version() -> str:
    try:
        return version("sparse-compress")
    except PackageNotFoundError:  # its sources are on PYTHONPATH
        return "(not installed)"


if __name__ == "__main__":
    print(f"sparse-compress {_version()}: on a CPU {in_use()}")
