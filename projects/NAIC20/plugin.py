"""Register the datasets of the NAIC challenge and declare their config keys."""

from naic import datasets

KEYS = datasets.KEYS
