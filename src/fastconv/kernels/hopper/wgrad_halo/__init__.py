"""Weight gradients with halo tiles: each input row is loaded once for all taps of a kernel row.

K is pixels, and a K vector of 16 bytes interleaves the same pixel of several images, or of several
strips of rows of one image, so that a tap is merely another start address in shared memory. This is
the general weight-gradient kernel: it takes any memory format, stride and dilation, where its
estimated time is the least of the three weight-gradient kernels'. ``layer`` is what is computed,
``tiles`` how blocks divide it with their estimates, ``plan`` chooses a tile and makes the launches.
"""
