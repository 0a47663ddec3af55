"""Short names for the apps: `python -m cifar` is `python -m thinwire_cifar`, and so for `text` and `deepspeech`.

The names are folders without an `__init__.py`, so a package of the same name that is installed goes before them.
"""

from thinwire_trainer import version_of

__version__ = version_of("thinwire-commands")

__all__ = ["__version__"]
