// Depthwise convolutions, and their input gradients, on tensor cores, from sm_80 on: a row of taps
// is a banded matrix. What kernels of both layouts have in common.
//
// Of a plane, 8 neighbours in each of 16 rows are outputs of
//
//   out[16 rows][8 columns] += input[16 rows, `row` of the kernel further down][columns] * band
//   band[column][output] = weight[row][column - output], or zero
//
// for each row of the kernel. The band is the same for all outputs of a plane, so that what each
// lane multiplies is read from a table of all its diagonals. Columns come in blocks of 16 bytes: of
// any two neighbouring blocks, an operand is made in registers.
//
// A block has a tile of some planes, in strips of 8 rows; a warp has two strips, of all columns, at
// a time.
//
//   input   [part][plane][halo row][column]     table   [part][tap row][diagonal]
//
// float32 is split in two parts of TF32's precision, of which three products are added, after
// powers of two have brought both factors to where TF32 has all of their bits. As tensor cores cut
// sums off, these are flushed to totals after few products. As zeros of the band would spread
// infinity and NaN to neighbouring outputs, these are multiplied as zeros, and the outputs that
// they have a part in are computed again, one by one.
#pragma once
#include "depthwise/fma/kernel.cuh"
#include "depthwise/plane_rows.cuh"
#include "device/mma.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace depthwise {

using Operand = tensor::OperandOf<Scalar>::type;
constexpr bool kSplit = sizeof(Scalar) == 4;
constexpr int kParts = kSplit ? 2 : 1;

static_assert(C::rows == 8 && C::columns == 8, "strips of rows, and outputs of a product");
static_assert(C::group_in == 1 && Rows::kStep == 1 && Columns::kStep == 1 && Rows::kUnit == 1 &&
                  Columns::kUnit == 1 && Rows::kOver == 1 && Columns::kOver == 1,
              "depthwise, neither strides nor dilation");

// Blocks of columns: of a row of 16 bytes; from one product's outputs to the next one's; and of a
// band, which begins kShift columns before the first tap. They are multiplied in twos.
constexpr int kBlock = 16 / static_cast<int>(sizeof(Scalar));
constexpr int kBlocksOn = 8 / kBlock;
constexpr int kBandBlocks = round_up(kShift + 8 + Columns::kTaps - 1, 2 * kBlock) / kBlock;
constexpr int kRowPairs = ceil_div((C::lanes_x - 1) * kBlocksOn + kBandBlocks, 2);
constexpr int kBandColumns = 2 * kRowPairs * kBlock;
static_assert(kBandColumns <= C::pitch && C::pitch % kBlock == 0, "rows have room");
static_assert(C::pitch / kBlock % 2 == 1, "8 rows of 16 bytes hit all banks");

constexpr int kThreads = 32 * C::warps;
constexpr int kPlanes = C::slots * C::channels;  // of `slots` images' channels, by channel
constexpr int kStrips = C::slots * C::lanes_y;   // of a channel
constexpr int kStripPairs = ceil_div(kStrips, 2);
constexpr int kRows = kPlanes * kHaloRows;
constexpr int kPart = kPlanes * kPlane;  // elements
// Of rows with infinity or NaN; of planes with large numbers, and of channels' weights, see Scale.
constexpr int kMagnitudes = 9;
constexpr int kPlaneMarks = kRows;
constexpr int kWeightMarks = kPlaneMarks + kPlanes;
constexpr int kMarks = kWeightMarks + (kSplit ? C::channels * kMagnitudes : 0);

// Diagonals: from 7 columns to the right of an output's first tap to those of the last block.
constexpr int kDiagonals = 8 + kBandBlocks * kBlock;
constexpr int kTableWords = kParts * C::kernel_height * kDiagonals;  // of a channel

// A weight, as it is correlated with the input.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int output, int row, int tap) {
  if (C::transposed) {
    row = C::kernel_height - 1 - row;
    tap = C::kernel_width - 1 - tap;
  }
  return kernel_row(weight, output / C::group_out, output % C::group_out, 0,
                    row)[1ll * tap * C::weight_stride_width];
}

// Powers of two that a float32 plane and its channel's weights are multiplied by, which is exact,
// and its sums are divided by. TF32 has no bits below 2^-136, float32 has some down to 2^-149: of
// numbers that are multiplied by 2^13, both parts have all bits, however small they are. So all
// weights are, unless one of them is so large that this might overflow. The input is, unless one of
// its numbers is so large that products, or a sum of them, might overflow; then it is divided by
// what weights are multiplied by, so that products are what they are without.
//
// How large the largest weight is, is known by the three leading bits of its exponent. The last
// magnitude is that of infinity and NaN, beside which nothing is multiplied: an infinite weight's
// high part times a low part of the input is to be finite.
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
  int weights;  // magnitude of a channel's largest

  // `marks` are as find_magnitudes leaves them.
  __device__ Scale(const unsigned* marks, int channel)
      : weights(kSplit ? static_cast<int>(marks[kWeightMarks + channel * kMagnitudes]) : 0) {}
  __device__ int weight_exponent() const { return weights < kHuge ? kEnlarged : 0; }
  // What is smaller may be multiplied by 2^kEnlarged: neither overflows it, nor do sums.
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
    return kSplit ? power_of_two(-weight_exponent() - input_exponent(is_large)) : 1.0f;
  }
};

// The factor of a plane's sums.
__device__ __forceinline__ float inverse_scale(const unsigned* marks, int plane) {
  return Scale(marks, plane / C::slots).inverse(kSplit && marks[kPlaneMarks + plane] != 0);
}

// Before weights are marked.
__device__ __forceinline__ void clear_magnitudes(unsigned* marks) {
  for (int i = kWeightMarks + static_cast<int>(threadIdx.x); i < kMarks; i += kThreads)
    marks[i] = 0;
}
// Writes the magnitude of a channel's largest weight in the place of its first mark.
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

// Tables of a block's channels, from `output` on. Lane 4 g + t multiplies diagonals 4 bytes' worth
// of t, less g, of each block. Of float32, the first part has whole numbers until prepare splits
// them, and magnitudes are marked.
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
    if constexpr (kSplit) {
      const float number = widen(at(tap));
      word[0] = __float_as_uint(number);
      marks[kWeightMarks + channel * kMagnitudes + magnitude(number)] = 1;
    } else {
      const Vector<Scalar, 2> pair = {{at(tap), at(tap + 1)}};
      word[0] = reinterpret_cast<const unsigned&>(pair);
    }
  }
}
__device__ __forceinline__ void split_tables(unsigned* tables, const unsigned* marks) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < C::channels * kPartWords; i += kThreads) {
    const int channel = i / kPartWords;
    unsigned* const word = tables + channel * kTableWords + i % kPartWords;
    const float number = __uint_as_float(word[0]) * Scale(marks, channel).weight_factor();
    tensor::split(number, word[0], word[kPartWords]);
  }
}

// Calls `visit` with each vector of the tile's rows, counted over all planes.
template <class Visit>
__device__ __forceinline__ void for_blocks(Scalar* input, const Visit& visit) {
  constexpr int kVectors = kBandColumns / kBlock;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    visit(row, input + row * C::pitch + i % kVectors * kBlock);
  }
}
using Block = Vector<Scalar, kBlock>;

// Makes zeros of infinity and NaN, and marks rows that have such. Splits the input, and the tables,
// in their parts.
__device__ __forceinline__ void prepare(Scalar* input, unsigned* tables, unsigned* all_marks) {
  volatile unsigned* const marks = all_marks;
  if constexpr (kSplit) {
    find_magnitudes(all_marks);
    __syncthreads();
  }
  for_blocks(input, [&](int row, Scalar* place) {
    const int plane = row / kHaloRows;
    const float limit = kSplit ? Scale(all_marks, plane / C::slots).limit() : 0.0f;
    Block block = *reinterpret_cast<const Block*>(place);
    Sum numbers[kBlock];
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
    if (kSplit && large) marks[kPlaneMarks + plane] = 1;
  });
  if constexpr (kSplit) {
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

// Where a strip lies.
struct Strip {
  int slot, row;  // the first, of the tile

  __device__ explicit Strip(int index) : slot(index / C::lanes_y), row(index % C::lanes_y * 8) {}
  // Whether it reads rows of a plane that are marked for infinity or NaN; the same for all lanes.
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

// What a lane has of the outputs of two strips: rows g of both, columns 2 t and 2 t + 1 of each 8.
struct BandSums {
  float sum[C::lanes_x][4] = {};
  float total[kSplit ? C::lanes_x : 1][4] = {};

  __device__ __forceinline__ void flush(int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[kSplit ? j : 0][i] += sum[j][i];
      sum[j][i] = 0;
    }
  }
  __device__ __forceinline__ float result(int j, int i) const {
    return kSplit ? total[kSplit ? j : 0][i] : sum[j][i];
  }
};

// A row of the kernel, as a lane multiplies by it.
struct Band {
  unsigned part[kParts][kBandBlocks];

  __device__ Band(const unsigned* table, int row) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int block = 0; block < kBandBlocks; ++block) {
        part[p][block] = table[(p * C::kernel_height + row) * kDiagonals + block * kBlock];
      }
    }
  }
};

using Left = unsigned[kParts][4];

// Twos of blocks after which a sum is flushed, if it is: three products each.
constexpr int kFlushedSteps = 2;

// Adds the products of two blocks, of which `step` twos of the band come before.
__device__ __forceinline__ void add(float (&sums)[4], const Left& left, const Band& band,
                                    int step) {
  const auto product = [&](int left_part, int band_part) {
    const unsigned (&blocks)[kBandBlocks] = band.part[band_part];
    const unsigned right[2] = {blocks[2 * step], blocks[2 * step + 1]};
    mma(Operand{}, sums, left[left_part], right);
  };
  if constexpr (kSplit) {
    product(1, 0);
    product(0, 1);
  }
  product(0, 0);
}

// The products of two strips, `input` being the lane's row of 16 bytes (see load_matrices), `table`
// its first diagonal.
__device__ __forceinline__ void multiply(BandSums& sums, const Scalar* input,
                                         const unsigned* table) {
#pragma unroll 1
  for (int row = 0; row < C::kernel_height; ++row) {
    const Band band(table, row);
    Left before;
#pragma unroll
    for (int pair = 0; pair < kRowPairs; ++pair) {
      Left now;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        load_matrices(now[p], input + p * kPart + row * C::pitch + pair * 2 * kBlock);
      }
#pragma unroll
      for (int j = 0; j < C::lanes_x; ++j) {
        // Those that begin with an odd block have the last one's second half before this one's
        // first.
        const bool odd = j * kBlocksOn % 2 == 1;
        const int from_first = 2 * pair - odd - j * kBlocksOn;
        if (from_first < 0 || from_first >= kBandBlocks) continue;
        if (odd) {
          Left halves;
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            halves[p][0] = before[p][2];
            halves[p][1] = before[p][3];
            halves[p][2] = now[p][0];
            halves[p][3] = now[p][1];
          }
          add(sums.sum[j], halves, band, from_first / 2);
        } else {
          add(sums.sum[j], now, band, from_first / 2);
        }
        const bool last = from_first + 2 >= kBandBlocks;
        if (kSplit && (last || from_first / 2 % kFlushedSteps == kFlushedSteps - 1)) sums.flush(j);
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) before[p][i] = now[p][i];
      }
    }
  }
}

// What a lane reads of a plane's two strips: its row of 16 bytes, see load_matrices.
__device__ __forceinline__ const Scalar* lane_row(const Scalar* input, int channel, int pair) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool second = 2 * pair + 1 < kStrips;  // or the first one again, whose sums are dropped
  const Strip strip(2 * pair + (second ? lane / 8 % 2 : 0));
  return input + (channel * C::slots + strip.slot) * kPlane + (strip.row + lane % 8) * C::pitch +
         lane / 16 * kBlock;
}
__device__ __forceinline__ const unsigned* lane_diagonals(const unsigned* tables, int channel) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return tables + channel * kTableWords + 7 + lane % 4 * (4 / static_cast<int>(sizeof(Scalar))) -
         lane / 4;
}

// The sum of an output, of numbers that `input` has at rows and columns of an image: taps outside
// of it are left out.
template <class Input>
__device__ __forceinline__ Sum plain_sum(const Input& input, const Scalar* weight, int output,
                                         int y, int x) {
  Sum total = 0;
#pragma unroll 1
  for (int row = 0; row < C::kernel_height; ++row) {
    const int in_y = y + Rows::kOrigin + row;
    if (static_cast<unsigned>(in_y) >= C::in_height) continue;
    Sum sum = 0;
#pragma unroll 1
    for (int tap = 0; tap < C::kernel_width; ++tap) {
      const int in_x = x + Columns::kOrigin + tap;
      if (static_cast<unsigned>(in_x) >= C::in_width) continue;
      sum += Sum(widen(input(in_y, in_x))) * Sum(widen(weight_at(weight, output, row, tap)));
    }
    total += sum;
  }
  return total;
}

// Writes those outputs of a strip again that infinity or NaN has a part in, to what `place` gives
// for rows of the strip and columns of the tile; `residual` gives what is added to them, if it is
// there.
template <class Input, class Place, class... Residual>
__device__ __noinline__ void write_infinite(const Input& input, const Scalar* weight, int output,
                                            Sum bias, int first_row, int first_column,
                                            const Place& place, const Residual&... residual) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < 8 * kTileColumns; i += 32) {
    const int row = i / kTileColumns;
    const int column = i % kTileColumns;
    if (first_column + column >= C::out_width || first_row + row >= C::out_height) continue;
    const Sum sum = plain_sum(input, weight, output, first_row + row, first_column + column);
    if (!tensor::is_finite(sum)) {
      *place(row, column) =
          narrow<Scalar>(Epilogue<C>::activated(sum + bias, residual(row, column)...));
    }
  }
}

}  // namespace depthwise
}  // namespace fastconv
