"""HTTP service with a model and a mutable gallery; needs the packages of the extra `serve`."""
