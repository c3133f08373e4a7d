// Depthwise forward convolution and input gradient on tensor cores, from sm_80 on: a kernel row is
// multiplied as a banded Toeplitz matrix. This is what the kernels of both layouts share.
//
// For each row of the kernel, mma.sync adds to 16 rows of 8 neighbouring outputs of a plane:
//
//   out[16 rows][8 columns] += input[16 rows, `row` of the kernel further down][columns] * toeplitz
//   toeplitz[column][output] = weight[row][column - output], or zero
//
// The Toeplitz matrix is the same for all outputs of a plane, so each lane reads its fragment from
// a table of the matrix's diagonals. Columns come in blocks of 16 bytes; registers combine any two
// neighbouring blocks to an input fragment.
//
// A thread block computes a tile of some planes, in strips of 8 rows; a warp multiplies two strips,
// of all columns, at a time.
//
//   input   [part][plane][halo row][column]     table   [part][tap row][diagonal]
//
// float32 is multiplied as 3xTF32, after powers of two have scaled both factors to where two TF32
// parts have all of their bits. Tensor cores truncate as they accumulate, so accumulators are
// flushed to a second level after few MMAs. Zeros of the Toeplitz matrix would spread infinity and
// NaN to neighbouring outputs, so these are multiplied as zeros, and the outputs that they
// contribute to are computed again, one by one.
#pragma once
#include "depthwise/fma/kernel.cuh"
#include "depthwise/plane_rows.cuh"
#include "device/mma.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace depthwise {

using Operand = tensor::OperandOf<Scalar>::type;
constexpr bool k3xTf32 = sizeof(Scalar) == 4;
constexpr int kParts = k3xTf32 ? 2 : 1;

static_assert(C::rows == 8 && C::columns == 8, "rows of a strip, and outputs of an MMA in a row");
static_assert(C::group_in == 1 && Rows::kStep == 1 && Columns::kStep == 1 && Rows::kUnit == 1 &&
                  Columns::kUnit == 1 && Rows::kOver == 1 && Columns::kOver == 1,
              "depthwise, neither strides nor dilation");

// kBlock columns are 16 bytes. One MMA's outputs are kBlocksOn blocks from the next one's. A
// Toeplitz matrix has kToeplitzBlocks blocks of columns, from kShift before the first tap on. An
// MMA multiplies two blocks.
constexpr int kBlock = 16 / static_cast<int>(sizeof(Scalar));
constexpr int kBlocksOn = 8 / kBlock;
constexpr int kToeplitzBlocks = round_up(kShift + 8 + Columns::kTaps - 1, 2 * kBlock) / kBlock;
constexpr int kRowPairs = ceil_div((C::lanes_x - 1) * kBlocksOn + kToeplitzBlocks, 2);
constexpr int kOperandColumns = 2 * kRowPairs * kBlock;
static_assert(kOperandColumns <= C::pitch && C::pitch % kBlock == 0, "rows have room");
static_assert(C::pitch / kBlock % 2 == 1, "8 rows of 16 bytes hit all banks");

constexpr int kThreads = 32 * C::warps;
constexpr int kPlanes = C::slots * C::channels;  // [channel][image]
constexpr int kStrips = C::slots * C::lanes_y;   // strips of a channel
constexpr int kStripPairs = ceil_div(kStrips, 2);
constexpr int kRows = kPlanes * kHaloRows;
constexpr int kPart = kPlanes * kPlane;  // elements
// Marks are words in shared memory: for each row, whether it has infinity or NaN; then for each
// plane, whether it has large numbers; then for each channel, which magnitudes its weights have
// (see Scale).
constexpr int kMagnitudes = 9;
constexpr int kPlaneMarks = kRows;
constexpr int kWeightMarks = kPlaneMarks + kPlanes;
constexpr int kMarks = kWeightMarks + (k3xTf32 ? C::channels * kMagnitudes : 0);

// Diagonals of the Toeplitz matrix, from 7 columns right of an output's first tap to the last
// block's.
constexpr int kDiagonals = 8 + kToeplitzBlocks * kBlock;
constexpr int kTableWords = kParts * C::kernel_height * kDiagonals;  // words of a channel's table

// Returns a weight of the cross-correlation with the input: an input gradient reverses the kernel.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int output, int row, int tap) {
  if (C::transposed) {
    row = C::kernel_height - 1 - row;
    tap = C::kernel_width - 1 - tap;
  }
  return kernel_row(weight, output / C::group_out, output % C::group_out, 0,
                    row)[1ll * tap * C::weight_stride_width];
}

// Powers of two by which a float32 plane and its channel's weights are multiplied, which is exact,
// and by which its accumulators are divided. TF32 has no bits below 2^-136, float32 has some down
// to 2^-149: after a multiplication by 2^13, the two TF32 parts have all bits of any number. All
// weights of a channel are multiplied by it, unless one of them is so large that this might
// overflow. The input is, unless one of its numbers is so large that products, or their sum, might
// overflow; then it is divided by the weights' factor, so that the products do not change.
//
// The magnitude of the largest weight is the three leading bits of its exponent. The last magnitude
// is that of infinity and NaN; next to it, nothing is multiplied by 2^13, so that an infinite
// weight's high part times a low part of the input is finite.
constexpr int kEnlarged = 13;
constexpr int kHuge = kMagnitudes - 2, kInfinite = kMagnitudes - 1;
__host__ __device__ constexpr int bits_of(long long number) {
  return number == 0 ? 0 : 1 + bits_of(number / 2);
}
constexpr int kTermBits = bits_of(1ll * C::kernel_height * C::kernel_width);

__device__ __forceinline__ int magnitude(float number) {
  return tensor::is_finite(number) ? static_cast<int>(__float_as_uint(fabsf(number)) >> 28)
                                   : kInfinite;
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

struct Scale {
  int weights;  // magnitude of the channel's largest weight

  // Reads `marks` as find_magnitudes leaves them.
  __device__ Scale(const unsigned* marks, int channel)
      : weights(k3xTf32 ? static_cast<int>(marks[kWeightMarks + channel * kMagnitudes]) : 0) {}
  __device__ int weight_exponent() const { return weights < kHuge ? kEnlarged : 0; }
  // Numbers below this limit may be multiplied by 2^kEnlarged: neither they nor sums overflow.
  __device__ float limit() const {
    const int weight_end = 32 * (weights + 1) - 127 + weight_exponent();
    const int end = 126 - kTermBits - weight_end;
    return weights == kInfinite ? 0.0f : power_of_two((end < 126 ? end : 126) - kEnlarged);
  }
  __device__ int input_exponent(bool is_large) const {
    return is_large ? -weight_exponent() : kEnlarged;
  }
  __device__ float weight_factor() const { return power_of_two(weight_exponent()); }
  __device__ float input_factor(bool is_large) const {
    return power_of_two(input_exponent(is_large));
  }
  __device__ float inverse(bool is_large) const {
    return k3xTf32 ? power_of_two(-weight_exponent() - input_exponent(is_large)) : 1.0f;
  }
};

// Returns the factor that undoes the scale in a plane's accumulators.
__device__ __forceinline__ float inverse_scale(const unsigned* marks, int plane) {
  return Scale(marks, plane / C::slots).inverse(k3xTf32 && marks[kPlaneMarks + plane] != 0);
}

// Clears the marks of weights' magnitudes.
__device__ __forceinline__ void clear_magnitudes(unsigned* marks) {
  for (int i = kWeightMarks + static_cast<int>(threadIdx.x); i < kMarks; i += kThreads)
    marks[i] = 0;
}
// Replaces each channel's first magnitude mark by the magnitude of its largest weight.
__device__ __forceinline__ void find_magnitudes(unsigned* marks) {
  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= C::channels) return;
  unsigned* const found = marks + kWeightMarks + channel * kMagnitudes;
  unsigned largest = 0;
#pragma unroll
  for (unsigned i = 1; i < kMagnitudes; ++i) {
    if (found[i] != 0) largest = i;
  }
  found[0] = largest;
}

// Fills the tables of the thread block's channels, from `output` on. A word holds the 4 bytes of a
// fragment: lane 4 g + t reads the diagonals of its columns (4 bytes' worth of t), less g, of each
// block. With float32, the first part holds whole numbers until prepare_operands splits them, and
// their magnitudes are marked.
constexpr int kPartWords = C::kernel_height * kDiagonals;
__device__ __forceinline__ void load_tables(unsigned* tables, const Scalar* weight, int output,
                                            volatile unsigned* marks) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < C::channels * kPartWords; i += kThreads) {
    const int channel = i / kPartWords;
    const int row = i / kDiagonals % C::kernel_height;
    const int tap = i % kDiagonals - 7 - kShift;
    const auto at = [&](int tap) {
      return is_tap<Columns>(tap) ? weight_at(weight, output + channel, row, tap) : Scalar{};
    };
    unsigned* const word = tables + channel * kTableWords + i % kPartWords;
    if constexpr (k3xTf32) {
      const float number = widen(at(tap));
      word[0] = __float_as_uint(number);
      marks[kWeightMarks + channel * kMagnitudes + magnitude(number)] = 1;
    } else {
      const Vector<Scalar, 2> pair = {{at(tap), at(tap + 1)}};
      word[0] = reinterpret_cast<const unsigned&>(pair);
    }
  }
}
// Scales the weights and splits them into two TF32 parts.
__device__ __forceinline__ void split_tables(unsigned* tables, const unsigned* marks) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < C::channels * kPartWords; i += kThreads) {
    const int channel = i / kPartWords;
    unsigned* const word = tables + channel * kTableWords + i % kPartWords;
    const float number = __uint_as_float(word[0]) * Scale(marks, channel).weight_factor();
    tensor::split(number, word[0], word[kPartWords]);
  }
}

// Calls `visit` with each block of columns of the tile's rows, which are counted over all planes.
template <class Visit>
__device__ __forceinline__ void for_blocks(Scalar* input, const Visit& visit) {
  constexpr int kVectors = kOperandColumns / kBlock;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    visit(row, input + row * C::pitch + i % kVectors * kBlock);
  }
}
using Block = Vector<Scalar, kBlock>;

// Replaces infinity and NaN in the input by zeros and marks their rows. With float32, scales the
// input and the tables and splits both into two TF32 parts.
__device__ __forceinline__ void prepare_operands(Scalar* input, unsigned* tables,
                                                 unsigned* all_marks) {
  volatile unsigned* const marks = all_marks;
  if constexpr (k3xTf32) {
    find_magnitudes(all_marks);
    __syncthreads();
  }
  for_blocks(input, [&](int row, Scalar* place) {
    const int plane = row / kHaloRows;
    const float limit = k3xTf32 ? Scale(all_marks, plane / C::slots).limit() : 0.0f;
    Block block = *reinterpret_cast<const Block*>(place);
    Acc numbers[kBlock];
    widen_vector(block, numbers);
    bool finite = true;
    bool large = false;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      const bool counts = tensor::is_finite(numbers[k]);
      if (!counts) block.element[k] = Scalar{};
      finite = finite && counts;
      large = large || (counts && fabsf(numbers[k]) >= limit);
    }
    if (!finite) {
      marks[row] = 1;
      *reinterpret_cast<Block*>(place) = block;
    }
    if (k3xTf32 && large) marks[kPlaneMarks + plane] = 1;
  });
  if constexpr (k3xTf32) {
    __syncthreads();
    split_tables(tables, all_marks);
    for_blocks(input, [&](int row, Scalar* place) {
      const int plane = row / kHaloRows;
      const Scale scale(all_marks, plane / C::slots);
      const float factor = scale.input_factor(all_marks[kPlaneMarks + plane] != 0);
      const Block block = *reinterpret_cast<const Block*>(place);
      Vector<unsigned, kBlock> high, low;
#pragma unroll
      for (int k = 0; k < kBlock; ++k) {
        tensor::split(widen(block.element[k]) * factor, high.element[k], low.element[k]);
      }
      *reinterpret_cast<Vector<unsigned, kBlock>*>(place) = high;
      *reinterpret_cast<Vector<unsigned, kBlock>*>(place + kPart) = low;
    });
  }
}

// A strip's image, and its first row in the tile.
struct Strip {
  int slot, row;

  __device__ explicit Strip(int index) : slot(index / C::lanes_y), row(index % C::lanes_y * 8) {}
  // Whether the strip reads a row of a plane marked for infinity or NaN; the same for all lanes.
  __device__ __forceinline__ bool marked(const unsigned* marks, int plane) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < 8 + C::kernel_height - 1; i += 32) {
      const int at = i + static_cast<int>(threadIdx.x) % 32;
      if (at < 8 + C::kernel_height - 1) {
        found = found || marks[plane * kHaloRows + row + at] != 0;
      }
    }
    return __any_sync(~0u, found);
  }
};

// A lane's accumulators of two strips: row g of both, columns 2 t and 2 t + 1 of each 8.
struct MmaAccumulators {
  float acc[C::lanes_x][4] = {};
  float total_acc[k3xTf32 ? C::lanes_x : 1][4] = {};

  __device__ __forceinline__ void flush(int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total_acc[k3xTf32 ? j : 0][i] += acc[j][i];
      acc[j][i] = 0;
    }
  }
  __device__ __forceinline__ float result(int j, int i) const {
    return k3xTf32 ? total_acc[k3xTf32 ? j : 0][i] : acc[j][i];
  }
};

// A lane's fragments of a kernel row's Toeplitz matrix.
struct ToeplitzFragment {
  unsigned part[kParts][kToeplitzBlocks];

  __device__ ToeplitzFragment(const unsigned* table, int row) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int block = 0; block < kToeplitzBlocks; ++block) {
        part[p][block] = table[(p * C::kernel_height + row) * kDiagonals + block * kBlock];
      }
    }
  }
};

using InputFragment = unsigned[kParts][4];

// Pairs of blocks after which accumulators of 3xTF32 are flushed; each pair is three MMAs.
constexpr int kFlushedSteps = 2;

// Multiplies an input fragment by the Toeplitz matrix's pair of blocks number `step`.
__device__ __forceinline__ void add(float (&accumulators)[4], const InputFragment& fragment,
                                    const ToeplitzFragment& toeplitz, int step) {
  const auto mma_parts = [&](int input_part, int toeplitz_part) {
    const unsigned (&blocks)[kToeplitzBlocks] = toeplitz.part[toeplitz_part];
    const unsigned right[2] = {blocks[2 * step], blocks[2 * step + 1]};
    mma(Operand{}, accumulators, fragment[input_part], right);
  };
  if constexpr (k3xTf32) {
    mma_parts(1, 0);
    mma_parts(0, 1);
  }
  mma_parts(0, 0);
}

// Multiplies two strips by all rows of the kernel. `input` is the lane's row of 16 bytes (see
// load_matrices), `table` its first diagonal.
__device__ __forceinline__ void multiply(MmaAccumulators& accumulators, const Scalar* input,
                                         const unsigned* table) {
#pragma unroll 1
  for (int row = 0; row < C::kernel_height; ++row) {
    const ToeplitzFragment toeplitz(table, row);
    InputFragment before;
#pragma unroll
    for (int pair = 0; pair < kRowPairs; ++pair) {
      InputFragment now;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        load_matrices(now[p], input + p * kPart + row * C::pitch + pair * 2 * kBlock);
      }
#pragma unroll
      for (int j = 0; j < C::lanes_x; ++j) {
        // An MMA that begins with an odd block takes the second block of the pair before and the
        // first of this one.
        const bool odd = j * kBlocksOn % 2 == 1;
        const int from_first = 2 * pair - odd - j * kBlocksOn;
        if (from_first < 0 || from_first >= kToeplitzBlocks) continue;
        if (odd) {
          InputFragment straddling;
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            straddling[p][0] = before[p][2];
            straddling[p][1] = before[p][3];
            straddling[p][2] = now[p][0];
            straddling[p][3] = now[p][1];
          }
          add(accumulators.acc[j], straddling, toeplitz, from_first / 2);
        } else {
          add(accumulators.acc[j], now, toeplitz, from_first / 2);
        }
        const bool last = from_first + 2 >= kToeplitzBlocks;
        if (k3xTf32 && (last || from_first / 2 % kFlushedSteps == kFlushedSteps - 1))
          accumulators.flush(j);
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) before[p][i] = now[p][i];
      }
    }
  }
}

// Returns the row of 16 bytes of two strips that a lane passes to load_matrices.
__device__ __forceinline__ const Scalar* lane_row(const Scalar* input, int channel, int pair) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Without a second strip, the first is multiplied twice and the second result dropped.
  const bool second = 2 * pair + 1 < kStrips;
  const Strip strip(2 * pair + (second ? lane / 8 % 2 : 0));
  return input + (channel * C::slots + strip.slot) * kPlane + (strip.row + lane % 8) * C::pitch +
         lane / 16 * kBlock;
}
// Returns the first word of a channel's table that a lane reads.
__device__ __forceinline__ const unsigned* lane_diagonals(const unsigned* tables, int channel) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return tables + channel * kTableWords + 7 + lane % 4 * (4 / static_cast<int>(sizeof(Scalar))) -
         lane / 4;
}

// Computes an output with multiply-adds. `input` returns the number at a row and a column of the
// image; taps outside of the image are left out.
template <class Input>
__device__ __forceinline__ Acc fma_sum(const Input& input, const Scalar* weight, int output, int y,
                                       int x) {
  Acc total_acc = 0;
#pragma unroll 1
  for (int row = 0; row < C::kernel_height; ++row) {
    const int in_y = y + Rows::kOrigin + row;
    if (static_cast<unsigned>(in_y) >= C::in_height) continue;
    Acc acc = 0;
#pragma unroll 1
    for (int tap = 0; tap < C::kernel_width; ++tap) {
      const int in_x = x + Columns::kOrigin + tap;
      if (static_cast<unsigned>(in_x) >= C::in_width) continue;
      acc += Acc(widen(input(in_y, in_x))) * Acc(widen(weight_at(weight, output, row, tap)));
    }
    total_acc += acc;
  }
  return total_acc;
}

// Computes the outputs of a strip again, and writes those that are infinite or NaN. `place` returns
// the target for a row of the strip and a column of the tile; `residual`, if given, returns what to
// add to it.
template <class Input, class Place, class... Residual>
__device__ __noinline__ void rewrite_nonfinite(const Input& input, const Scalar* weight, int output,
                                               Acc bias, int first_row, int first_column,
                                               const Place& place, const Residual&... residual) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < 8 * kTileColumns; i += 32) {
    const int row = i / kTileColumns;
    const int column = i % kTileColumns;
    if (first_column + column >= C::out_width || first_row + row >= C::out_height) continue;
    const Acc acc = fma_sum(input, weight, output, first_row + row, first_column + column);
    if (!tensor::is_finite(acc)) {
      *place(row, column) =
          narrow<Scalar>(Epilogue<C>::activated(acc + bias, residual(row, column)...));
    }
  }
}

}  // namespace depthwise
}  // namespace fastconv
