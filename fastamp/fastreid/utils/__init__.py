"""FastReID's utilities."""
