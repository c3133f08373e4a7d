// Where sums end up: a place of the product is a weight, a row's own sum that of a bias.
#pragma once
#include "hopper/gemm_weights/tile.cuh"

namespace fastconv {
namespace hopper {

// What a column of the product is.
struct Column {
  int tap, input;

  __device__ __forceinline__ explicit Column(int number)
      : tap(number / kTapColumns), input(number - tap * kTapColumns) {}

  __device__ __forceinline__ bool exists() const { return tap < kTaps && input < C::in_channels; }
};

__device__ __forceinline__ long long offset_of(int output, const Column& column) {
  return tensor::weight_offset(output, column.input, column.tap / C::kernel_width,
                               column.tap % C::kernel_width);
}

__device__ __forceinline__ void store_weight(Scalar* grad, int output, int number, float value) {
  const Column column(number);
  if (output >= C::out_channels || !column.exists()) return;
  grad[offset_of(output, column)] = narrow<Scalar>(value);
}

// Whether four columns, from a multiple of four on, are neighbours in memory, all or none of which
// exist.
constexpr bool kVectorWeights =
    C::weight_stride_in == 1 && C::in_channels % 4 == 0 && kTapColumns % 4 == 0 &&
    C::weight_stride_out % 4 == 0 &&
    (kTaps == 1 || (C::weight_stride_height % 4 == 0 && C::weight_stride_width % 4 == 0));

__device__ __forceinline__ void store_weights(Scalar* grad, int output, int first,
                                              const float4& values) {
  if constexpr (kVectorWeights) {
    const Column column(first);
    if (output >= C::out_channels || !column.exists()) return;
    *reinterpret_cast<Vector<Scalar, 4>*>(grad + offset_of(output, column)) = {
        narrow<Scalar>(values.x), narrow<Scalar>(values.y), narrow<Scalar>(values.z),
        narrow<Scalar>(values.w)};
  } else {
    store_weight(grad, output, first, values.x);
    store_weight(grad, output, first + 1, values.y);
    store_weight(grad, output, first + 2, values.z);
    store_weight(grad, output, first + 3, values.w);
  }
}

__device__ __forceinline__ void store_biases(Scalar* bias_grad, int first, const float4& values) {
  const float four[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i < C::out_channels) bias_grad[first + i] = narrow<Scalar>(four[i]);
  }
}

}  // namespace hopper
}  // namespace fastconv
