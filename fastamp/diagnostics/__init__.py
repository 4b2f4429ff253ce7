"""Diagnostics: isolated passes, precision checks, the place of the first bad value, crash files, the machine."""
