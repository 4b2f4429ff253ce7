"""Graph sampling and query-adaptive matching for test sets of other domains."""
