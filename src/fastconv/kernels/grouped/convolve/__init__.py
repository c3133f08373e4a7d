"""Forward convolution and input gradient: a halo tile in shared memory, windows in registers."""
