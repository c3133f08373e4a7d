// Consumers: warpgroups that issue wgmma on the input and weight stages in shared memory.
#pragma once
#include "hopper/halo/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

constexpr int kAccumulators = C::pixels / 2;  // registers of a thread

// The offset of a tap's first pixel in the ring of input stages, in units of 16 bytes, for a tile
// whose first stage is `stage`.
__device__ __forceinline__ int tap_offset(int stage, int first_row, int tap) {
  const int tap_row = tap / C::kernel_width;
  const int tap_column = tap % C::kernel_width;
  const int column_slot = tap_column % kColumnResidues;
  const int column = column_slot * kSlotPixels + tap_column * kColumnStep / kColumnResidues;
  if constexpr (C::rolling) {
    int of_row = stage + first_row + tap_row;
    if (of_row >= C::input_stages) of_row -= C::input_stages;
    return of_row * (kInputBytes / 16) + column;
  } else {
    return stage * (kInputBytes / 16) + tap_row % kRowResidues * (kColumnSlots * kSlotPixels) +
           (first_row + tap_row / kRowResidues) * C::pitch + column;
  }
}

static_assert(!C::turns || (C::resident && (C::rolling || kChunks <= C::input_stages)),
              "a consumer that takes turns needs all of a tile before the other gives any back");

// What a consumer warpgroup keeps from one tile to the next.
struct Consumer {
  int lane;
  int warp;  // index in the warpgroup
  int warpgroup;
  int channel_group;
  int pixel_group;
  Matrix input_matrix;
  Matrix weight_matrix;
  Ring<C::input_stages> input{0};  // next stage to wait for
  Ring<C::weight_stages> weights{0};
  Ring<C::input_stages> spent_input{0};  // next stage to release
  Ring<C::weight_stages> spent_weights{0};
  unsigned turn;  // parity of the mbarrier that grants the turn

  __device__ Consumer() {
    lane = static_cast<int>(threadIdx.x) % 32;
    // The shuffle tells the compiler that the warp's number is uniform.
    const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - kProducerWarps;
    warp = number % 4;
    warpgroup = number / 4;
    turn = warpgroup == 0;
    channel_group = warpgroup % C::channel_groups;
    pixel_group = warpgroup / C::channel_groups;
    input_matrix = matrix(shared_memory() + kInputRing, kPlaneBytes, 128);
    weight_matrix =
        matrix(shared_memory() + kWeightRing + channel_group * kAOperandBytes, kOutputs * 16, 128);
  }

  // Waits for a chunk of a tile's input, except stages that an earlier tile has waited for. Returns
  // the chunk's first stage.
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

  // Whether the stages from `first` on hold an infinity or a NaN. All warps read the same marks,
  // because none has released these stages.
  __device__ __forceinline__ bool is_marked(int first) const {
    bool marked = false;
#pragma unroll 1
    for (int i = 0; i < (C::rolling ? kHaloRows : 1); ++i) {
      marked = marked || watch().marked(first);
      if (++first == C::input_stages) first = 0;
    }
    return marked;
  }

  // Releases the stages of a tile's chunk, except rows that the next tile reads too.
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

  // With `turns`, the consumers alternate: one issues MMAs while the other stores.
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

  // The MMAs low * low of one stage of weights.
  __device__ __forceinline__ void multiply_low(float (&acc)[kAccumulators], int weight_stage,
                                               int input_stage, int first_tap) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
#pragma unroll
    for (int j = 0; j < C::stage_taps; ++j) {
      const Matrix right =
          input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
      for (int k = 0; k < C::k_steps; ++k) {
        wgmma<C::pixels>(Factor{}, acc,
                         left + (j * C::k_steps + k) * (kWeightParts * kPart) + kPart,
                         right + 2 * k * kPlanePixels + kPartPixels, j + k > 0);
      }
    }
  }

  // All other MMAs of one stage of weights.
  __device__ __forceinline__ void multiply(float (&acc)[kAccumulators], int weight_stage,
                                           int input_stage, int first_tap, bool accumulate) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
    // The high * high MMAs come last, so that the small products are added to small accumulators.
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
            wgmma<C::pixels>(Factor{}, acc, a, b, accumulate);
          } else {
            // Scaled fp16 stores the input's low part enlarged; a third part of the weights, the
            // high part made smaller, compensates.
            const Matrix high = C::scaled_fp16 ? a + 2 * kPart : a;
            wgmma<C::pixels>(Factor{}, acc, high, b + kPartPixels, accumulate);
            wgmma<C::pixels>(Factor{}, acc, a + kPart, b, true);
          }
          accumulate = true;
        }
      }
    }
    wgmma_commit();
  }

  // The MMAs of one stage of weights for operands in two parts. If the input has infinite low parts
  // (`careful`), what low * low has made infinite is dropped. Each branch has its own fence: the
  // compiler wants no condition between the fence and the wgmmas.
  __device__ __forceinline__ void multiply_split(float (&acc)[kAccumulators], int weight_stage,
                                                 int input_stage, int first_tap,
                                                 bool careful) const {
    static_assert(!C::low_low_mma || !C::compensated, "sums begin with the low parts' products");
    if constexpr (C::low_low_mma) {
      if (careful) {
        wgmma_fence();
        multiply_low(acc, weight_stage, input_stage, first_tap);
        wgmma_commit();
        wgmma_wait<0>();
        hold_registers(acc);
        drop_infinite(acc);
        wgmma_fence();
        multiply(acc, weight_stage, input_stage, first_tap, true);
      } else {
        wgmma_fence();
        multiply_low(acc, weight_stage, input_stage, first_tap);
        multiply(acc, weight_stage, input_stage, first_tap, true);
      }
    } else {
      wgmma_fence();
      multiply(acc, weight_stage, input_stage, first_tap, C::compensated);
    }
  }

  // A tile's accumulators, without the bias. A stage is released one step late, when its wgmmas are
  // complete and the next ones have been issued.
  __device__ __forceinline__ void compute(float (&acc)[kAccumulators], bool first_of_item,
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
        multiply(acc, weight_stage, input_stage, stage * C::stage_taps, accumulate);
        wgmma_wait<1>();
        if (accumulate) release_weights();
        if (chunk > 0 && stage == 0) release_input(false);
        accumulate = true;
      }
    }
    end_turn();
    wgmma_wait<0>();
    hold_registers(acc);
    release_weights();
    release_input(last_of_item);
  }

  // The same for operands in two parts, in two levels: after each stage of weights the accumulators
  // are added to `totals`. With `compensated`, the next stage's accumulators start from the
  // rounding error of that addition, so that long sums are as exact as short ones.
  __device__ __forceinline__ void compute_split(float (&totals)[kAccumulators], bool first_of_item,
                                                bool last_of_item) {
    float acc[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) totals[i] = acc[i] = 0.0f;
    bool careful = false;
    wait_for_turn();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
      if constexpr (kWatches) careful = careful || is_marked(input_stage);
      int weight_stage = wait_for_weights(chunk * kWeightStages);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        multiply_split(acc, weight_stage, input_stage, stage * C::stage_taps, careful);
        // Waits for the next weights while the wgmmas run.
        if (stage < kWeightStages - 1) {
          weight_stage = wait_for_weights(chunk * kWeightStages + stage + 1);
        } else if (chunk == kChunks - 1) {
          end_turn();
        }
        wgmma_wait<0>();
        hold_registers(acc);
        release_weights();
        if (stage == kWeightStages - 1) release_input(last_of_item);
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) {
          const float total = totals[i] + acc[i];
          if constexpr (C::compensated) acc[i] -= total - totals[i];
          totals[i] = total;
        }
        // The rounding error of a total that became infinite is NaN or infinite.
        if constexpr (C::compensated && kWatches) {
          if (careful) drop_infinite(acc);
        }
      }
    }
  }
};

}  // namespace hopper
}  // namespace fastconv
