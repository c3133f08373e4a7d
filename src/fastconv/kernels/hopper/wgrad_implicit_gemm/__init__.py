"""Weight gradients as products of matrices: output channels by pixels, pixels by input channels.

``layer`` is what is multiplied, ``tiles`` how much of it at once, who does which part of the sum,
and what that takes.
"""
