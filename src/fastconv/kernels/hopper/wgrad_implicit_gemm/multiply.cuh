// Consumer warpgroups: multiply the steps of a run, and store the accumulators as weights, or in
// the workspace, or in the block's own shared memory.
#pragma once
#include "hopper/wgrad_implicit_gemm/exchange.cuh"

namespace fastconv {
namespace hopper {

constexpr int kAccs = C::mma_columns / 2;  // accumulators of a thread

// A thread's place in the tile and in the block.
struct Place {
  int row_group, column_group, warp, lane;

  __device__ __forceinline__ Place() {
    const int consumer = static_cast<int>(threadIdx.x) / 128;
    row_group = consumer / C::column_groups;
    column_group = consumer % C::column_groups;
    warp = static_cast<int>(threadIdx.x) / 32 % 4;
    lane = static_cast<int>(threadIdx.x) % 32;
  }
  // The tile's row of a thread's accumulators.
  __device__ __forceinline__ int row(int half) const {
    return row_group * 64 + warp * 16 + lane / 4 + half * 8;
  }
};

struct Accumulators {
  float weights[Halo::units][kAccs];
  float bias[1][4];  // four equal columns of ones, in rows 8 apart by pairs
};

__device__ __forceinline__ Matrix rows_of(const Shared& shared, int stage, int group) {
  return swizzled_matrix(shared.rows(stage) + group * (kRowsMnMajor ? kBoxBytes : 64 * kSpan),
                         kBoxBytes, 1024);
}
__device__ __forceinline__ Matrix columns_of(const Shared& shared, int stage, int group) {
  constexpr int kGroupBytes = C::mma_columns * kDepth * static_cast<int>(sizeof(Scalar));
  return swizzled_matrix(shared.columns(stage) + group * kGroupBytes, kBoxBytes, 1024);
}
// From an MMA to the next along K, in units of a descriptor's 16 bytes.
template <bool kMnMajor>
constexpr int kNext = (kMnMajor ? kMmaDepth * kSpan : 32) / 16;

template <int kColumns>
__device__ __forceinline__ void multiply(float (&acc)[kColumns / 2], Matrix left, Matrix right,
                                         bool accumulate) {
  if constexpr (sizeof(Scalar) == 4) {
    wgmma<kColumns>(Operand{}, acc, left, right, accumulate);
  } else {
    wgmma<kColumns, kRowsMnMajor, kColumnsMnMajor>(Operand{}, acc, left, right, accumulate);
  }
}

// Multiplies `left` by ones: each of eight columns is the sum of its rows along K, the gradient of
// the bias.
template <class Kind>
__device__ __forceinline__ void multiply_ones(Kind kind, float (&acc)[4], Matrix left,
                                              const Shared& shared, bool accumulate) {
  if constexpr (C::bias) {
    wgmma<8, kRowsMnMajor, false>(kind, acc, left, matrix(shared.ones(), 128, 128), accumulate);
  }
}

// Where a consumer's units begin in the boxes, in a descriptor's 16 bytes. Units that do not exist
// multiply what another one does.
template <class Halo>
struct UnitStarts {
  int at[Halo::units];

  __device__ __forceinline__ explicit UnitStarts(const Place& place) {
#pragma unroll
    for (int i = 0; i < Halo::units; ++i) {
      const int unit = min(place.column_group * Halo::units + i, Halo::tile_units - 1);
      at[i] = typename Halo::Unit(unit).offset() / 16;
    }
  }
};

// Multiplies a step of boxes with a halo: every unit at every place along K.
template <bool kHasBias, class Halo>
__device__ __forceinline__ void multiply_boxes(Accumulators& acc, const Shared& shared, int stage,
                                               const Place& place, const UnitStarts<Halo>& units,
                                               bool accumulate) {
  const Matrix rows = swizzled_matrix(shared.rows(stage) + place.row_group * kBoxBytes, kBoxBytes,
                                      Halo::grad_stride);
  const Matrix columns =
      swizzled_matrix<Halo::span>(shared.columns(stage), Halo::leading, Halo::stride);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kMmas; ++k) {
#pragma unroll
    for (int i = 0; i < Halo::units; ++i) {
      multiply<C::mma_columns>(acc.weights[i], rows + Halo::grad_offset(k) / 16,
                               columns + units.at[i] + Halo::offset(k) / 16, accumulate || k > 0);
    }
  }
  if constexpr (kHasBias) {
#pragma unroll
    for (int k = 0; k < kMmas; ++k) {
      multiply_ones(Operand{}, acc.bias[0], rows + Halo::grad_offset(k) / 16, shared,
                    accumulate || k > 0);
    }
  }
  wgmma_commit();
}

// Multiplies steps [first, end) of a tile whose boxes have a halo.
template <bool kHasBias, class Halo>
__device__ __forceinline__ void multiply_steps_of_boxes(Accumulators& acc, const Shared& shared,
                                                        Ring& ring, int first, int end,
                                                        const Place& place,
                                                        const UnitStarts<Halo>& units) {
  int previous = -1;
  for (int step = first; step < end; ++step, ring.advance()) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    multiply_boxes<kHasBias>(acc, shared, ring.stage, place, units, step > first);
    wgmma_wait<1>();
    if (previous >= 0 && place.lane == 0) barrier_arrive(shared.empty(previous));
    previous = ring.stage;
  }
  wgmma_wait<0>();
  if (place.lane == 0) barrier_arrive(shared.empty(previous));
}

// The same, with or without the bias. Each has a loop of its own: a branch around the MMAs by ones
// would make the compiler wait for every MMA before the next.
template <class Halo>
__device__ __forceinline__ void multiply_steps_of_boxes(Accumulators& acc, const Shared& shared,
                                                        Ring& ring, int first, int end,
                                                        const Place& place, bool has_bias) {
  const UnitStarts<Halo> units(place);
  if (C::bias && has_bias) {
    multiply_steps_of_boxes<true>(acc, shared, ring, first, end, place, units);
  } else {
    multiply_steps_of_boxes<false>(acc, shared, ring, first, end, place, units);
  }
}

template <int kCount>
__device__ __forceinline__ void multiply_step(Accumulators& acc, const Shared& shared, int stage,
                                              const Place& place, bool has_bias, bool accumulate) {
  const Matrix rows = rows_of(shared, stage, place.row_group);
  const Matrix columns = columns_of(shared, stage, place.column_group);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    multiply<C::mma_columns>(acc.weights[0], rows + k * kNext<kRowsMnMajor>,
                             columns + k * kNext<kColumnsMnMajor>, accumulate || k > 0);
  }
  if (has_bias) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      multiply_ones(Operand{}, acc.bias[0], rows + k * kNext<kRowsMnMajor>, shared,
                    accumulate || k > 0);
    }
  }
  wgmma_commit();
}

// Multiplies a step with 3xTF32 and adds the result to totals, since the tensor core would truncate
// what low parts add to large accumulators. Large products come last.
__device__ __forceinline__ void multiply_parts(Accumulators& totals, const Shared& shared,
                                               int stage, const Place& place) {
  constexpr int kLow = kPartBytes / 16;
  const Matrix rows = rows_of(shared, stage, place.row_group);
  const Matrix columns = columns_of(shared, stage, place.column_group);
  float acc[kAccs];
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    const Matrix left = rows + (part == 0 ? kLow : 0), right = columns + (part == 1 ? kLow : 0);
#pragma unroll
    for (int k = 0; k < kMmas; ++k) {
      multiply<C::mma_columns>(acc, left + k * kNext<false>, right + k * kNext<false>,
                               part > 0 || k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_registers(acc);
#pragma unroll
  for (int j = 0; j < kAccs; ++j) totals.weights[0][j] += acc[j];
}

// Multiplies steps [first, end) of a tile with 3xTF32.
__device__ __forceinline__ void multiply_steps_in_parts(Accumulators& totals, const Shared& shared,
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

// Multiplies steps [first, end) of a tile.
__device__ __forceinline__ void multiply_steps(Accumulators& acc, const Shared& shared, Ring& ring,
                                               int first, int end, const Place& place,
                                               bool has_bias) {
  int previous = -1;
  for (int step = first; step < end; ++step, ring.advance()) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    if (kOfAllImages || kLastMmas == kMmas || step % kLineSteps < kLineSteps - 1) {
      multiply_step<kMmas>(acc, shared, ring.stage, place, has_bias, step > first);
    } else {
      multiply_step<kLastMmas>(acc, shared, ring.stage, place, has_bias, step > first);
    }
    wgmma_wait<1>();
    if (previous >= 0 && place.lane == 0) barrier_arrive(shared.empty(previous));
    previous = ring.stage;
  }
  wgmma_wait<0>();
  if (place.lane == 0) barrier_arrive(shared.empty(previous));
}

// Stores weights straight from registers, if the block has all of a tile's steps.
__device__ __forceinline__ void store_weights(float (&acc)[kAccs], const Tile& tile, Scalar* grad,
                                              const Place& place, int unit) {
  // Eight columns have one tap.
  constexpr bool kOneTap = !C::by_taps && kTapColumns % 8 == 0;
  const int group = tile.column + place.column_group * kGroupColumns + unit * C::mma_columns;
  hold_registers(acc);
#pragma unroll
  for (int j = 0; j < kAccs; j += 2) {
    const int first = group + j / 4 * 8;
    const int in_octet = place.lane % 4 * 2, row = tile.row + place.row(j / 2 % 2);
    if constexpr (kOneTap && !kVectorWeights) {
      Column column(first);
      column.channel += in_octet;
      store_weight(grad, tile, row, column, acc[j]);
      ++column.channel;
      store_weight(grad, tile, row, column, acc[j + 1]);
    } else {
      store_two(grad, tile, row, first + in_octet, acc[j], acc[j + 1]);
    }
  }
}

// Stores the bias. One lane of four has a row's sum; rows 8 apart are in two of its registers.
__device__ __forceinline__ void store_bias(float (&acc)[4], const Tile& tile, Scalar* bias_grad,
                                           const Place& place) {
  hold_registers(acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.row + place.row(half);
    if (place.lane % 4 == 0 && row < kOut) {
      bias_grad[tile.group * kOut + row] = narrow<Scalar>(acc[2 * half]);
    }
  }
}
__device__ __forceinline__ void flush_bias(float (&acc)[4], float* totals, const Place& place,
                                           bool set) {
  hold_registers(acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const total = totals + place.row(half);
    if (place.lane % 4 == 0) *total = acc[2 * half] + (set ? 0.0f : *total);
  }
}

// Writes the accumulators to shared memory, for the cluster's reduction. The barrier waits until no
// consumer reads the stages, which they overwrite.
__device__ __forceinline__ void put_accumulators(Accumulators& acc, const Shared& shared,
                                                 const Place& place, bool has_bias) {
  constexpr int kBarrier = 1;
  wait_at(kBarrier, 128 * kConsumers);
  hold_accumulators(acc.weights);
  const int column = place.column_group * kGroupColumns + place.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const target = accumulators_of_row(shared, place.row(half)) + column;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const float* const two = &acc.weights[4 * i / kAccs][4 * i % kAccs + 2 * half];
      *reinterpret_cast<float2*>(target + 8 * i) = make_float2(two[0], two[1]);
    }
  }
  if (has_bias) flush_bias(acc.bias[0], accumulators_of_bias(shared), place, true);
}

struct Results {
  float4* workspace;
  Scalar* grad;
  Scalar* bias_grad;
};

__device__ __forceinline__ void consume(const Shared& shared, const Results& results,
                                        const Share& share, int slab) {
  const Place place;
  Ring ring(0);
  for_runs(share, static_cast<int>(blockIdx.x), [&](const Run& run, int number) {
    const Tile tile(run.tile);
    const bool has_bias = tile.has_bias() && place.column_group == 0;
    const int consumer = static_cast<int>(threadIdx.x) / 128;
    float4* const slots = results.workspace + share.slots(static_cast<int>(blockIdx.x), number);
    for (int step = run.first; step < run.end; step += C::flush_steps) {
      const bool set = step == run.first && slab == 0;
      Accumulators acc;
      const int end = min(step + C::flush_steps, run.end);
      if constexpr (C::parts == 2) {
        multiply_steps_in_parts(acc, shared, ring, step, end, place);
      } else if constexpr (Halo::exists) {
        multiply_steps_of_boxes<Halo>(acc, shared, ring, step, end, place, has_bias);
      } else {
        multiply_steps(acc, shared, ring, step, end, place, has_bias);
      }
      if constexpr (C::whole) {
#pragma unroll
        for (int unit = 0; unit < Halo::units; ++unit) {
          store_weights(acc.weights[unit], tile, results.grad, place, unit);
        }
        if (has_bias) store_bias(acc.bias[0], tile, results.bias_grad, place);
      } else if constexpr (C::cluster > 1) {
        put_accumulators(acc, shared, place, has_bias);
      } else {
        flush(acc.weights, slots + consumer * kSlots * 128 + threadIdx.x % 128, set);
        auto* const totals = reinterpret_cast<float*>(slots + kAccSlots);
        if (has_bias) flush_bias(acc.bias[0], totals, place, set);
      }
    }
  });
}

}  // namespace hopper
}  // namespace fastconv
