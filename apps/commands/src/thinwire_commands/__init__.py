"""Short names for the apps: `python -m cifar` is `python -m thinwire_cifar`, and so for `text` and `deepspeech`.

The names are folders without an `__init__.py`, so a package of the same name that is installed goes before them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire-commands")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
