// The host twin of device/wgmma.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "device/sm90.cuh"

namespace fastconv {

template <int kColumns>
inline void wgmma(Tf32, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kTf32, d, kColumns, {left, false}, {right, false},
                  accumulate);
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
inline void wgmma(Float16, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kFloat16, d, kColumns, {left, kLeftMnMajor},
                  {right, kRightMnMajor}, accumulate);
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
inline void wgmma(Bfloat16, float (&d)[kColumns / 2], Matrix left, Matrix right, bool accumulate,
                  emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kBfloat16, d, kColumns, {left, kLeftMnMajor},
                  {right, kRightMnMajor}, accumulate);
}

// A thread's rows of a matrix in registers, which its quad of lanes holds together.
inline emulator::Rows rows_in_registers(const unsigned (&left)[4], emulator::Site site) {
  emulator::Rows rows = {left, {left[0], left[1], left[2], left[3]}, {}};
  emulator::gather_rows(site, rows.words, left);
  return rows;
}

template <int kColumns>
inline void wgmma(Tf32, float (&d)[kColumns / 2], const unsigned (&left)[4], Matrix right,
                  bool accumulate, emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kTf32, d, kColumns, rows_in_registers(left, site),
                  {right, false}, accumulate);
}
template <int kColumns>
inline void wgmma(Float16, float (&d)[kColumns / 2], const unsigned (&left)[4], Matrix right,
                  bool accumulate, emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kFloat16, d, kColumns, rows_in_registers(left, site),
                  {right, false}, accumulate);
}
template <int kColumns>
inline void wgmma(Bfloat16, float (&d)[kColumns / 2], const unsigned (&left)[4], Matrix right,
                  bool accumulate, emulator::Site site = emulator::here("wgmma")) {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256,
                "wgmma has 8 to 256 columns");
  emulator::wgmma(site, emulator::Scalar::kBfloat16, d, kColumns, rows_in_registers(left, site),
                  {right, false}, accumulate);
}

}  // namespace fastconv
