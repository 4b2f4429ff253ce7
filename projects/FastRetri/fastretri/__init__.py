"""Image retrieval of classes that are not in the training set: datasets and Recall@k."""
