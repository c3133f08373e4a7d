"""Forward passes and input gradients of few output channels: all taps in one product."""
