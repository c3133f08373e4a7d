"""Kernel families: one folder each, with the device code and the Python that plans its launches."""
