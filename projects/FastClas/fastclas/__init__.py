"""Image classification: datasets whose training and test images are of the same classes, and their accuracy."""
