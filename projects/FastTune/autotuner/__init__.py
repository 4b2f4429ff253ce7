"""FastTune: search spaces, trials, the search on Ray Tune, and its results."""
