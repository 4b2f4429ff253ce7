"""FastTune's parts: search spaces."""
