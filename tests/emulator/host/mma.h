// Warp-wide operations on matrices (ldmatrix, stmatrix, mma.sync), for the host twins of
// device/mma.cuh, sm90.cuh and wgmma.cuh.
#pragma once
#include "runtime.h"
#include "thread_mma.h"

namespace emulator {

// ldmatrix: a lane gets its part of four matrices. Each lane passes the address of one row.
void load_matrices(Site site, unsigned (&fragments)[4], const void* row, bool transposed);

// stmatrix: stores four matrices. One row, or column if `transposed`, goes to each lane's address.
void store_matrices(Site site, void* row, const unsigned (&fragments)[4], bool transposed);

// Collects a lane's two rows of a matrix from its quad of lanes, which hold four fragments each.
void gather_rows(Site site, unsigned (&rows)[2][kRowBytes / 4], const unsigned (&fragments)[4]);

// mma.sync: a lane's part of the MMA of 16 rows by 8 columns, each 32 bytes along K.
void mma(Site site, Scalar scalar, float* accumulators, const unsigned* left,
         const unsigned* right);

}  // namespace emulator
