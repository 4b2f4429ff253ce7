"""FastTune's parts: what is drawn, the trials, the search over Ray, and its results."""
