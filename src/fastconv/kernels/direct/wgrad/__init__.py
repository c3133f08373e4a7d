"""Weight gradient, and with it the bias gradient, with multiply-adds on plain CUDA cores.

Blocks compute tiles of output channels x input channels x taps over a split of the pixels (split-K)
and add them to a workspace, which a second kernel reduces in a fixed order. Any geometry and real
dtype has a plan, so it is taken for whatever the other families decline.
"""
