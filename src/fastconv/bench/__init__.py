"""Fair comparisons with PyTorch: checks, timings, tables."""
