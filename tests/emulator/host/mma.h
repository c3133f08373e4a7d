// What a warp does with matrices, for the host twins of device/mma.cuh, sm90.cuh and wgmma.cuh.
#pragma once
#include "product.h"
#include "runtime.h"

namespace emulator {

// A lane's part of four matrices whose rows the lanes have the addresses of.
void load_matrices(Site site, unsigned (&fragments)[4], const void* row, bool transposed);

// Stores four such matrices; a row, or a column of those that are transposed, goes to each lane's
// address.
void store_matrices(Site site, void* row, const unsigned (&fragments)[4], bool transposed);

// A lane's two rows of a matrix of which its quad of lanes holds four fragments each.
void gather_rows(Site site, unsigned (&rows)[2][kRowBytes / 4], const unsigned (&fragments)[4]);

// A lane's part of a product of 16 by 8 rows of 32 bytes.
void mma(Site site, Scalar scalar, float* sums, const unsigned* left, const unsigned* right);

}  // namespace emulator
