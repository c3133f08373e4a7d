// The host twin of device/mma.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "device/sm80.cuh"

namespace fastconv {

inline void mma(Tf32, float (&acc)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kTf32, acc, left, right);
}
inline void mma(Float16, float (&acc)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kFloat16, acc, left, right);
}
inline void mma(Bfloat16, float (&acc)[4], const unsigned (&left)[4], const unsigned (&right)[2],
                emulator::Site site = emulator::here("mma")) {
  emulator::mma(site, emulator::Scalar::kBfloat16, acc, left, right);
}

}  // namespace fastconv
