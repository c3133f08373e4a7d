"""Weight gradient, and with it the bias gradient, with mma.sync over halo tiles of the input.

A block accumulates a tile of the weights while it walks through the images in steps; a second
kernel reduces all blocks' results (split-K). It takes float32 (TF32 or 3xTF32), float16 and
bfloat16 from sm_80 on, where it is estimated to be faster than the portable kernels.
"""
