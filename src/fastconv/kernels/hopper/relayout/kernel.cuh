// Transposes matrices, one for each image, or for each plane of a slab of volumes, of one tensor or
// of a pair. A pair has further constants: FASTCONV_BESIDE is defined where Config has them.
#pragma once
#include "hopper/relayout/tile.cuh"

#ifdef FASTCONV_BESIDE
#include "hopper/relayout/pair.cuh"
#else
namespace fastconv {
namespace hopper {

__device__ __forceinline__ void transpose(const Element* source, Element* target, int rows,
                                          int columns) {
  const int across = ceil_div(columns, kTile), tiles = across * ceil_div(rows, kTile);
  const int block = static_cast<int>(blockIdx.x);
  const int tile = block % tiles, row = tile / across * kTile, column = tile % across * kTile;
  const long long matrix = static_cast<long long>(block / tiles) * rows * columns;
  transpose<C::vector_loads, C::vector_stores>(
      Matrix<Element, false>{source + matrix, rows, columns, columns}, target + matrix, 0, columns,
      row, column);
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::threads)
    transpose(const Config::Scalar* source, Config::Scalar* target, int rows, int columns) {
  using Element = fastconv::hopper::Element;
  fastconv::hopper::transpose(reinterpret_cast<const Element*>(source),
                              reinterpret_cast<Element*>(target), rows, columns);
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    transpose_slab(const Config::Scalar* source, Config::Scalar* target, int channels, int planes,
                   int plane, int begin, int count, int first_volume) {
  using namespace fastconv::hopper;
  const SlabCopy slab{reinterpret_cast<const Element*>(source),
                      reinterpret_cast<Element*>(target),
                      channels,
                      planes,
                      plane,
                      begin,
                      count,
                      first_volume};
  slab.copy<Config::vector_loads, Config::vector_stores>(static_cast<int>(blockIdx.x));
}
#endif
