"""Weight gradients, summed over the same pixel of several images or strips at once."""
