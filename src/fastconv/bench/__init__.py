"""Fair comparisons with PyTorch: workloads, checks, timings, tables."""
