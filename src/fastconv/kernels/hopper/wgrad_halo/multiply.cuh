// Consumer warpgroups: multiply, and add their accumulators to a workspace.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

using Accumulators = float[C::segments][kAccs];
// Slots of a thread: four accumulators that lie together in the workspace.
constexpr int kSlots = C::segments * kAccs / 4;

// 4 columns of grad_output as left operands: two MMAs, each in `parts` parts.
constexpr int kGroupColumns = 4;
constexpr int kGroupMmas = 2;
using Fragments = unsigned[C::parts][kGroupMmas][4];

// Where a thread's rows begin, in bytes of a stage: those of two channels, 8 apart, for its
// members.
constexpr int kNextHalf = C::grad_channels_last ? 8 * kScalarBytes : 8 * 4 * kRowBytes;
constexpr int kNextMember = kStageChannels * 4 * kRowBytes;
struct FragmentRows {
  int first;  // with its swizzle, which is the same for all of the thread's rows
  // Byte offsets of rows that begin as far beyond a multiple of 16 bytes as in global memory.
  int shifts[2][kLaneMembers];
};

// Loads 4 columns of a channel and member, in pieces as wide as the alignment of its row allows.
template <class T>
__device__ __forceinline__ Vector<T, kGroupColumns> load_columns(const unsigned char* stage,
                                                                 const FragmentRows& rows, int half,
                                                                 int member, int column) {
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
                                     half * kNextHalf + member * kNextMember +
                                     rows.shifts[half][member];
#pragma unroll
    for (int i = 0; i < kGroupColumns; i += kPiece) {
      const Piece piece = *reinterpret_cast<const Piece*>(row + i * kScalarBytes);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) columns.element[i + j] = piece.element[j];
    }
  }
  return columns;
}

// The state of a thread's two channels.
struct Channels {
  float bias[2] = {0.0f, 0.0f};  // sums of what was loaded since the last flush
  float power[2];                // scaled fp16: what numbers are multiplied by
  bool counts_lossy = false;     // whether to count numbers that are subnormal in float16
};

// Loads the fragments of float32: a thread has one member of two channels, 8 apart. Adds what it
// loads to their `bias`.
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

// Loads the fragments of scaled fp16: a thread has two consecutive members of two channels.
__device__ __forceinline__ void load_scaled(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto even = load_columns<float>(stage, rows, half, 0, column);
    const auto odd = load_columns<float>(stage, rows, half, kLaneMembers - 1, column);
    const float power = channels.power[half];
    if (channels.counts_lossy) {
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
static_assert(kGradGroup == 2 * kGroupColumns, "numbers that are checked together");

// Loads the fragments of a 16-bit type: a thread has two consecutive members of two channels.
template <class Half>
__device__ __forceinline__ void load_16_bit(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int k = 0; k < kGroupMmas; ++k) {
      load_transposed(fragments[0][k], stage + rows.first + (column + 2 * k) * kPixelBytes);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto even = load_columns<Half>(stage, rows, half, 0, column);
      const auto odd = load_columns<Half>(stage, rows, half, kLaneMembers - 1, column);
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
  if constexpr (C::scaled_fp16) {
    load_scaled(fragments, channels, stage, rows, column);
  } else if constexpr (sizeof(Element) == 4) {
    load_rounded(fragments, channels, stage, rows, column);
  } else {
    load_16_bit<Element>(fragments, channels, stage, rows, column);
  }
}

// The byte offset of a thread's first fragment in a stage; `channel` is the warp's first.
__device__ __forceinline__ int first_fragment(int channel, int lane) {
  if constexpr (!C::grad_channels_last) {
    const int row = stage_row(channel + lane / 4, lane % 4 * kLaneMembers);
    return row * kRowBytes + swizzle_of(row);
  } else if constexpr (kScalarBytes == 4) {
    return lane % 4 * kMemberBytes + (channel + lane / 4) * kScalarBytes;
  } else {
    // load_transposed takes from each lane the address of a row of one of four matrices, members by
    // channels: for 8 channels and the next 8, in a column and in the next.
    return lane % 8 * kMemberBytes + lane / 16 * kPixelBytes +
           (channel + lane / 8 % 2 * 8) * kScalarBytes;
  }
}

__device__ __forceinline__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

// A consumer warpgroup. Accumulators take nearly all registers, so values that are easily
// recomputed are not kept.
struct Consumer {
  int fragment;  // byte offset of the thread's first fragment in a stage
  int segment;   // first segment, counted from the first of the block's first plane
  // Offset of its first row in grad_output, in elements: only the lowest bits matter.
  unsigned origin;
  bool accumulate = false;
  Channels channels;
  float bias_total[2] = {0.0f, 0.0f};  // sums until the last flush
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
    origin = misalignment(grad_output) + first * kOutChannel;
    if constexpr (!Depth::exists) origin += member_distance(thread % 4 * kLaneMembers);
    if constexpr (C::scaled_fp16) {
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

  // Whether this consumer counts subnormal numbers in a step of this output row. Consumers of the
  // same output channels load the same numbers, so they take turns. Only those of one launch do:
  // its reduction needs a complete count.
  __device__ static bool has_turn(const Partition& partition, int output_row) {
    const int before = partition.tile().number();
    const int in_launch = static_cast<int>(blockIdx.x) % partition.tiles;
    const int turns = min(kSameOutputs, partition.tiles - in_launch + before) * kSlices;
    const int turn = before * kSlices + static_cast<int>(threadIdx.x) / 128 % kSlices;
    return before <= in_launch && output_row % turns == turn;
  }

  // Adds the thread's counts to those of its channels.
  __device__ __forceinline__ void count_lossy(const Tables& tables, const Tile& tile) const {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int channel_group = C::channel_groups == 2 ? thread / 128 : 0;
    const int first = channel_group * kOutputs + thread / 32 % 4 * 16 + thread % 32 / 4;
    unsigned* const counts = tables.lossy() + kInputs + tile.group * C::group_out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Channels that do not exist have no count.
      const int channel = tile.channel(first + 8 * half);
      const unsigned lossy = counters()[half];
      if (channel < C::group_out && lossy > 0) add_to_memory(counts + channel, lossy);
    }
  }

  // Elements of grad_output from member 0 to another member.
  __device__ static unsigned member_distance(int member) {
    return static_cast<unsigned>(member % C::interleaved_images) * kOutImage +
           static_cast<unsigned>(member / C::interleaved_images) * (kSteps * kRowStep) *
               C::out_width;
  }

  // Where the i-th of the thread's members lies in grad_output, if images are planes of volumes:
  // their distances are not all alike.
  __device__ static unsigned of_volumes(int image, int i) {
    const int member = static_cast<int>(threadIdx.x) % 4 * kLaneMembers + i;
    return grad_image<unsigned>(image + member % C::interleaved_images) +
           static_cast<unsigned>(member / C::interleaved_images) * (kSteps * kRowStep) *
               C::out_width;
  }

  // The thread's rows in the stages of a step.
  __device__ FragmentRows fragment_rows(int image, int output_row) const {
    const unsigned moved = (Depth::exists ? 0u : static_cast<unsigned>(image) * kOutImage) +
                           static_cast<unsigned>(output_row) * C::out_width;
    FragmentRows rows;
    rows.first = fragment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kLaneMembers; ++i) {
        const unsigned element = origin + moved + half * 8u * kOutChannel +
                                 (Depth::exists ? of_volumes(image, i)
                                  : i > 0       ? member_distance(1)
                                                : 0u);
        rows.shifts[half][i] = kShifted ? static_cast<int>(element % kVector) * kScalarBytes : 0;
      }
    }
    return rows;
  }

  // The descriptor of the ring of input rows. Along K comes the neighbouring column; along N the
  // next octet, or the next tap if there is only one octet.
  __device__ static Matrix ring() {
    constexpr bool kNextTap = C::mma_octets == 1 && C::mma_taps > 1;
    constexpr int kAlong = C::stride_width * kColumnVectors * 16;
    constexpr int kAcross = 128 * (kNextTap ? C::dilation_width : 1);
    static_assert(max_of(kAlong, kAcross) < 1 << 18, "offsets fit a matrix descriptor");
    return matrix(shared_memory() + kInputRing, kAlong, kAcross);
  }

  // Waits for input rows of this step.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void wait_for_rows() const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const Ring<C::input_stages> at = row + i;
      barrier_wait(&barriers().input_full[at.stage()], at.parity());
    }
  }

  // Releases the step's first input rows.
  __device__ __forceinline__ void release_rows(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (is_first_lane()) barrier_arrive(&barriers().input_empty[row.stage()]);
      row.advance();
    }
  }

  // Where each segment begins in the rows of this step: the lower 32 bits of its matrix descriptor,
  // the only ones that differ.
  __device__ __forceinline__ void find_segments(unsigned (&starts)[C::segments],
                                                int early_columns) const {
    // The plane is a compile-time constant where a warpgroup's first segment is a plane's first.
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

  // Issues the MMAs of 4 columns, `column` columns after the starts of the segments.
  template <int kLeftPart, int kRightPart>
  __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& fragments,
                                           const unsigned (&starts)[C::segments], int column,
                                           bool accumulate_first) const {
#pragma unroll
    for (int k = 0; k < kGroupMmas; ++k) {
#pragma unroll
      for (int i = 0; i < C::segments; ++i) {
        const int offset =
            (column + 2 * k) * (C::stride_width * kColumnVectors) + kRightPart * kPartVectors;
        const Matrix right = ring() >> 32 << 32 | (starts[i] + offset);
        wgmma<kColumns>(Factor{}, acc[i], fragments[kLeftPart][k], right,
                        k > 0 || accumulate_first);
      }
    }
  }

  // Multiplies a stage. While one group of MMAs runs, the next group's left operands are loaded to
  // other registers.
  __device__ __forceinline__ void multiply_stage(Accumulators& acc, Fragments (&fragments)[2],
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
        multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns,
                       group > 0 || accumulate);
        wgmma_commit();
        wgmma_wait<1>();
      }
      accumulate = true;
      move_on(starts);
    }
  }

  // Multiplies a stage of numbers in two parts, whose accumulators are added to totals. Large
  // products come last, so that what small ones add is not lost.
  __device__ __forceinline__ void multiply_stage_split(Accumulators& acc, Accumulators& totals,
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
        multiply<kLow, 0>(acc, fragments[group], starts, group * kGroupColumns, group > 0);
        multiply<0, kLow>(acc, fragments[group], starts, group * kGroupColumns, true);
        if constexpr (!C::scaled_fp16) {
          multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns, true);
        }
        wgmma_commit();
      }
      if constexpr (C::scaled_fp16) {
        // Low parts are enlarged, so their products are accumulated separately.
        add_to_totals(totals, acc, 1.0f / kLowFactor);
        wgmma_fence();
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns, group > 0);
        }
        wgmma_commit();
      }
      add_to_totals(totals, acc, 1.0f);
      move_on(starts);
    }
  }

  // Waits for the MMAs, and adds their accumulators, times `factor`, to the totals.
  __device__ static __forceinline__ void add_to_totals(Accumulators& totals, Accumulators& acc,
                                                       float factor) {
    wgmma_wait<0>();
    hold_accumulators(acc);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
#pragma unroll
      for (int j = 0; j < kAccs; ++j) {
        totals[i][j] =
            factor == 1.0f ? totals[i][j] + acc[i][j] : fmaf(acc[i][j], factor, totals[i][j]);
      }
    }
  }

  __device__ __forceinline__ void move_on(unsigned (&starts)[C::segments]) const {
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      starts[i] += kBodyColumns * C::stride_width * kColumnVectors;
    }
  }

  // Multiplies a step.
  __device__ __forceinline__ void compute(Accumulators& acc, Accumulators& totals, int image,
                                          int output_row, int of_class, int columns) {
    unsigned starts[C::segments];
    Fragments fragments[2];
    find_segments(starts, early(output_row, of_class));
    const FragmentRows rows = fragment_rows(image, output_row);
#pragma unroll 1
    for (int column = 0; column < columns; column += C::stage_columns) {
      // The width is a compile-time constant where all stages are whole.
      const int stage_columns = kRowColumns % C::stage_columns == 0
                                    ? C::stage_columns
                                    : min(C::stage_columns, columns - column);
      barrier_wait(&barriers().grad_full[grad.stage()], grad.parity());
      const unsigned char* const stage = shared_memory() + kGradRing + grad.stage() * kStageBytes;
      if constexpr (C::parts == 2) {
        multiply_stage_split(acc, totals, fragments, starts, stage, rows, stage_columns);
      } else {
        multiply_stage(acc, fragments, starts, stage, rows, stage_columns);
      }
      __syncwarp();
      if (is_first_lane()) barrier_arrive(&barriers().grad_empty[grad.stage()]);
      grad.advance();
    }
    wgmma_wait<0>();
  }
};

// Where the bias's sums begin in the workspace, behind all slots: [block][warpgroup][channel].
__device__ __forceinline__ long long bias_slots(int blocks, int block, int warpgroup) {
  return static_cast<long long>(blocks) * (kConsumers * kSlots * 128 * 4) +
         (block * kConsumers + warpgroup) * kOutputs;
}

// Writes a consumer's sums for the bias; four lanes have the members of a channel.
__device__ __forceinline__ void store_bias(const Consumer& consumer, float4* workspace,
                                           const Partition& partition) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float* const target = reinterpret_cast<float*>(workspace) +
                        bias_slots(partition.tiles * partition.workers, blockIdx.x, thread / 128);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_four_lanes(consumer.bias_total[half] + consumer.channels.bias[half]);
    if (thread % 4 == 0) target[thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// Where a warpgroup's slots begin: [block][warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * kConsumers + warpgroup) * (kSlots * 128);
}

__device__ __forceinline__ void consume(const Grad& grad_output, const Tables& tables,
                                        const Partition& partition) {
  Share share = partition.share();
  Consumer consumer(grad_output, tables, partition.tile());
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float4* const slots = tables.workspace() + slots_of(blockIdx.x, thread / 128) + thread % 128;
  Accumulators acc, more;
  // With numbers in two parts, `more` collects the accumulators.
  Accumulators& totals = C::parts == 2 ? more : acc;
  clear(totals);
  if constexpr (C::scaled_fp16) counters()[0] = counters()[1] = 0u;
  int steps = 0;  // since the last flush
  bool flushed = false;
  while (share.more()) {
    const Run run = share.next();
    consumer.wait_for_rows<0, kOldRows>();
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
      consumer.wait_for_rows<kOldRows, C::kernel_rows>();
      if constexpr (C::scaled_fp16) {
        consumer.channels.counts_lossy = Consumer::has_turn(partition, run.output_row(step));
      }
      consumer.compute(acc, totals, run.image, run.output_row(step), partition.tile().of_class(),
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
  if constexpr (C::bias) store_bias(consumer, tables.workspace(), partition);
  if constexpr (C::scaled_fp16) consumer.count_lossy(tables, partition.tile());
}

}  // namespace hopper
}  // namespace fastconv
