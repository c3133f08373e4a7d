"""Weight gradient, and with it the bias gradient: pixels along K, windows in registers."""
