// Warp-wide products: what the host twin of include/mma.cuh asks of the runtime.
#pragma once
#include "product.h"
#include "runtime.h"

namespace emulator {

// A lane's part of four matrices whose rows the lanes have the addresses of.
void load_matrices(Site site, unsigned (&fragments)[4], const void* row, bool transposed);

// A lane's part of a product of 16 by 8 rows of 32 bytes.
void mma(Site site, Scalar scalar, float* sums, const unsigned* left, const unsigned* right);

}  // namespace emulator
