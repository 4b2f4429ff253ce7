"""Version of fastamp."""

__version__ = "0.1.0"
