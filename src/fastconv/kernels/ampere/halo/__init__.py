"""Forward convolution and input gradient with mma.sync: an implicit GEMM over halo tiles.

Producer warps fill rings of halo tiles and weights in shared memory; consumer warps multiply and
store. It takes float32 (TF32, 3xTF32 or scaled fp16), float16 and bfloat16 from sm_80 on, where
enough of the MMAs' products count for tensor cores to be faster than the portable kernels.
"""
