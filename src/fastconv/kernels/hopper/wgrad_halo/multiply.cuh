// Consumers: warpgroups that multiply, and add their sums to a workspace.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

using Sums = float[C::segments][kSums];
// Of a thread, in groups of four that lie together in the workspace.
constexpr int kSlots = C::segments * kSums / 4;

// 4 columns of grad_output as left operands: two products, each in `parts` parts.
constexpr int kGroupColumns = 4;
constexpr int kGroupProducts = 2;
using Fragments = unsigned[C::parts][kGroupProducts][4];

// Where a thread's rows begin, in bytes of a stage: of two channels, 8 apart, in its phases.
constexpr int kNextHalf = C::grad_channels_last ? 8 * kScalarBytes : 8 * 4 * kRowBytes;
constexpr int kNextPhase = kStageChannels * 4 * kRowBytes;
struct FragmentRows {
  int first;                   // with its swizzle, which is the same for all of them
  int shifts[2][kLanePhases];  // of rows that begin as far beyond it as in global memory
};

// 4 columns of a channel and phase, in pieces as wide as its start allows.
template <class T>
__device__ __forceinline__ Vector<T, kGroupColumns> load_columns(const unsigned char* stage,
                                                                 const FragmentRows& rows, int half,
                                                                 int phase, int column) {
  Vector<T, kGroupColumns> columns;
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      columns.element[i] = *reinterpret_cast<const T*>(stage + rows.first + half * kNextHalf +
                                                       (column + i) * kPixelBytes);
    }
  } else {
    constexpr int kPiece = gcd(C::grad_vector, kGroupColumns);
    using Piece = Vector<T, kPiece>;
    const int at = column * kScalarBytes;
    const unsigned char* const row = stage + (C::grad_boxes ? rows.first ^ at : rows.first + at) +
                                     half * kNextHalf + phase * kNextPhase +
                                     rows.shifts[half][phase];
#pragma unroll
    for (int i = 0; i < kGroupColumns; i += kPiece) {
      const Piece piece = *reinterpret_cast<const Piece*>(row + i * kScalarBytes);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) columns.element[i + j] = piece.element[j];
    }
  }
  return columns;
}

// What a thread knows of its two channels, and finds out about them.
struct Channels {
  float bias[2] = {0.0f, 0.0f};  // sums of what was loaded since the last flush
  float power[2];                // as float16: what numbers are multiplied by
  bool looks = false;            // for numbers that float16 has not all bits of
};

// Of float32, a thread has one phase of two channels, 8 apart. Adds what it loads to their `bias`.
__device__ __forceinline__ void load_rounded(Fragments& fragments, Channels& channels,
                                             const unsigned char* stage, const FragmentRows& rows,
                                             int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto columns = load_columns<float>(stage, rows, half, 0, column);
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      unsigned& target = fragments[0][i / 2][half + i % 2 * 2];
      if constexpr (C::parts == 2) {
        split(columns.element[i], target, fragments[C::parts - 1][i / 2][half + i % 2 * 2]);
      } else {
        target = __float_as_uint(round_factor(columns.element[i]));
      }
    }
    if constexpr (C::bias) {
      channels.bias[half] +=
          columns.element[0] + columns.element[1] + (columns.element[2] + columns.element[3]);
    }
  }
}

// The same as float16, two neighbouring phases.
__device__ __forceinline__ void load_scaled(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto even = load_columns<float>(stage, rows, half, 0, column);
    const auto odd = load_columns<float>(stage, rows, half, kLanePhases - 1, column);
    const float power = channels.power[half];
    if (channels.looks) {
      unsigned least = ~0u;
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        least = min(least, min(magnitude_key(even.element[i]), magnitude_key(odd.element[i])));
      }
      if (least < least_key(power)) ++counters()[half];
    }
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      const float first = even.element[i] * power;
      const float second = odd.element[i] * power;
      const unsigned high = floats_to_halves(first, second);
      const int at = half + i % 2 * 2;
      fragments[0][i / 2][at] = high;
      if constexpr (C::parts == 2) {
        fragments[C::parts - 1][i / 2][at] = low_halves(first, second, high, kLowFactor);
      }
    }
    if constexpr (C::bias) {
      channels.bias[half] +=
          even.element[0] + odd.element[0] + (even.element[1] + odd.element[1]) +
          (even.element[2] + odd.element[2] + (even.element[3] + odd.element[3]));
    }
  }
}
static_assert(kGradGroup == 2 * kGroupColumns, "what is looked at together");

// Of 16-bit types, two neighbouring phases of two channels.
template <class Half>
__device__ __forceinline__ void load_halves(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int k = 0; k < kGroupProducts; ++k) {
      load_transposed(fragments[0][k], stage + rows.first + (column + 2 * k) * kPixelBytes);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto even = load_columns<Half>(stage, rows, half, 0, column);
      const auto odd = load_columns<Half>(stage, rows, half, kLanePhases - 1, column);
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        fragments[0][i / 2][half + i % 2 * 2] =
            even.element[i].bits | static_cast<unsigned>(odd.element[i].bits) << 16;
      }
    }
  }
  if constexpr (C::bias) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float columns[kGroupColumns];
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        const unsigned word = fragments[0][i / 2][half + i % 2 * 2];
        columns[i] = widen(Half{static_cast<unsigned short>(word)}) +
                     widen(Half{static_cast<unsigned short>(word >> 16)});
      }
      channels.bias[half] += columns[0] + columns[1] + (columns[2] + columns[3]);
    }
  }
}

template <class Element>
__device__ __forceinline__ void load_fragments(Fragments& fragments, Channels& channels,
                                               const unsigned char* stage, const FragmentRows& rows,
                                               int column) {
  if constexpr (C::halves) {
    load_scaled(fragments, channels, stage, rows, column);
  } else if constexpr (sizeof(Element) == 4) {
    load_rounded(fragments, channels, stage, rows, column);
  } else {
    load_halves<Element>(fragments, channels, stage, rows, column);
  }
}

// Where in a stage a thread's fragments begin; `channel` is the warp's first.
__device__ __forceinline__ int first_fragment(int channel, int lane) {
  if constexpr (!C::grad_channels_last) {
    const int row = stage_row(channel + lane / 4, lane % 4 * kLanePhases);
    return row * kRowBytes + swizzle_of(row);
  } else if constexpr (kScalarBytes == 4) {
    return lane % 4 * kPhaseBytes + (channel + lane / 4) * kScalarBytes;
  } else {
    // load_transposed wants of a lane a row of one of four matrices, phases by channels: of 8
    // channels and of the next 8, in a column and in the next.
    return lane % 8 * kPhaseBytes + lane / 16 * kPixelBytes +
           (channel + lane / 8 % 2 * 8) * kScalarBytes;
  }
}

__device__ __forceinline__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

// A warpgroup that multiplies. Sums take nearly all registers: what is easily found again is not
// kept.
struct Consumer {
  int fragment;     // where in a stage the thread's first fragment begins, in bytes
  int segment;      // first, from the first of the block's first plane
  unsigned origin;  // where in grad_output its first row begins, in elements: the last bits
  bool accumulate = false;
  Channels channels;
  float bias_total[2] = {0.0f, 0.0f};  // until the last flush
  Ring<C::input_stages> row{0};        // the first row of a step
  Ring<C::grad_stages> grad{0};

  __device__ Consumer(const Grad& grad_output, const Tables& tables, const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int warpgroup = thread / 128;
    const int channel = (C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 % 4 * 16;
    fragment = first_fragment(channel, thread % 32);
    segment = tile.segment - tile.plane() * C::kernel_rows +
              (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const unsigned first = tile.group * C::group_out + tile.output + channel + thread % 32 / 4;
    origin =
        misalignment(grad_output) + first * kOutChannel + phase_distance(thread % 4 * kLanePhases);
    if constexpr (C::halves) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_group = tile.channel(channel + thread % 32 / 4 + 8 * half);
        channels.power[half] =
            load_or_zero(tables.powers() + kInputs + tile.group * C::group_out + of_group,
                         of_group < C::group_out);
      }
    }
  }

  __device__ __forceinline__ void flush_bias() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias_total[half] += channels.bias[half];
      channels.bias[half] = 0.0f;
    }
  }

  // Whether it looks for numbers that float16 has not all bits of, in a step of this output row.
  // Consumers of the same output channels see the same numbers, and take turns: those of a launch,
  // for who adds up its sums wants to know of all of them.
  __device__ static bool has_turn(const Work& work, int output_row) {
    const int before = work.tile().number();
    const int in_launch = static_cast<int>(blockIdx.x) % work.tiles;
    const int turns = min(kSameOutputs, work.tiles - in_launch + before) * kSlices;
    const int turn = before * kSlices + static_cast<int>(threadIdx.x) / 128 % kSlices;
    return before <= in_launch && output_row % turns == turn;
  }

  // Tells what it has found of its channels.
  __device__ __forceinline__ void count_lossy(const Tables& tables, const Tile& tile) const {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int channel_group = C::channel_groups == 2 ? thread / 128 : 0;
    const int first = channel_group * kOutputs + thread / 32 % 4 * 16 + thread % 32 / 4;
    unsigned* const counts = tables.lossy() + kInputs + tile.group * C::group_out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // What is loaded of channels that do not exist is nobody's.
      const int channel = tile.channel(first + 8 * half);
      const unsigned lossy = counters()[half];
      if (channel < C::group_out && lossy > 0) add_to_memory(counts + channel, lossy);
    }
  }

  // Elements of grad_output from phase 0 to another one.
  __device__ static unsigned phase_distance(int phase) {
    return static_cast<unsigned>(phase % C::phase_images) * kOutImage +
           static_cast<unsigned>(phase / C::phase_images) * (kSteps * kRowStep) * C::out_width;
  }

  // The thread's rows in the stages of a step.
  __device__ FragmentRows fragment_rows(int image, int output_row) const {
    const unsigned moved =
        static_cast<unsigned>(image) * kOutImage + static_cast<unsigned>(output_row) * C::out_width;
    FragmentRows rows;
    rows.first = fragment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kLanePhases; ++i) {
        const unsigned element =
            origin + moved + half * 8u * kOutChannel + (i > 0 ? phase_distance(1) : 0u);
        rows.shifts[half][i] = kShifted ? static_cast<int>(element % kVector) * kScalarBytes : 0;
      }
    }
    return rows;
  }

  // The ring of input rows. Along the sum comes the neighbouring column, across it the next octet,
  // or if there is but one, the next tap, of several.
  __device__ static Matrix ring() {
    constexpr bool kNextTap = C::product_octets == 1 && C::product_taps > 1;
    constexpr int kAlong = C::stride_width * kColumnVectors * 16;
    constexpr int kAcross = 128 * (kNextTap ? C::dilation_width : 1);
    static_assert(max_of(kAlong, kAcross) < 1 << 18, "what a matrix has room for");
    return matrix(shared_memory() + kInputRing, kAlong, kAcross);
  }

  // Waits for rows of this step.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void wait_for_rows() const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const Ring<C::input_stages> at = row + i;
      barrier_wait(&barriers().input_full[at.stage()], at.parity());
    }
  }

  // Gives back the step's first rows.
  __device__ __forceinline__ void release_rows(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (is_first_lane()) barrier_arrive(&barriers().input_empty[row.stage()]);
      row.advance();
    }
  }

  // Where each segment's products begin in the rows of this step: the lower half of a matrix, the
  // only one that differs.
  __device__ __forceinline__ void find_segments(unsigned (&starts)[C::segments],
                                                int early_columns) const {
    // Known at compile time where a warpgroup's first segment is a plane's first.
    constexpr bool kWholePlanes = C::segments % C::kernel_rows == 0;
    const int column = kShift + (C::lead - early_columns) * C::stride_width;
    const unsigned first = static_cast<unsigned>(ring()) + column * kColumnVectors +
                           (kWholePlanes ? segment / C::kernel_rows * kPlaneVectors : 0);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      const int at = kWholePlanes ? i : segment + i;
      starts[i] = first + (row + at % C::kernel_rows).stage() * kRowVectors +
                  at / C::kernel_rows * kPlaneVectors;
    }
  }

  // The products of 4 columns, `column` after where the segments start.
  template <int kLeftPart, int kRightPart>
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments,
                                           const unsigned (&starts)[C::segments], int column,
                                           bool accumulate_first) const {
#pragma unroll
    for (int k = 0; k < kGroupProducts; ++k) {
#pragma unroll
      for (int i = 0; i < C::segments; ++i) {
        const int offset =
            (column + 2 * k) * (C::stride_width * kColumnVectors) + kRightPart * kPartVectors;
        const Matrix right = ring() >> 32 << 32 | (starts[i] + offset);
        wgmma<kColumns>(Factor{}, sums[i], fragments[kLeftPart][k], right,
                        k > 0 || accumulate_first);
      }
    }
  }

  // The products of a stage. While one group of them is computed, the next one's left operands are
  // loaded to other registers.
  __device__ __forceinline__ void multiply_stage(Sums& sums, Fragments (&fragments)[2],
                                                 unsigned (&starts)[C::segments],
                                                 const unsigned char* stage,
                                                 const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        load_fragments<Scalar>(fragments[group], channels, stage, rows,
                               column + group * kGroupColumns);
        wgmma_fence();
        multiply<0, 0>(sums, fragments[group], starts, group * kGroupColumns,
                       group > 0 || accumulate);
        wgmma_commit();
        wgmma_wait<1>();
      }
      accumulate = true;
      move_on(starts);
    }
  }

  // The same in two levels, for numbers in two parts. Large products come last: what small ones add
  // is not lost.
  __device__ __forceinline__ void multiply_stage_split(Sums& sums, Sums& totals,
                                                       Fragments (&fragments)[2],
                                                       unsigned (&starts)[C::segments],
                                                       const unsigned char* stage,
                                                       const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        constexpr int kLow = C::parts - 1;
        load_fragments<Scalar>(fragments[group], channels, stage, rows,
                               column + group * kGroupColumns);
        wgmma_fence();
        multiply<kLow, 0>(sums, fragments[group], starts, group * kGroupColumns, group > 0);
        multiply<0, kLow>(sums, fragments[group], starts, group * kGroupColumns, true);
        if constexpr (!C::halves) {
          multiply<0, 0>(sums, fragments[group], starts, group * kGroupColumns, true);
        }
        wgmma_commit();
      }
      if constexpr (C::halves) {
        // Low parts are enlarged, so these products have sums of their own.
        add_to_totals(totals, sums, 1.0f / kLowFactor);
        wgmma_fence();
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          multiply<0, 0>(sums, fragments[group], starts, group * kGroupColumns, group > 0);
        }
        wgmma_commit();
      }
      add_to_totals(totals, sums, 1.0f);
      move_on(starts);
    }
  }

  // Waits for the products, and adds their sums, times `factor`.
  __device__ static __forceinline__ void add_to_totals(Sums& totals, Sums& sums, float factor) {
    wgmma_wait<0>();
    hold_sums(sums);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        totals[i][j] =
            factor == 1.0f ? totals[i][j] + sums[i][j] : fmaf(sums[i][j], factor, totals[i][j]);
      }
    }
  }

  __device__ __forceinline__ void move_on(unsigned (&starts)[C::segments]) const {
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      starts[i] += kBodyColumns * C::stride_width * kColumnVectors;
    }
  }

  // The products of a step.
  __device__ __forceinline__ void compute(Sums& sums, Sums& totals, int image, int output_row,
                                          int of_class, int columns) {
    unsigned starts[C::segments];
    Fragments fragments[2];
    find_segments(starts, early(output_row, of_class));
    const FragmentRows rows = fragment_rows(image, output_row);
#pragma unroll 1
    for (int column = 0; column < columns; column += C::stage_columns) {
      // Known at compile time where all stages are whole.
      const int stage_columns = kRowColumns % C::stage_columns == 0
                                    ? C::stage_columns
                                    : min(C::stage_columns, columns - column);
      barrier_wait(&barriers().grad_full[grad.stage()], grad.parity());
      const unsigned char* const stage = shared_memory() + kGradRing + grad.stage() * kStageBytes;
      if constexpr (C::parts == 2) {
        multiply_stage_split(sums, totals, fragments, starts, stage, rows, stage_columns);
      } else {
        multiply_stage(sums, fragments, starts, stage, rows, stage_columns);
      }
      __syncwarp();
      if (is_first_lane()) barrier_arrive(&barriers().grad_empty[grad.stage()]);
      grad.advance();
    }
    wgmma_wait<0>();
  }
};

// Where the sums for the bias are in the workspace, behind all slots: [block][warpgroup][channel].
__device__ __forceinline__ long long bias_slots(int blocks, int block, int warpgroup) {
  return static_cast<long long>(blocks) * (kConsumers * kSlots * 128 * 4) +
         (block * kConsumers + warpgroup) * kOutputs;
}

// Writes a consumer's sums for the bias; four lanes have the phases of a channel.
__device__ __forceinline__ void store_bias(const Consumer& consumer, float4* workspace,
                                           const Work& work) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float* const target = reinterpret_cast<float*>(workspace) +
                        bias_slots(work.tiles * work.workers, blockIdx.x, thread / 128);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_four_lanes(consumer.bias_total[half] + consumer.channels.bias[half]);
    if (thread % 4 == 0) target[thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// A block's slots: [warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * kConsumers + warpgroup) * (kSlots * 128);
}

__device__ __forceinline__ void consume(const Grad& grad_output, const Tables& tables,
                                        const Work& work) {
  Share share = work.share();
  Consumer consumer(grad_output, tables, work.tile());
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float4* const slots = tables.workspace() + slots_of(blockIdx.x, thread / 128) + thread % 128;
  Sums sums, more;
  // Where numbers are in two parts, `more` collects the sums.
  Sums& totals = C::parts == 2 ? more : sums;
  clear(totals);
  if constexpr (C::halves) counters()[0] = counters()[1] = 0u;
  int steps = 0;  // since the last flush
  bool flushed = false;
  while (share.more()) {
    const Run run = share.next();
    consumer.wait_for_rows<0, kOldRows>();
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
      consumer.wait_for_rows<kOldRows, C::kernel_rows>();
      if constexpr (C::halves) {
        consumer.channels.looks = Consumer::has_turn(work, run.output_row(step));
      }
      consumer.compute(sums, totals, run.image, run.output_row(step), work.tile().of_class(),
                       columns_of(run.strip));
      consumer.release_rows(kNewRows);
      if (++steps == C::flush_steps) {
        flush(totals, slots, !flushed);
        flushed = true;
        steps = 0;
        consumer.accumulate = false;
        consumer.flush_bias();
        if constexpr (C::parts == 2) clear(totals);
      }
    }
    consumer.release_rows(kOldRows);
  }
  if (steps > 0 || !flushed) flush(totals, slots, !flushed);
  if constexpr (C::bias) store_bias(consumer, tables.workspace(), work);
  if constexpr (C::halves) consumer.count_lossy(tables, work.tile());
}

}  // namespace hopper
}  // namespace fastconv
