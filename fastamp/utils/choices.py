"""Choices and defaults of commands and of the functions that they call; imports neither PyTorch nor faiss."""

EXTRACTED_SPLITS = ("query", "gallery", "train")
"""Splits of a dataset that can be extracted, in the order of the features."""
EXPORT_PRECISIONS = ("float32", "fp16", "int8")
# Fraction of the lists that an IVF search probes, and number of candidates of an HNSW search; the guide
# docs/guides/inference.md has their recall.
PROBED, EF_SEARCH = 0.2, 128
PROBABILITY_METHODS = ("isotonic", "logistic")
