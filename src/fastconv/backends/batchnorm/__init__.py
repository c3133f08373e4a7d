"""Batch normalization with activation and residual: on a GPU, and by PyTorch's operations."""
