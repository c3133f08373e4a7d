// Weight gradients of layers with few input channels, on Hopper's tensor cores.
//
// M is 64 output channels, N is the taps of a kernel row with all input channels, and K is the
// pixels of an output row. Each element of grad_output is loaded once, to the registers of wgmma's
// left operand. The input is small: of each of its rows, a block keeps in shared memory the im2col
// matrix, what each tap reads of it, side by side:
//
//   input   [ring of rows][16 bytes of pixels][column: tap, channel][16 bytes]
//
// A block walks down strips of 64 pixels, one output row after the other. Of the ring,
// kernel_height rows are multiplied while the next ones are loaded. The block's warpgroups have
// different output channels and share the ring. After every flush_steps rows, a thread adds its
// accumulators to its own slots of a workspace, and a second kernel reduces the slots of all blocks
// in a fixed order, so results are the same bits every time.
//
// With `bias`, what is loaded of grad_output is also added up, before it is rounded.
#pragma once
#include "hopper/walk.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

constexpr int kThreads = 128 * C::warpgroups;

// --- MMAs ----------------------------------------------------------------------------------------

constexpr int kOutputs = 64;  // the M of a wgmma: output channels
constexpr int kBlockOutputs = kOutputs * C::warpgroups;
constexpr int kOutputBlocks = ceil_div(C::group_out, kBlockOutputs);
constexpr int kColumns = round_up(C::kernel_width * C::group_in, 8);  // the N of a wgmma
constexpr int kAccs = kColumns / 2;                   // accumulators of a thread for a kernel row
constexpr int kSlots = C::kernel_height * kAccs / 4;  // slots of a thread, four accumulators each
static_assert(kColumns <= 256, "wgmma's largest N");

constexpr int kPixels = 64;                    // pixels of a strip
constexpr int kStepPixels = 2 * kVector;       // the K of a wgmma
constexpr int kSteps = kPixels / kStepPixels;  // wgmmas of a strip's row
constexpr int kUnits = kSteps / C::unit_steps;
static_assert(kSteps % C::unit_steps == 0, "units are whole");

using Accumulators = float[C::kernel_height][kAccs];

// --- Walks ---------------------------------------------------------------------------------------

// Output rows of a walk are kRowStep apart and start at one of kRowStep residues. From one to the
// next, input rows advance by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;
constexpr int kNewRows = kRowAdvance < C::kernel_height ? kRowAdvance : C::kernel_height;
constexpr int kRing = C::kernel_height + kNewRows;

struct Item : Walk<kPixels, kRowStep> {
  using Walk::Walk;

  // The input row that a tap row reads for the walk's step-th output row.
  __device__ int input_row(int step, int tap) const {
    return row * C::stride_height - C::padding_top +
           (step * kRowAdvance + tap) * C::dilation_height;
  }
};

// --- The input's rows ----------------------------------------------------------------------------

// Distances in units of 16 bytes. A plane has an odd number of them, so that lanes that write
// neighbouring planes use different banks.
constexpr int kPlaneVectors = kColumns | 1;
constexpr int kPartVectors = 2 * kSteps * kPlaneVectors;
constexpr int kRowVectors = C::parts * kPartVectors;
static_assert(kRing * kRowVectors * 16 <= C::shared_bytes, "");

// Vectors of a row that a thread loads.
constexpr int kRowTasks = ceil_div(2 * kSteps * kColumns, kThreads);

// The pixel of element `i` of a K vector, in the strip. For float32, a thread loads pairs of pixels
// of grad_output, which go to both halves of wgmma's K; the input has the same order.
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

// The farthest rows and columns that taps read, before or behind the input's first, and an index
// type that reaches every element there.
constexpr int kFarRow =
    max_of(C::padding_top, C::out_height* C::stride_height + C::kernel_height * C::dilation_height);
constexpr int kFarColumn = max_of(C::padding_left, (C::out_width + kPixels) * C::stride_width +
                                                       (C::kernel_width + 8) * C::dilation_width);
using InOffset = IndexTo<elements_of(kFarRow, C::in_width, kInPixel) +
                         elements_of(kFarColumn, kInPixel) + elements_of(C::group_in, kInChannel)>;

// A thread's share of an input row, in registers on its way to the ring.
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
// A walk loads one step ahead, and MMA tiles have channels that do not exist.
using OutOffset = IndexTo<elements_of(C::out_height + kRowStep, C::out_width, kOutPixel) +
                          elements_of(kBlockOutputs* kOutputBlocks + 8, kOutChannel)>;

using Raw = unsigned[C::unit_steps][4];
using Fragments = unsigned[C::parts][C::unit_steps][4];

// A thread's loads of grad_output: of two channels, 8 apart, two neighbouring pixels for each
// wgmma, or two pairs of 16-bit types.
struct GradLoader {
  const Scalar* pixels;  // the thread's first pixel
  int columns;           // from its first pixel to the row's end
  bool exists[2];        // whether its two channels exist

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
          // A pair, and the pair 8 pixels further on.
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

// Converts what was loaded to left operands, and adds it up for the bias of the thread's two
// channels.
__device__ __forceinline__ void convert(Fragments& fragments, float (&bias)[2], const Raw& raw) {
  float acc[2] = {0.0f, 0.0f};
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
      if constexpr (C::bias) acc[i % 2] += sum_of_word(word, Scalar{});
    }
  }
  bias[0] += acc[0];
  bias[1] += acc[1];
}

// --- MMAs of a unit ------------------------------------------------------------------------------

// Issues the MMAs of one part of the left operand with one part of the right one; `first_row` is a
// position in the ring.
template <int kLeftPart, int kRightPart>
__device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& fragments,
                                         int first_row, int unit, bool accumulate) {
  const Matrix ring = matrix(shared_memory(), kPlaneVectors * 16, 128);
#pragma unroll
  for (int row = 0; row < C::kernel_height; ++row) {
    int slot = first_row + row;
    if (slot >= kRing) slot -= kRing;
    const Matrix right = ring + slot * kRowVectors + kRightPart * kPartVectors +
                         unit * C::unit_steps * (2 * kPlaneVectors);
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
      wgmma<kColumns>(Operand{}, acc[row], fragments[kLeftPart][step],
                      right + step * (2 * kPlaneVectors), accumulate || step > 0);
    }
  }
}

// Issues a unit's MMAs.
__device__ __forceinline__ void issue_mmas(Accumulators& acc, const Fragments& fragments,
                                           int first_row, int unit) {
  wgmma_fence();
  if constexpr (C::parts == 2) {
    constexpr int kLow = C::parts - 1;
    // Large products come last, so that what small ones add is not lost.
    multiply<kLow, 0>(acc, fragments, first_row, unit, false);
    multiply<0, kLow>(acc, fragments, first_row, unit, true);
  }
  multiply<0, 0>(acc, fragments, first_row, unit, true);
  wgmma_commit();
}

// Waits for the MMAs. With 3xTF32, adds their accumulators to `totals`, which otherwise are the
// accumulators themselves.
__device__ __forceinline__ void wait_for_mmas(Accumulators& acc, Accumulators& totals) {
  wgmma_wait<0>();
  hold_accumulators(acc);
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int i = 0; i < C::kernel_height; ++i) {
#pragma unroll
      for (int j = 0; j < kAccs; ++j) totals[i][j] += acc[i][j];
    }
  }
}

// --- The workspace -------------------------------------------------------------------------------

// Where a warpgroup's slots begin: [block][warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * C::warpgroups + warpgroup) * (kSlots * 128);
}
// Where a block's sums for the bias begin, behind all slots: [block][channel].
__device__ __forceinline__ long long bias_of(int blocks, int block) {
  return slots_of(blocks, 0) * 4 + static_cast<long long>(block) * kBlockOutputs;
}

// Writes a warpgroup's sums for the bias; four lanes have pixels of one channel.
__device__ __forceinline__ void store_bias(const float (&bias)[2], float* target) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_four_lanes(bias[half]);
    if (thread % 4 == 0) target[thread / 32 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// --- The kernels ---------------------------------------------------------------------------------

// Accumulators since the last flush; for the bias also the total until then.
struct State {
  Accumulators acc, more;  // `more` collects the accumulators of 3xTF32
  float bias[2] = {0.0f, 0.0f};
  float bias_total[2] = {0.0f, 0.0f};
  int first_row = 0;  // first row of a step, in the ring
  int steps = 0;      // since the last flush
  bool flushed = false;

  __device__ Accumulators& totals() { return C::parts == 2 ? more : acc; }

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
      // The next unit is loaded while this one is multiplied. 16-bit words are operands as they
      // are: loading `raw` before the MMAs are issued makes the compiler keep the operands in other
      // registers.
      constexpr bool kLoadFirst = kScalarBytes == 2;
      const bool last = unit == kUnits - 1;
      const int next_row = last ? row + kRowStep : row;
      const int next_unit = last ? 0 : unit + 1;
      if (kLoadFirst) grad.load(raw, next_row, next_unit, !last || more);
      issue_mmas(state.acc, fragments, state.first_row, unit);
      if (!kLoadFirst) grad.load(raw, next_row, next_unit, !last || more);
      if (unit == 0) {
#pragma unroll
        for (int i = 0; i < kNewRows; ++i) {
          const int tap = C::kernel_height - kNewRows + i;
          rows[i].load(image, item, more ? item.input_row(step + 1, tap) : -1);
        }
      }
      wait_for_mmas(state.acc, state.totals());
    }
    // The new rows overwrite those that the step before has multiplied, but not this one.
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

__device__ __forceinline__ void wgrad_few_inputs(const Scalar* grad_output, const Scalar* input,
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

// Reduces the slots of every weight, workers in order, and writes it where the strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int workers) {
  constexpr int kBlockSlots = C::warpgroups * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kOutputBlocks * kBlockSlots; i += step) {
    const float4 total = total_of(workspace + i, kOutputBlocks * kBlockSlots, workers);
    const float values[4] = {total.x, total.y, total.z, total.w};
    const int thread = i % 128;
    const int slot = i / 128 % kSlots;
    const int channel = i / (kSlots * 128) * kOutputs + thread / 32 * 16 + thread % 32 / 4;
    const int row = slot * 4 / kAccs;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = slot * 4 % kAccs * 2 + thread % 4 * 2 + j % 2;
      const int tap = column / C::group_in;
      const int out = channel + j / 2 * 8;
      if (tap >= C::kernel_width || out >= C::group_out) continue;
      grad[weight_offset(out, column % C::group_in, row, tap)] = narrow<Scalar>(values[j]);
    }
  }
}

// Reduces the bias's gradient of every channel, workers in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const float* const acc =
      reinterpret_cast<const float*>(workspace) + bias_of(workers * kOutputBlocks, 0);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < C::group_out; i += step) {
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      total += acc[static_cast<long long>(worker) * (kOutputBlocks * kBlockOutputs) + i];
    }
    bias_grad[i] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(128 * Config::warpgroups, 2 / Config::warpgroups)
    wgrad_few_inputs(const Config::Scalar* grad_output, const Config::Scalar* input,
                     float4* workspace, int workers, int batch) {
  fastconv::hopper::wgrad_few_inputs(grad_output, input, workspace, workers, batch);
}

extern "C" __global__ void __launch_bounds__(256)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad, int workers) {
  fastconv::hopper::reduce(workspace, grad, workers);
  if constexpr (Config::bias) fastconv::hopper::reduce_bias(workspace, bias_grad, workers);
}
