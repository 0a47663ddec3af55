"""Installed version; at a build the package's own git tag gives it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"
