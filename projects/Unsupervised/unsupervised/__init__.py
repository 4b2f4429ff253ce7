"""Training without labels: pseudo labels from clusters, and a memory of their centroids."""
