"""Weight gradients of few input channels: all of them, and a row's taps, in one product."""
