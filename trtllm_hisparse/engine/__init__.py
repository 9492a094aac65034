"""One step of the model; executors share the seam in `base`."""
