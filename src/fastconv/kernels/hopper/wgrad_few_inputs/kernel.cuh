// Weight gradients of few input channels on Hopper's tensor cores.
//
// A product's rows are 64 output channels, its sum runs over pixels of an output row, and the taps
// of a kernel row with all input channels are its columns. Each element of grad_output is loaded
// once, to the registers that it is multiplied from. The input is small; of each of its rows, a
// block keeps in shared memory what each tap sees of it, side by side:
//
//   input   [ring of rows][16 bytes of pixels][column: tap, channel][16 bytes]
//
// A block walks down strips of 64 pixels, one output row after the other; in the ring,
// kernel_height rows are multiplied while the next ones are loaded. Its warpgroups have different
// output channels and share the ring. From time to time a thread adds its sums to its own slots of
// a workspace, and a second kernel adds up the slots of all blocks in a fixed order: the same bits
// every time.
//
// With `bias`, what is loaded of grad_output is added up as well, before it is rounded.
#pragma once
#include "hopper/walk.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

constexpr int kThreads = 128 * C::warpgroups;

// --- Products ------------------------------------------------------------------------------------

constexpr int kOutputs = 64;  // channels of a product
constexpr int kBlockOutputs = kOutputs * C::warpgroups;
constexpr int kOutputBlocks = ceil_div(C::group_out, kBlockOutputs);
constexpr int kColumns = round_up(C::kernel_width * C::group_in, 8);  // of a product
constexpr int kSums = kColumns / 2;                   // of a thread and a kernel row
constexpr int kSlots = C::kernel_height * kSums / 4;  // of a thread, four sums each
static_assert(kColumns <= 256, "what a product can have");

constexpr int kPixels = 64;                    // of a strip
constexpr int kStepPixels = 2 * kVector;       // of a product
constexpr int kSteps = kPixels / kStepPixels;  // products of a strip's row
constexpr int kUnits = kSteps / C::unit_steps;
static_assert(kSteps % C::unit_steps == 0, "units are whole");

using Sums = float[C::kernel_height][kSums];

// --- Walks ---------------------------------------------------------------------------------------

// Output rows of a walk are kRowStep apart; they start at one of as many residues. From one to the
// next, input rows move on by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;
constexpr int kNewRows = kRowAdvance < C::kernel_height ? kRowAdvance : C::kernel_height;
constexpr int kRing = C::kernel_height + kNewRows;

struct Item : Walk<kPixels, kRowStep> {
  using Walk::Walk;

  // The input row that a tap row of an output row reads, both counted from the first.
  __device__ int input_row(int step, int tap) const {
    return row * C::stride_height - C::padding_top +
           (step * kRowAdvance + tap) * C::dilation_height;
  }
};

// --- The input's rows ----------------------------------------------------------------------------

// In units of 16 bytes. An odd number of them in a plane: lanes that write neighbouring planes hit
// different banks.
constexpr int kPlaneVectors = kColumns | 1;
constexpr int kPartVectors = 2 * kSteps * kPlaneVectors;
constexpr int kRowVectors = C::parts * kPartVectors;
static_assert(kRing * kRowVectors * 16 <= C::shared_bytes, "");

constexpr int kRowTasks = ceil_div(2 * kSteps * kColumns, kThreads);  // vectors of a thread

// The place of element `i` of a vector among the strip's pixels. Of float32, a thread of the left
// operand has pairs of pixels, in both halves of the product's sum.
__device__ __forceinline__ int pixel_of(int plane, int i) {
  if constexpr (kScalarBytes == 4) {
    return plane / 2 * kStepPixels + 2 * i + plane % 2;
  } else {
    return plane * kVector + i;
  }
}

constexpr int kInPixel = C::in_channels_last ? C::group_in : 1;
constexpr int kInChannel = C::in_channels_last ? 1 : C::in_height * C::in_width;
static_assert(elements_of(C::group_in, C::in_height, C::in_width) < kMostElements, "");

// Rows and columns that taps read, before or behind the input's first; and where the farthest
// element would be.
constexpr int kFarRow =
    max_of(C::padding_top, C::out_height* C::stride_height + C::kernel_height * C::dilation_height);
constexpr int kFarColumn = max_of(C::padding_left, (C::out_width + kPixels) * C::stride_width +
                                                       (C::kernel_width + 8) * C::dilation_width);
using InOffset = IndexTo<elements_of(kFarRow, C::in_width, kInPixel) +
                         elements_of(kFarColumn, kInPixel) + elements_of(C::group_in, kInChannel)>;

// A thread's share of an input row, on its way to the ring.
struct InputRow {
  unsigned elements[kRowTasks][kVector];

  __device__ __forceinline__ void load(const Scalar* image, const Item& item, int row) {
#pragma unroll
    for (int task = 0; task < kRowTasks; ++task) {
      const int index = task * kThreads + static_cast<int>(threadIdx.x);
      const int plane = index % (2 * kSteps);
      const int column = index / (2 * kSteps);
      const int tap = column / C::group_in;
      const bool exists = tap < C::kernel_width && row >= 0 && row < C::in_height;
      const Scalar* const source = image + column % C::group_in * kInChannel +
                                   static_cast<InOffset>(row) * (C::in_width * kInPixel);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int out = item.column + pixel_of(plane, i);
        const int at = out * C::stride_width - C::padding_left + tap * C::dilation_width;
        const bool inside = out < C::out_width && at >= 0 && at < C::in_width;
        elements[task][i] =
            load_bits(source + static_cast<InOffset>(at) * kInPixel, exists && inside);
      }
    }
  }

  __device__ __forceinline__ void store(int slot) const {
    uint4* const row = reinterpret_cast<uint4*>(shared_memory()) + slot * kRowVectors;
#pragma unroll
    for (int task = 0; task < kRowTasks; ++task) {
      const int index = task * kThreads + static_cast<int>(threadIdx.x);
      const int column = index / (2 * kSteps);
      if (column >= kColumns) break;
      store_vector(row + index % (2 * kSteps) * kPlaneVectors + column, elements[task]);
    }
  }

  __device__ __forceinline__ static void store_vector(uint4* target,
                                                      const unsigned (&element)[kVector]) {
    unsigned words[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kScalarBytes == 2) {
        words[i] = element[2 * i % kVector] | element[(2 * i + 1) % kVector] << 16;
      } else {
        const float value = __uint_as_float(element[i]);
        split(value, words[i], low[i]);
        if (C::parts == 1) words[i] = __float_as_uint(round_operand_to_tf32(value));
      }
    }
    target[0] = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (C::parts == 2) {
      target[kPartVectors] = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
};

// --- The output's gradient -----------------------------------------------------------------------

constexpr int kOutPixel = C::grad_channels_last ? C::group_out : 1;
constexpr int kOutChannel = C::grad_channels_last ? 1 : C::out_height * C::out_width;
static_assert(elements_of(C::group_out, C::out_height, C::out_width) < kMostElements, "");
// A walk looks one step ahead, and products have channels that do not exist.
using OutOffset = IndexTo<elements_of(C::out_height + kRowStep, C::out_width, kOutPixel) +
                          elements_of(kBlockOutputs* kOutputBlocks + 8, kOutChannel)>;

using Raw = unsigned[C::unit_steps][4];
using Fragments = unsigned[C::parts][C::unit_steps][4];

// What a thread loads of the rows of a walk: of two channels, 8 apart, two neighbouring pixels (two
// pairs, of 16-bit types) for each product.
struct GradLoader {
  const Scalar* pixels;  // its first
  int columns;           // from its first pixel to the row's end
  bool exists[2];        // its channels

  __device__ GradLoader(const Scalar* grad_output, const Item& item, int output) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int channel = output + thread / 32 * 16 + thread % 32 / 4;
    const int column = item.column + thread % 4 * 2;
    pixels = grad_output +
             static_cast<long long>(item.image) * C::group_out * (C::out_height * C::out_width) +
             static_cast<OutOffset>(channel) * kOutChannel + column * kOutPixel;
    columns = C::out_width - column;
    for (int i = 0; i < 2; ++i) exists[i] = channel + i * 8 < C::group_out;
  }

  __device__ __forceinline__ void load(Raw& raw, int row, int unit, bool wanted) const {
    const Scalar* const of_row = pixels + static_cast<OutOffset>(row) * (C::out_width * kOutPixel);
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Scalar* const source = of_row + static_cast<OutOffset>(half * 8) * kOutChannel;
        const int first = (unit * C::unit_steps + step) * kStepPixels;
        const bool there = wanted && exists[half];
        if constexpr (kScalarBytes == 2) {
          // A pair, and the one 8 pixels further on.
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = first + i * 8;
            raw[step][half + 2 * i] = load_bits(
                reinterpret_cast<const float*>(source + at * kOutPixel), there && at < columns);
          }
        } else if constexpr (C::pair_loads) {
          const uint2 pair = load_or_zero(
              reinterpret_cast<const uint2*>(source + first * kOutPixel), there && first < columns);
          raw[step][half] = pair.x;
          raw[step][half + 2] = pair.y;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            raw[step][half + 2 * i] =
                load_bits(source + (first + i) * kOutPixel, there && first + i < columns);
          }
        }
      }
    }
  }
};

__device__ __forceinline__ float sum_of_word(unsigned word, float) { return __uint_as_float(word); }
template <class Half>
__device__ __forceinline__ float sum_of_word(unsigned word, Half) {
  return widen(Half{static_cast<unsigned short>(word)}) +
         widen(Half{static_cast<unsigned short>(word >> 16)});
}

// Left operands of what was loaded. Adds it up for the bias of the thread's two channels.
__device__ __forceinline__ void convert(Fragments& fragments, float (&bias)[2], const Raw& raw) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int step = 0; step < C::unit_steps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned word = raw[step][i];
      if constexpr (kScalarBytes == 2) {
        fragments[0][step][i] = word;
      } else if constexpr (C::parts == 2) {
        split(__uint_as_float(word), fragments[0][step][i], fragments[C::parts - 1][step][i]);
      } else {
        fragments[0][step][i] = __float_as_uint(round_operand_to_tf32(__uint_as_float(word)));
      }
      if constexpr (C::bias) sums[i % 2] += sum_of_word(word, Scalar{});
    }
  }
  bias[0] += sums[0];
  bias[1] += sums[1];
}

// --- Products of a unit --------------------------------------------------------------------------

// Those of one part of the left operand with one part of the right one; `first_row` is in the ring.
template <int kLeftPart, int kRightPart>
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments, int first_row,
                                         int unit, bool accumulate) {
  const Matrix ring = matrix(shared_memory(), kPlaneVectors * 16, 128);
#pragma unroll
  for (int row = 0; row < C::kernel_height; ++row) {
    int slot = first_row + row;
    if (slot >= kRing) slot -= kRing;
    const Matrix right = ring + slot * kRowVectors + kRightPart * kPartVectors +
                         unit * C::unit_steps * (2 * kPlaneVectors);
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
      wgmma<kColumns>(Operand{}, sums[row], fragments[kLeftPart][step],
                      right + step * (2 * kPlaneVectors), accumulate || step > 0);
    }
  }
}

// Starts a unit's products.
__device__ __forceinline__ void start(Sums& sums, const Fragments& fragments, int first_row,
                                      int unit) {
  wgmma_fence();
  if constexpr (C::parts == 2) {
    constexpr int kLow = C::parts - 1;
    // Large products come last: what small ones add is not lost.
    multiply<kLow, 0>(sums, fragments, first_row, unit, false);
    multiply<0, kLow>(sums, fragments, first_row, unit, true);
  }
  multiply<0, 0>(sums, fragments, first_row, unit, true);
  wgmma_commit();
}

// Waits for them, and adds them to `totals`, which are `sums` themselves unless numbers are in two
// parts.
__device__ __forceinline__ void finish(Sums& sums, Sums& totals) {
  wgmma_wait<0>();
  hold_sums(sums);
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int i = 0; i < C::kernel_height; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) totals[i][j] += sums[i][j];
    }
  }
}

// --- The workspace -------------------------------------------------------------------------------

// A warpgroup's slots: [block][warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * C::warpgroups + warpgroup) * (kSlots * 128);
}
// Where the sums for the bias are, behind all slots: [block][channel].
__device__ __forceinline__ long long bias_of(int blocks, int block) {
  return slots_of(blocks, 0) * 4 + static_cast<long long>(block) * kBlockOutputs;
}

// Writes a warpgroup's sums for the bias; four lanes have pixels of a channel.
__device__ __forceinline__ void store_bias(const float (&bias)[2], float* target) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_four_lanes(bias[half]);
    if (thread % 4 == 0) target[thread / 32 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// --- All together --------------------------------------------------------------------------------

// Sums since the last flush, and of the bias also until then.
struct State {
  Sums sums, more;  // `more` collects the sums of numbers in two parts
  float bias[2] = {0.0f, 0.0f};
  float bias_total[2] = {0.0f, 0.0f};
  int first_row = 0;  // of a step, in the ring
  int steps = 0;      // since the last flush
  bool flushed = false;

  __device__ Sums& totals() { return C::parts == 2 ? more : sums; }

  __device__ __forceinline__ void flush_to(float4* slots) {
    flush(totals(), slots, !flushed);
    clear(totals());
    flushed = true;
    steps = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bias_total[i] += bias[i];
      bias[i] = 0.0f;
    }
  }
};

__device__ __forceinline__ int ring_slot(int first, int row) { return (first + row) % kRing; }

__device__ __forceinline__ void walk(State& state, const Scalar* grad_output, const Scalar* input,
                                     float4* slots, int output, const Item& item) {
  const GradLoader grad(grad_output, item, output);
  const Scalar* const image =
      input + static_cast<long long>(item.image) * C::group_in * (C::in_height * C::in_width);
  Raw raw;
  grad.load(raw, item.row, 0, true);
  InputRow rows[kNewRows];
#pragma unroll 1
  for (int row = 0; row < C::kernel_height; ++row) {
    rows[0].load(image, item, item.input_row(0, row));
    rows[0].store(ring_slot(state.first_row, row));
  }
  fence_async_shared();
  __syncthreads();
  Fragments fragments;
#pragma unroll 1
  for (int step = 0; step < item.rows; ++step) {
    const bool more = step < item.rows - 1;
    const int row = item.row + step * kRowStep;
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      convert(fragments, state.bias, raw);
      // What comes next is loaded while this is multiplied; 16-bit words, which are multiplied as
      // they are, have to leave their registers first.
      constexpr bool kLoadFirst = kScalarBytes == 2;
      const bool last = unit == kUnits - 1;
      const int next_row = last ? row + kRowStep : row;
      const int next_unit = last ? 0 : unit + 1;
      if (kLoadFirst) grad.load(raw, next_row, next_unit, !last || more);
      start(state.sums, fragments, state.first_row, unit);
      if (!kLoadFirst) grad.load(raw, next_row, next_unit, !last || more);
      if (unit == 0) {
#pragma unroll
        for (int i = 0; i < kNewRows; ++i) {
          const int tap = C::kernel_height - kNewRows + i;
          rows[i].load(image, item, more ? item.input_row(step + 1, tap) : -1);
        }
      }
      finish(state.sums, state.totals());
    }
    // Rows that this step has not multiplied, but the one before it, make room.
#pragma unroll
    for (int i = 0; i < kNewRows; ++i) {
      rows[i].store(ring_slot(state.first_row, C::kernel_height + i));
    }
    state.first_row = ring_slot(state.first_row, kNewRows);
    if (++state.steps == C::flush_steps) state.flush_to(slots);
    fence_async_shared();
    __syncthreads();
  }
}

__device__ __forceinline__ void collect(const Scalar* grad_output, const Scalar* input,
                                        float4* workspace, int workers, int batch) {
  const int block = static_cast<int>(blockIdx.x);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int output = block % kOutputBlocks * kBlockOutputs + warpgroup * kOutputs;
  float4* const slots = workspace + slots_of(block, warpgroup) + threadIdx.x % 128;
  const int items = batch * Item::kPerImage;
  State state;
  clear(state.totals());
  for (int index = block / kOutputBlocks; index < items; index += workers) {
    const Item item(index);
    if (item.rows > 0) walk(state, grad_output, input, slots, output, item);
  }
  state.flush_to(slots);
  if constexpr (C::bias) {
    float* const target = reinterpret_cast<float*>(workspace) +
                          bias_of(static_cast<int>(gridDim.x), block) + warpgroup * kOutputs;
    store_bias(state.bias_total, target);
  }
}

// Adds up the slots of every weight, workers in order, and writes it where its strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int workers) {
  constexpr int kBlockSlots = C::warpgroups * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kOutputBlocks * kBlockSlots; i += step) {
    const float4 total = total_of(workspace + i, kOutputBlocks * kBlockSlots, workers);
    const float values[4] = {total.x, total.y, total.z, total.w};
    const int thread = i % 128;
    const int slot = i / 128 % kSlots;
    const int channel = i / (kSlots * 128) * kOutputs + thread / 32 * 16 + thread % 32 / 4;
    const int row = slot * 4 / kSums;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = slot * 4 % kSums * 2 + thread % 4 * 2 + j % 2;
      const int tap = column / C::group_in;
      const int out = channel + j / 2 * 8;
      if (tap >= C::kernel_width || out >= C::group_out) continue;
      grad[weight_offset(out, column % C::group_in, row, tap)] = narrow<Scalar>(values[j]);
    }
  }
}

// The same for the bias.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const float* const sums =
      reinterpret_cast<const float*>(workspace) + bias_of(workers * kOutputBlocks, 0);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < C::group_out; i += step) {
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      total += sums[static_cast<long long>(worker) * (kOutputBlocks * kBlockOutputs) + i];
    }
    bias_grad[i] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(128 * Config::warpgroups, 2 / Config::warpgroups)
    collect(const Config::Scalar* grad_output, const Config::Scalar* input, float4* workspace,
            int workers, int batch) {
  fastconv::hopper::collect(grad_output, input, workspace, workers, batch);
}

extern "C" __global__ void __launch_bounds__(256)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad, int workers) {
  fastconv::hopper::reduce(workspace, grad, workers);
  if constexpr (Config::bias) fastconv::hopper::reduce_bias(workspace, bias_grad, workers);
}
