"""Utilities for all other packages: registry, errors, communication, metrics, logging, files."""
