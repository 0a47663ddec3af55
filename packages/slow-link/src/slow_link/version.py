"""The version that was installed; a git tag of the package's own gives it at a build."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("slow-link")
except PackageNotFoundError:  # sources that are on the path without being installed
    __version__ = "0+unknown"
