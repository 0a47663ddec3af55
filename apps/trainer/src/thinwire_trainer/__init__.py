"""The one training loop of the thinwire apps.

An app brings models and data (see `thinwire_trainer.app.Task`) and names them (`thinwire_trainer.app.App`); everything
else is here: the command line, starting workers, sharding, the learning rate, metrics, checkpoints.
Importing this package imports nothing heavy, so that a wrong flag is refused before torch is loaded.
"""

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str) -> str:
    """Version of an installed distribution; "0+unknown" for sources that are on the path without being installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "0+unknown"


__version__ = version_of("thinwire-trainer")

__all__ = ["__version__"]
