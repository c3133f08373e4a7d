// How warpgroups or blocks of kernels without a halo tile divide an image: each walks down a strip
// of columns, row by row.
#pragma once
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

// A walk: some output rows of a strip of kStripColumns. Its rows are kRowStep apart and start at
// one of kRowStep residues. Neighbouring strips have neighbouring indices and run at the same time,
// so the input that both read is still in a cache.
template <int kStripColumns, int kRowStep>
struct Walk {
  static constexpr int kStrips = ceil_div(C::out_width, kStripColumns);
  static constexpr int kBands = ceil_div(ceil_div(C::out_height, kRowStep), C::band_rows);
  static constexpr int kPerImage = kRowStep * kBands * kStrips;

  int image;
  int column;  // first of the output
  int row;     // first of the output
  int rows;

  __device__ explicit Walk(int index) {
    column = index % kStrips * kStripColumns;
    index /= kStrips;
    const int band = index % kBands;
    index /= kBands;
    const int residue = index % kRowStep;
    image = index / kRowStep;
    row = residue + band * C::band_rows * kRowStep;
    rows = min(C::band_rows, ceil_div(C::out_height - row, kRowStep));
  }
};

}  // namespace hopper
}  // namespace fastconv
