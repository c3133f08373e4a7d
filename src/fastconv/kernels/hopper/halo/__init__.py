"""Forward passes and input gradients from halo tiles: one tile of the input serves all taps.

The general kernel of the family, for every layout, type, stride, dilation and number of groups: the
input of a tile of outputs, with its halo, is loaded into shared memory once, and each tap is a
wgmma at another start address. It is taken unless a more special kernel is estimated to be faster.
``plan`` plans a pass with the fastest of the ``tiles`` by estimate, or with one that was measured
to be faster (``fastconv.kernels.tuned``); ``shapes`` has the tiles' sizes and costs.
"""
