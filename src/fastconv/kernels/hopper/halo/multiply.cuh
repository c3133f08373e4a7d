// Consumers: warpgroups that multiply what is in shared memory.
#pragma once
#include "hopper/halo/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

constexpr int kSums = C::pixels / 2;  // of a thread

// Where a tap's first pixel lies in the stages of a tile whose first is `stage`, in 16 bytes.
__device__ __forceinline__ int tap_offset(int stage, int first_row, int tap) {
  const int tap_row = tap / C::kernel_width;
  const int tap_column = tap % C::kernel_width;
  const int column_slot = tap_column % kColumnPhases;
  const int column = column_slot * kSlotPixels + tap_column * kColumnStep / kColumnPhases;
  if constexpr (C::rolling) {
    int of_row = stage + first_row + tap_row;
    if (of_row >= C::input_stages) of_row -= C::input_stages;
    return of_row * (kInputBytes / 16) + column;
  } else {
    return stage * (kInputBytes / 16) + tap_row % kRowPhases * (kColumnSlots * kSlotPixels) +
           (first_row + tap_row / kRowPhases) * C::pitch + column;
  }
}

static_assert(!C::turns || (C::resident && (C::rolling || kChunks <= C::input_stages)),
              "a consumer that takes turns needs all of a tile before the other gives any back");

// A warpgroup that multiplies and stores; what it keeps from one tile to the next.
struct Consumer {
  int lane;
  int warp;  // of the warpgroup
  int warpgroup;
  int channel_group;
  int pixel_group;
  Matrix input_matrix;
  Matrix weight_matrix;
  Ring<C::input_stages> input{0};  // the next stage to wait for
  Ring<C::weight_stages> weights{0};
  Ring<C::input_stages> spent_input{0};  // the next to give back
  Ring<C::weight_stages> spent_weights{0};
  unsigned turn;  // parity

  __device__ Consumer() {
    lane = static_cast<int>(threadIdx.x) % 32;
    // From one lane, for the compiler to see that it is the same for all.
    const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 4;
    warp = number % 4;
    warpgroup = number / 4;
    turn = warpgroup == 0;
    channel_group = warpgroup % C::channel_groups;
    pixel_group = warpgroup / C::channel_groups;
    input_matrix = matrix(shared_memory() + kInputRing, kPlaneBytes, 128);
    weight_matrix =
        matrix(shared_memory() + kWeightRing + channel_group * kProductBytes, kOutputs * 16, 128);
  }

  // Waits for the input of a chunk of a tile, as far as no earlier tile has; its first stage.
  __device__ __forceinline__ int wait_for_input(bool first_of_item) {
    const int first = C::rolling ? spent_input.stage : input.stage;
    const int stages = !C::rolling ? 1 : first_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_wait(&barriers().input_full[input.stage], input.parity);
      input.advance();
    }
    return first;
  }

  // Whether it has something infinite or NaN. The same for all warps: the stages are still theirs.
  __device__ __forceinline__ bool is_marked(int first) const {
    bool marked = false;
#pragma unroll 1
    for (int i = 0; i < (C::rolling ? kHaloRows : 1); ++i) {
      marked = marked || watch().marked(first);
      if (++first == C::input_stages) first = 0;
    }
    return marked;
  }

  // Gives back the input of a chunk of a tile, but for what the next tile reads too.
  __device__ __forceinline__ void release_input(bool last_of_item) {
    const int stages = !C::rolling ? 1 : last_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (lane == 0) barrier_arrive(&barriers().input_empty[spent_input.stage]);
      spent_input.advance();
    }
  }

  __device__ __forceinline__ int wait_for_weights(int stage_of_tile) {
    if constexpr (C::resident) {
      barrier_wait(&barriers().weights_full[stage_of_tile], 0);
      return stage_of_tile;
    } else {
      const int stage = weights.stage;
      barrier_wait(&barriers().weights_full[stage], weights.parity);
      weights.advance();
      return stage;
    }
  }

  __device__ __forceinline__ void release_weights() {
    if constexpr (!C::resident) {
      if (lane == 0) barrier_arrive(&barriers().weights_empty[spent_weights.stage]);
      spent_weights.advance();
    }
  }

  // With `turns`, consumers multiply by turns, so that one does while the other stores.
  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (C::turns) {
      barrier_wait(&barriers().turn[warpgroup], turn);
      turn ^= 1;
    }
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (C::turns) {
      if (lane == 0) barrier_arrive(&barriers().turn[kConsumers - 1 - warpgroup]);
    }
  }

  // The products of low parts, of one stage of weights.
  __device__ __forceinline__ void multiply_low(float (&sums)[kSums], int weight_stage,
                                               int input_stage, int first_tap) const {
    constexpr int kPart = C::channel_groups * kProductBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
#pragma unroll
    for (int j = 0; j < C::stage_taps; ++j) {
      const Matrix right =
          input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
      for (int k = 0; k < C::k_steps; ++k) {
        wgmma<C::pixels>(Factor{}, sums,
                         left + (j * C::k_steps + k) * (kWeightParts * kPart) + kPart,
                         right + 2 * k * kPlanePixels + kPartPixels, j + k > 0);
      }
    }
  }

  // All others, of one stage of weights.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], int weight_stage, int input_stage,
                                           int first_tap, bool accumulate) const {
    constexpr int kPart = C::channel_groups * kProductBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
    // The large products of split numbers last: what the small ones add is not lost.
#pragma unroll
    for (int large = C::parts == 2 ? 0 : 1; large < 2; ++large) {
#pragma unroll
      for (int j = 0; j < C::stage_taps; ++j) {
        const Matrix right =
            input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
        for (int k = 0; k < C::k_steps; ++k) {
          const Matrix a = left + (j * C::k_steps + k) * (kWeightParts * kPart);
          const Matrix b = right + 2 * k * kPlanePixels;
          if (large) {
            wgmma<C::pixels>(Factor{}, sums, a, b, accumulate);
          } else {
            // Halves' low parts are enlarged, and a third part of weights makes up for it.
            const Matrix high = C::halves ? a + 2 * kPart : a;
            wgmma<C::pixels>(Factor{}, sums, high, b + kPartPixels, accumulate);
            wgmma<C::pixels>(Factor{}, sums, a + kPart, b, true);
          }
          accumulate = true;
        }
      }
    }
    wgmma_commit();
  }

  // The products of one stage of weights, of numbers in two parts. If low parts are infinite, their
  // products with each other are dropped. Both ways begin with a fence of their own: the compiler
  // wants none between a condition and the products.
  __device__ __forceinline__ void multiply_split(float (&sums)[kSums], int weight_stage,
                                                 int input_stage, int first_tap,
                                                 bool careful) const {
    static_assert(!C::low_products || !C::compensated, "sums begin with the low parts' products");
    if constexpr (C::low_products) {
      if (careful) {
        wgmma_fence();
        multiply_low(sums, weight_stage, input_stage, first_tap);
        wgmma_commit();
        wgmma_wait<0>();
        hold_registers(sums);
        drop_infinite(sums);
        wgmma_fence();
        multiply(sums, weight_stage, input_stage, first_tap, true);
      } else {
        wgmma_fence();
        multiply_low(sums, weight_stage, input_stage, first_tap);
        multiply(sums, weight_stage, input_stage, first_tap, true);
      }
    } else {
      wgmma_fence();
      multiply(sums, weight_stage, input_stage, first_tap, C::compensated);
    }
  }

  // One tile's sums, without the bias. Stages are given back one step late, when their products are
  // complete but the next ones are on their way already.
  __device__ __forceinline__ void compute(float (&sums)[kSums], bool first_of_item,
                                          bool last_of_item) {
    bool accumulate = false;
    wait_for_turn();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        const int weight_stage = wait_for_weights(chunk * kWeightStages + stage);
        wgmma_fence();
        multiply(sums, weight_stage, input_stage, stage * C::stage_taps, accumulate);
        wgmma_wait<1>();
        if (accumulate) release_weights();
        if (chunk > 0 && stage == 0) release_input(false);
        accumulate = true;
      }
    }
    end_turn();
    wgmma_wait<0>();
    hold_registers(sums);
    release_weights();
    release_input(last_of_item);
  }

  // The same in two levels, for numbers in two parts. What a total loses as it is rounded is where
  // the next sums begin (`compensated`): long sums are no less exact than short ones.
  __device__ __forceinline__ void compute_split(float (&totals)[kSums], bool first_of_item,
                                                bool last_of_item) {
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] = sums[i] = 0.0f;
    bool careful = false;
    wait_for_turn();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
      if constexpr (kWatches) careful = careful || is_marked(input_stage);
      int weight_stage = wait_for_weights(chunk * kWeightStages);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        multiply_split(sums, weight_stage, input_stage, stage * C::stage_taps, careful);
        // The next wait is over before the products are.
        if (stage < kWeightStages - 1) {
          weight_stage = wait_for_weights(chunk * kWeightStages + stage + 1);
        } else if (chunk == kChunks - 1) {
          end_turn();
        }
        wgmma_wait<0>();
        hold_registers(sums);
        release_weights();
        if (stage == kWeightStages - 1) release_input(last_of_item);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const float total = totals[i] + sums[i];
          if constexpr (C::compensated) sums[i] -= total - totals[i];
          totals[i] = total;
        }
        // What a total loses as it becomes infinite is no number.
        if constexpr (C::compensated && kWatches) {
          if (careful) drop_infinite(sums);
        }
      }
    }
  }
};

}  // namespace hopper
}  // namespace fastconv
