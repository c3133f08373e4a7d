// The host twin of include/wgmma.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "include/sm90.cuh"

namespace fastconv {

template <int kColumns>
inline void wgmma(Tf32, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256, "wgmma's widths");
  emulator::wgmma(site, emulator::Scalar::kTf32, d, kColumns, left, right, accumulate);
}
template <int kColumns>
inline void wgmma(Float16, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256, "wgmma's widths");
  emulator::wgmma(site, emulator::Scalar::kFloat16, d, kColumns, left, right, accumulate);
}
template <int kColumns>
inline void wgmma(Bfloat16, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256, "wgmma's widths");
  emulator::wgmma(site, emulator::Scalar::kBfloat16, d, kColumns, left, right, accumulate);
}

}  // namespace fastconv
