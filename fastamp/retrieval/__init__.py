"""Features with their columns, indices, stores of features, and search."""
