// What consumers do: products of a run's steps, whose sums are weights, or go to the workspace, or
// to the block's own shared memory.
#pragma once
#include "hopper/wgrad_implicit_gemm/exchange.cuh"

namespace fastconv {
namespace hopper {

constexpr int kSums = C::product_columns / 2;  // of a thread

// A consumer's place in a tile, and in the block.
struct Place {
  int row_group, column_group, warp, lane;

  __device__ __forceinline__ Place() {
    const int consumer = static_cast<int>(threadIdx.x) / 128;
    row_group = consumer / C::column_groups;
    column_group = consumer % C::column_groups;
    warp = static_cast<int>(threadIdx.x) / 32 % 4;
    lane = static_cast<int>(threadIdx.x) % 32;
  }
  // Of the tile, that a thread has sums of.
  __device__ __forceinline__ int row(int half) const {
    return row_group * 64 + warp * 16 + lane / 4 + half * 8;
  }
};

struct Sums {
  float weights[1][kSums];
  float bias[1][4];  // of four equal columns, by two
};

__device__ __forceinline__ Matrix rows_of(const Shared& shared, int stage, int group) {
  return swizzled_matrix(shared.rows(stage) + group * (kRowsAcross ? kBoxBytes : 64 * kSpan),
                         kBoxBytes, 1024);
}
__device__ __forceinline__ Matrix columns_of(const Shared& shared, int stage, int group) {
  constexpr int kGroupBytes = C::product_columns * kDepth * static_cast<int>(sizeof(Scalar));
  return swizzled_matrix(shared.columns(stage) + group * kGroupBytes, kBoxBytes, 1024);
}
// From a product to the next, along the sum.
template <bool kAcross>
constexpr int kNext = (kAcross ? kProductDepth * kSpan : 32) / 16;

template <int kColumns>
__device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], Matrix left, Matrix right,
                                         bool accumulate) {
  if constexpr (sizeof(Scalar) == 4) {
    wgmma<kColumns>(Operand{}, sums, left, right, accumulate);
  } else {
    wgmma<kColumns, kRowsAcross, kColumnsAcross>(Operand{}, sums, left, right, accumulate);
  }
}

// The sum of what `left` has, in each of eight columns.
template <class Kind>
__device__ __forceinline__ void multiply_ones(Kind kind, float (&sums)[4], Matrix left,
                                              const Shared& shared, bool accumulate) {
  if constexpr (C::bias) {
    wgmma<8, kRowsAcross, false>(kind, sums, left, matrix(shared.ones(), 128, 128), accumulate);
  }
}

template <int kCount>
__device__ __forceinline__ void multiply_step(Sums& sums, const Shared& shared, int stage,
                                              const Place& place, bool has_bias, bool accumulate) {
  const Matrix rows = rows_of(shared, stage, place.row_group);
  const Matrix columns = columns_of(shared, stage, place.column_group);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    multiply<C::product_columns>(sums.weights[0], rows + k * kNext<kRowsAcross>,
                                 columns + k * kNext<kColumnsAcross>, accumulate || k > 0);
  }
  if (has_bias) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      multiply_ones(Operand{}, sums.bias[0], rows + k * kNext<kRowsAcross>, shared,
                    accumulate || k > 0);
    }
  }
  wgmma_commit();
}

// The same of numbers in two parts, added to totals: tensor cores would cut off what low parts add.
// Large products come last.
__device__ __forceinline__ void multiply_parts(Sums& totals, const Shared& shared, int stage,
                                               const Place& place) {
  constexpr int kLow = kPartBytes / 16;
  const Matrix rows = rows_of(shared, stage, place.row_group);
  const Matrix columns = columns_of(shared, stage, place.column_group);
  float sums[kSums];
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    const Matrix left = rows + (part == 0 ? kLow : 0), right = columns + (part == 1 ? kLow : 0);
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      multiply<C::product_columns>(sums, left + k * kNext<false>, right + k * kNext<false>,
                                   part > 0 || k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_registers(sums);
#pragma unroll
  for (int j = 0; j < kSums; ++j) totals.weights[0][j] += sums[j];
}

// Of so many steps of a tile, from the first on: the same.
__device__ __forceinline__ void multiply_steps_in_parts(Sums& totals, const Shared& shared,
                                                        Ring& ring, int first, int end,
                                                        const Place& place) {
#pragma unroll
  for (float& total : totals.weights[0]) total = 0.0f;
  for (int step = first; step < end; ++step, ring.advance()) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    multiply_parts(totals, shared, ring.stage, place);
    if (place.lane == 0) barrier_arrive(shared.empty(ring.stage));
  }
}

// Of so many steps of a tile, from the first on.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Shared& shared, Ring& ring,
                                               int first, int end, const Place& place,
                                               bool has_bias) {
  int previous = -1;
  for (int step = first; step < end; ++step, ring.advance()) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    if (kOfAllImages || kLastProducts == kProducts || step % kImageSteps < kImageSteps - 1) {
      multiply_step<kProducts>(sums, shared, ring.stage, place, has_bias, step > first);
    } else {
      multiply_step<kLastProducts>(sums, shared, ring.stage, place, has_bias, step > first);
    }
    wgmma_wait<1>();
    if (previous >= 0 && place.lane == 0) barrier_arrive(shared.empty(previous));
    previous = ring.stage;
  }
  wgmma_wait<0>();
  if (place.lane == 0) barrier_arrive(shared.empty(previous));
}

// Weights straight from registers, of a block that has all of a tile's steps.
__device__ __forceinline__ void store_weights(float (&sums)[kSums], const Tile& tile, Scalar* grad,
                                              const Place& place) {
  constexpr bool kOneTap = kTapColumns % 8 == 0;  // of eight columns
  hold_registers(sums);
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    const int first = tile.column + place.column_group * C::product_columns + j / 4 * 8;
    const int in_octet = place.lane % 4 * 2 + j % 2;
    Column column(kOneTap ? first : first + in_octet);
    if constexpr (kOneTap) column.channel += in_octet;
    store_weight(grad, tile, tile.row + place.row(j / 2 % 2), column, sums[j]);
  }
}

// A row's sum lies with one lane of four, those of rows 8 apart in two of its registers.
__device__ __forceinline__ void store_bias(float (&sums)[4], const Tile& tile, Scalar* bias_grad,
                                           const Place& place) {
  hold_registers(sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.row + place.row(half);
    if (place.lane % 4 == 0 && row < kOut) {
      bias_grad[tile.group * kOut + row] = narrow<Scalar>(sums[2 * half]);
    }
  }
}
__device__ __forceinline__ void flush_bias(float (&sums)[4], float* totals, const Place& place,
                                           bool set) {
  hold_registers(sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const total = totals + place.row(half);
    if (place.lane % 4 == 0) *total = sums[2 * half] + (set ? 0.0f : *total);
  }
}

// For the cluster's blocks to add up. What the consumers have multiplied lies there until all of
// them are done.
__device__ __forceinline__ void put_sums(Sums& sums, const Shared& shared, const Place& place,
                                         bool has_bias) {
  constexpr int kBarrier = 1;
  wait_at(kBarrier, 128 * kConsumers);
  hold_registers(sums.weights[0]);
  const int column = place.column_group * C::product_columns + place.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const target = sums_of_row(shared, place.row(half)) + column;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const float* const two = &sums.weights[0][4 * i + 2 * half];
      *reinterpret_cast<float2*>(target + 8 * i) = make_float2(two[0], two[1]);
    }
  }
  if (has_bias) flush_bias(sums.bias[0], sums_of_bias(shared), place, true);
}

struct Results {
  float4* workspace;
  Scalar* grad;
  Scalar* bias_grad;
};

__device__ __forceinline__ void consume(const Shared& shared, const Results& results,
                                        const Share& share) {
  const Place place;
  Ring ring(0);
  for_runs(share, static_cast<int>(blockIdx.x), [&](const Run& run, int number) {
    const Tile tile(run.tile);
    const bool has_bias = tile.has_bias() && place.column_group == 0;
    const int consumer = static_cast<int>(threadIdx.x) / 128;
    float4* const slots = results.workspace + share.slots(static_cast<int>(blockIdx.x), number);
    for (int step = run.first; step < run.end; step += C::flush_steps) {
      const bool set = step == run.first;
      Sums sums;
      const int end = min(step + C::flush_steps, run.end);
      if constexpr (C::parts == 2) {
        multiply_steps_in_parts(sums, shared, ring, step, end, place);
      } else {
        multiply_steps(sums, shared, ring, step, end, place, has_bias);
      }
      if constexpr (C::whole) {
        store_weights(sums.weights[0], tile, results.grad, place);
        if (has_bias) store_bias(sums.bias[0], tile, results.bias_grad, place);
      } else if constexpr (C::cluster > 1) {
        put_sums(sums, shared, place, has_bias);
      } else {
        flush(sums.weights, slots + consumer * kSlots * 128 + threadIdx.x % 128, set);
        auto* const totals = reinterpret_cast<float*>(slots + kSumSlots);
        if (has_bias) flush_bias(sums.bias[0], totals, place, set);
      }
    }
  });
}

}  // namespace hopper
}  // namespace fastconv
