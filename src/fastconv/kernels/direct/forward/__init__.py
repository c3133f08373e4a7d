"""Forward convolution and input gradient with fused multiply-adds on plain CUDA cores.

A block computes a tile of channels x pixels from a halo tile of the input and packed weights, both
double-buffered in shared memory; a strided input gradient is one such correlation for each residue
modulo the stride. Any geometry and real dtype has a plan, so it is taken for whatever the other
families decline.
"""
