// How warpgroups or blocks that need no tiles share an image: in walks down strips of it.
#pragma once
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

// Some output rows of a strip of kStripColumns, kRowStep apart: they start at one of as many
// residues. Neighbouring strips are neighbouring items, at work at the same time: what both read is
// still in a cache.
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
