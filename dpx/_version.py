"""The version of the distribution that is installed."""

from importlib import metadata

try:
    __version__ = metadata.version("dpx-attention")
except metadata.PackageNotFoundError:  # a clone that is on the path, but not installed
    __version__ = "0+unknown"
