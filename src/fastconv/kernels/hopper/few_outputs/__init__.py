"""Forward passes and input gradients with few output channels: all taps in the N of one MMA.

M is 64 pixels of an image row, and N has a column for every tap of every output channel, so that
each input element is loaded and multiplied once. It takes layers of stride 1 without groups, whose
taps and output channels fit N (at most 256) and whose weights fit shared memory, where it is
estimated to be faster than the other kernels. ``plan`` plans the single launch.
"""
