// The host twin of include/mma.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "include/ptx.cuh"
#include "mma.h"

namespace fastconv {

inline void load_matrices(unsigned (&fragments)[4], const void* row,
                          emulator::Site site = emulator::here("load_matrices")) {
  emulator::load_matrices(site, fragments, row, false);
}

inline void load_transposed(unsigned (&fragments)[4], const void* row,
                            emulator::Site site = emulator::here("load_transposed")) {
  emulator::load_matrices(site, fragments, row, true);
}

inline void mma(Tf32, float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kTf32, sums, left, right);
}
inline void mma(Float16, float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kFloat16, sums, left, right);
}
inline void mma(Bfloat16, float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kBfloat16, sums, left, right);
}

}  // namespace fastconv
