"""The one training loop of the thinwire apps.

An app brings models and data (see `thinwire_trainer.app.Task`) and names them (`thinwire_trainer.app.App`); everything
else is here: the command line, starting workers, sharding, the learning rate, metrics, checkpoints.
Importing this package imports nothing heavy, so that a wrong flag is refused before torch is loaded.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire-trainer")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
