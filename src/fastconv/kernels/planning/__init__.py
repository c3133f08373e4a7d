"""What the families of kernels on tensor cores share."""
