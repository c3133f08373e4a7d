// Depthwise convolutions, and their input gradients, of contiguous tensors on tensor cores, from
// sm_80 on: a row of taps is a banded matrix.
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
// A block has a tile of a plane of `slots` images, in strips of 8 rows; a warp has two strips, of
// all columns, at a time.
//
//   input   [part][slot][halo row][column]     table   [part][tap row][diagonal]
//
// float32 is split in two parts of TF32's precision, whose products are flushed to totals after
// each row of the kernel; products of low parts are left out. As zeros of the band would spread
// infinity and NaN to neighbouring outputs, these are multiplied as zeros, and the outputs that
// they have a part in are computed again, one by one.
#pragma once
#include "depthwise/correlate.cuh"
#include "depthwise/plane_rows.cuh"
#include "include/mma.cuh"
#include "tensor/operand.cuh"

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
constexpr int kStrips = C::slots * C::lanes_y;
constexpr int kStripPairs = ceil_div(kStrips, 2);
constexpr int kRows = C::slots * kHaloRows;
constexpr int kPart = C::slots * kPlane;  // elements

// Diagonals: from 7 columns to the right of an output's first tap to those of the last block.
constexpr int kDiagonals = 8 + kBandBlocks * kBlock;
constexpr int kTableWords = kParts * C::kernel_height * kDiagonals;
static_assert(kParts * kPart * static_cast<int>(sizeof(Scalar)) +
                      round_up(kTableWords + kRows, 4) * 4 ==
                  C::shared_bytes,
              "as planned");

struct Tile {
  int y, x;    // the first output
  int output;  // channel
  int first_image;

  __device__ explicit Tile(unsigned block) {
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    block /= kTilesY;
    output = static_cast<int>(block % (C::groups * C::group_out));
    first_image = static_cast<int>(block / (C::groups * C::group_out)) * C::slots;
  }
  // The plane of the first image that is read.
  __device__ long long input_plane() const {
    return (1ll * first_image * C::groups + output / C::group_out) * kInPlane;
  }
};
constexpr long long kInImage = C::groups * kInPlane;

// A weight, as it is correlated with the input.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int output, int row, int tap) {
  if (C::transposed) {
    row = C::kernel_height - 1 - row;
    tap = C::kernel_width - 1 - tap;
  }
  return kernel_row(weight, output / C::group_out, output % C::group_out, 0,
                    row)[1ll * tap * C::weight_stride_width];
}

// Lane 4 g + t multiplies diagonals 4 bytes' worth of t, less g, of each block.
__device__ __forceinline__ void load_table(unsigned* table, const Scalar* weight, int output) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < C::kernel_height * kDiagonals; i += kThreads) {
    const int row = i / kDiagonals;
    const int tap = i % kDiagonals - 7 - kShift;
    const auto at = [&](int tap) {
      return is_tap<Columns>(tap) ? weight_at(weight, output, row, tap) : Scalar{};
    };
    if constexpr (kSplit) {
      tensor::split(widen(at(tap)), table[i], table[C::kernel_height * kDiagonals + i]);
    } else {
      const Vector<Scalar, 2> pair = {{at(tap), at(tap + 1)}};
      table[i] = reinterpret_cast<const unsigned&>(pair);
    }
  }
}

__device__ __forceinline__ void load_input(Scalar* target, const Scalar* input, const Tile& tile,
                                           int images) {
  constexpr int kEnd = C::inside ? kEndVector : kBandColumns / C::vector;
  load_planes<C::slots, kCopiedRows, kEnd - kFirstVector, C::vector, C::pitch, kPlane, C::in_height,
              C::in_width, kThreads>(target + kFirstRow * C::pitch + kFirstVector * C::vector,
                                     input + tile.input_plane(), kInImage,
                                     images - tile.first_image, tile.y + Rows::kOrigin + kFirstRow,
                                     tile.x + Columns::kOrigin - kShift + kFirstVector * C::vector);
}

// Splits the input in its parts. Makes zeros of infinity and NaN, and marks rows that have such.
__device__ __forceinline__ void prepare(Scalar* input, volatile unsigned* marks) {
  constexpr int kVectors = kBandColumns / kBlock;
  using Block = Vector<Scalar, kBlock>;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    Scalar* const place = input + row * C::pitch + i % kVectors * kBlock;
    Block block = *reinterpret_cast<const Block*>(place);
    Sum numbers[kBlock];
    widen_vector(block, numbers);
    bool finite = true;
#pragma unroll
    for (const Sum number : numbers) finite = finite && tensor::is_finite(number);
    if (!finite) {
      marks[row] = 1;
#pragma unroll
      for (int k = 0; k < kBlock; ++k) {
        if (tensor::is_finite(numbers[k])) continue;
        numbers[k] = 0;
        block.element[k] = Scalar{};
      }
      if (!kSplit) *reinterpret_cast<Block*>(place) = block;
    }
    if constexpr (kSplit) {
      Vector<unsigned, kBlock> high, low;
#pragma unroll
      for (int k = 0; k < kBlock; ++k) tensor::split(numbers[k], high.element[k], low.element[k]);
      *reinterpret_cast<Vector<unsigned, kBlock>*>(place) = high;
      *reinterpret_cast<Vector<unsigned, kBlock>*>(place + kPart) = low;
    }
  }
}

// Where a strip lies.
struct Strip {
  int slot, row;  // the first, of the tile

  __device__ explicit Strip(int index) : slot(index / C::lanes_y), row(index % C::lanes_y * 8) {}
  // Whether it reads marked rows, for all lanes of a warp.
  __device__ __forceinline__ bool marked(const unsigned* marks) const {
    bool marked = false;
#pragma unroll
    for (int i = 0; i < 8 + C::kernel_height - 1; i += 32) {
      const int at = i + static_cast<int>(threadIdx.x) % 32;
      if (at < 8 + C::kernel_height - 1) {
        marked = marked || marks[slot * kHaloRows + row + at] != 0;
      }
    }
    return __any_sync(~0u, marked);
  }
};

// What a lane has of the outputs of two strips: rows g of both, columns 2 t and 2 t + 1 of each 8.
struct BandSums {
  float sum[C::lanes_x][4] = {};
  float total[kSplit ? C::lanes_x : 1][4] = {};

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int j = 0; j < C::lanes_x; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[j][i] += sum[j][i];
        sum[j][i] = 0;
      }
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
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) before[p][i] = now[p][i];
      }
    }
    if constexpr (kSplit) sums.flush();
  }
}

// Adds the bias, and writes what lies in the image of the first or the second strip of two.
__device__ __forceinline__ void store(const BandSums& sums, int half, Sum bias, Scalar* row,
                                      const Tile& tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < C::lanes_x; ++j) {
#pragma unroll
    for (int i = 0; i < 2; i += C::store_vector) {
      const int x = tile.x + 8 * j + lane % 4 * 2 + i;
      Vector<Scalar, C::store_vector> vector;
#pragma unroll
      for (int k = 0; k < C::store_vector; ++k) {
        vector.element[k] = narrow<Scalar>(sums.result(j, 2 * half + i + k) + bias);
      }
      store_vector(row + x, vector, x < C::out_width);
    }
  }
}

// An output, from memory: taps outside of the image are left out.
__device__ __forceinline__ Sum plain_sum(const Scalar* plane, const Scalar* weight, int output,
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
      sum += Sum(widen(plane[1ll * in_y * C::in_width + in_x])) *
             Sum(widen(weight_at(weight, output, row, tap)));
    }
    total += sum;
  }
  return total;
}

// Writes those outputs of a strip again that infinity or NaN has a part in.
__device__ __noinline__ void write_infinite(const Scalar* plane, const Scalar* weight, Sum bias,
                                            Scalar* output, const Tile& tile, int first_row) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < 8 * kTileColumns; i += 32) {
    const int x = tile.x + i % kTileColumns;
    const int y = first_row + i / kTileColumns;
    if (x >= C::out_width || y >= C::out_height) continue;
    const Sum sum = plain_sum(plane, weight, tile.output, y, x);
    if (tensor::is_finite(sum)) continue;
    output[1ll * y * C::out_width + x] = narrow<Scalar>(sum + bias);
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    correlate(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
              const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
              int first_image, int images) {
  using namespace fastconv::depthwise;
  using fastconv::widen;
  const Tile tile(blockIdx.x);
  input += first_image * kInImage;
  output += first_image * (C::groups * C::group_out * kOutPlane);
  unsigned char* const shared = fastconv::shared_memory();
  Scalar* const inputs = reinterpret_cast<Scalar*>(shared);
  unsigned* const table = reinterpret_cast<unsigned*>(inputs + kParts * kPart);
  unsigned* const marks = table + kTableWords;
  if constexpr (C::inside) {
    clear<kPart* static_cast<int>(sizeof(Scalar)), kThreads>(inputs);
    __syncthreads();
  }
  load_input(inputs, input, tile, images);
  fastconv::copy_async_commit();
  load_table(table, weight, tile.output);
  for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kThreads) marks[i] = 0;
  const Sum shift = bias != nullptr ? Sum(widen(bias[tile.output])) : Sum(0);
  fastconv::copy_async_wait<0>();
  __syncthreads();
  prepare(inputs, marks);
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned* const diagonals =
      table + 7 + lane % 4 * (4 / static_cast<int>(sizeof(Scalar))) - lane / 4;
#pragma unroll 1
  for (int pair = static_cast<int>(threadIdx.x) / 32; pair < kStripPairs; pair += C::warps) {
    const bool second = 2 * pair + 1 < kStrips;
    const Strip strips[2] = {Strip(2 * pair), Strip(2 * pair + second)};
    const Strip mine(2 * pair + (second ? lane / 8 % 2 : 0));
    BandSums sums;
    multiply(sums,
             inputs + mine.slot * kPlane + (mine.row + lane % 8) * C::pitch + lane / 16 * kBlock,
             diagonals);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Strip& strip = strips[half];
      const int image = tile.first_image + strip.slot;
      if (image >= images || (half == 1 && !second)) continue;
      const int first_row = tile.y + strip.row;
      Scalar* const plane =
          output + (1ll * image * (C::groups * C::group_out) + tile.output) * kOutPlane;
      const int y = first_row + lane / 4;
      if (y < C::out_height) store(sums, half, shift, plane + 1ll * y * C::out_width, tile);
      if (strip.marked(marks)) {
        __syncwarp();
        write_infinite(input + tile.input_plane() + strip.slot * kInImage, weight, shift, plane,
                       tile, first_row);
      }
    }
  }
}
