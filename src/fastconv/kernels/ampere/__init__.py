"""Kernels for the tensor cores that all GPUs since Ampere have."""
