// Producer warps that gather operands that TMA cannot copy: taps of planes begin at any element,
// but TMA boxes at multiples of 16 bytes; and few channels are less than the 128 bytes of a box.
//
// A lane has one position of a step (two for 16-bit types), which is four bytes of each row of a
// stage: a warp loads a channel's neighbouring positions at once, and writes them side by side,
// with the swizzle of TMA. The loads of a step are in flight while those of the step before are
// written. Teams of warps take turns, since a warp that waits for one of its loads waits for all.
//
// Positions of a wide stride are far apart, and such a load would touch a sector of memory for each
// lane. Long kernels' columns are therefore gathered by taps (`by_taps`): a load has eight taps of
// a channel at four positions, whose taps are neighbours in memory, and eight loads have all
// positions of a step.
#pragma once
#include "hopper/wgrad_implicit_gemm/load.cuh"
#include "hopper/wgrad_implicit_gemm/store.cuh"

namespace fastconv {
namespace hopper {

constexpr int kLanePositions = 4 / static_cast<int>(sizeof(Scalar));
constexpr int kWarpRows = C::grad_copied ? 0 : kTileRows / C::team_warps;
constexpr int kWarpColumns = kTileColumns / C::team_warps;

// Warps of a team take turns at eight rows each, and likewise at columns. With few channels, a
// warp's columns are contiguous, so that it reads few rows of the kernel.
constexpr int kFirstPitch = C::few ? kWarpColumns : 8;  // columns from a warp's first to the next's
// The place of a warp's i-th row or column after its first.
__host__ __device__ constexpr int row_place(int i) { return i / 8 * 8 * C::team_warps + i % 8; }
__host__ __device__ constexpr int column_place(int i) { return C::few ? i : row_place(i); }

// Strides of the input in elements: from a channel to the next, and from a pixel to the next in a
// row.
constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInPixels = Depth::in * kInPlane;
constexpr int kInChannels = C::groups * C::group_in;
constexpr int kChannelStride = C::channels_last ? 1 : kInPixels;
constexpr int kPixelStride = C::channels_last ? kInChannels : 1;

// The farthest planes, rows, columns and channels that taps read, before or behind the input's
// first, with channels that exist only as GEMM columns; and an index type that reaches every
// element there.
constexpr long long kFarPlane =
    max_of<long long>(Depth::padding, tensor::elements_of(Depth::out, Depth::stride) +
                                          tensor::elements_of(Depth::kernel, Depth::dilation));
constexpr long long kFarRow = max_of<long long>(
    C::padding_top, tensor::elements_of(C::out_height, C::stride_height) +
                        tensor::elements_of(C::kernel_height, C::dilation_height));
constexpr long long kFarColumn =
    max_of<long long>(C::padding_left, tensor::elements_of(C::out_width, C::stride_width) +
                                           tensor::elements_of(C::kernel_width, C::dilation_width));
constexpr int kFarChannel =
    kInChannels + (kOctets      ? ceil_div(kColumnTiles * kTileColumns, 8 * kTaps) * 8
                   : C::by_taps ? ceil_div(kColumnTiles * kTileColumns, kTaps)
                                : 0);
using InOffset =
    IndexTo<(Depth::exists ? tensor::elements_of(kFarPlane, kInPlane, kPixelStride) : 0) +
            tensor::elements_of(kFarRow, C::in_width, kPixelStride) +
            tensor::elements_of(kFarColumn, kPixelStride) +
            tensor::elements_of(kFarChannel, kChannelStride)>;
// The index type of grad_output, up to channels that exist only as GEMM rows.
using OutOffset = IndexTo<tensor::elements_of(kRowTiles, kTileRows, kPositions)>;

// The distance in elements to the pixel that lies so many planes, rows and columns further.
__device__ __forceinline__ InOffset pixel_offset(int plane, int row, int column) {
  if constexpr (Depth::exists) {
    return ((InOffset{plane} * C::in_height + row) * C::in_width + column) * kPixelStride;
  } else {
    return (InOffset{row} * C::in_width + column) * kPixelStride;
  }
}

// A position: its element of the group's first output channel, and where its first tap reads the
// first input channel, which may be outside of the image.
struct Position {
  const Scalar* grad;
  const Scalar* first_tap;
  int plane = 0, row = 0, column = 0;
  bool exists = false;

  template <class Sources>
  __device__ __forceinline__ void find(const Sources& sources, int group, int flat, int end) {
    exists = flat < end;
    const int number = exists ? flat / kPositions : 0;
    const int in_image = exists ? flat - number * kPositions : 0;
    const int z = Depth::exists ? in_image / kPlanePositions : 0;
    const int in_plane = in_image - z * kPlanePositions, y = in_plane / C::out_width;
    plane = z * Depth::stride - Depth::padding;
    row = y * C::stride_height - C::padding_top;
    column = (in_plane - y * C::out_width) * C::stride_width - C::padding_left;
    if constexpr (!C::grad_copied) {
      const long long first = 1LL * number * C::groups * C::group_out + group * kOut;
      grad = sources.grad_output + first * kPositions + in_image;
    }
    first_tap = sources.input + 1LL * number * kInChannels * kInPixels +
                (InOffset{group * kIn} * kChannelStride + pixel_offset(plane, row, column));
  }
  // Whether the row of a plane, or the column, at this offset from the first tap is in the image.
  __device__ __forceinline__ bool has_row(int planes, int rows) const {
    if constexpr (Depth::exists) {
      if (static_cast<unsigned>(plane + planes) >= Depth::in) return false;
    }
    return exists && static_cast<unsigned>(row + rows) < C::in_height;
  }
  __device__ __forceinline__ bool has_column(int offset) const {
    return static_cast<unsigned>(column + offset) < C::in_width;
  }
};

// The distance of a tap from a position's first tap.
struct Tap {
  int plane, row, column;

  __device__ __forceinline__ explicit Tap(int tap)
      : plane(Depth::exists ? tap / kPlaneTaps * Depth::dilation : 0),
        row((Depth::exists ? tap % kPlaneTaps : tap) / C::kernel_width * C::dilation_height),
        column(tap % C::kernel_width * C::dilation_width) {}

  // The distance in elements, in the first channel.
  __device__ __forceinline__ InOffset offset() const { return pixel_offset(plane, row, column); }
};

// The columns of the kernel that a position reads inside of the image, one bit each.
__device__ __forceinline__ unsigned columns_read(const Position& position) {
  unsigned bits = 0;
#pragma unroll
  for (int tap = 0; tap < C::kernel_width; ++tap) {
    bits |= position.has_column(tap * C::dilation_width) ? 1u << tap : 0;
  }
  return bits;
}

// Eight GEMM columns, which have the same tap.
struct Octet {
  Column first;
  Tap tap;

  __device__ __forceinline__ explicit Octet(int first_column)
      : first(first_column), tap(first.tap) {}

  __device__ __forceinline__ InOffset offset() const {
    return tap.offset() + InOffset{first.channel} * kChannelStride;
  }
  __device__ __forceinline__ bool is_read(const Position& position) const {
    const bool exists = kTaps * kTapColumns % kTileColumns == 0 || first.channel < kIn;
    return exists && position.has_row(tap.plane, tap.row) && position.has_column(tap.column);
  }
};

// By taps, a lane has one GEMM column of an octet: a tap of a channel, read from `from` on.
struct LaneColumn {
  const Scalar* source;
  int from;      // the column of the image
  unsigned end;  // columns of the image from here on are not read

  __device__ __forceinline__ LaneColumn(const Position& first, int number) {
    // Where the tap of the first position after the line's last would read, without the tap.
    constexpr int kEnd = C::out_width * C::stride_width - C::padding_left;
    const Column column(number);
    const Tap tap(column.tap);
    from = first.column + tap.column;
    const bool is_read = column.channel < kIn && first.has_row(tap.plane, tap.row);
    end = is_read ? max_of(min_of(C::in_width, kEnd + tap.column), 0) : 0;
    source = first.first_tap + tap.offset() + InOffset{column.channel} * kChannelStride;
    hold_address(source);
  }
  // The element that the position this many positions after the first one reads.
  __device__ __forceinline__ unsigned load(int position) const {
    const int distance = position * C::stride_width;
    return tensor::load_bits(source + distance, static_cast<unsigned>(from + distance) < end);
  }
};

// With few channels, every row has its own unrolled instructions, and the instruction cache is
// small: numbers are written whole, and then split for 3xTF32 in a loop.
constexpr bool kSplitsLater = C::parts == 2 && C::few;

// Splits kRows rows of a stage for 3xTF32.
template <int kRows, int kPitch>
__device__ __forceinline__ void split_rows(unsigned char* first, int lane) {
  constexpr int kLaneBytes = 16, kPieceBytes = 32 * kLaneBytes;
  constexpr int kPieces = 8 * kSpan / kPieceBytes;  // pieces of eight rows
  static_assert(kRows % 8 == 0, "they lie side by side");
#pragma unroll 2
  for (int i = 0; i < kRows / 8 * kPieces; ++i) {
    auto* const high = reinterpret_cast<uint4*>(first + i / kPieces * (kPitch * kSpan) +
                                                i % kPieces * kPieceBytes + lane * kLaneBytes);
    uint4 low, numbers = *high;
    tensor::split(__uint_as_float(numbers.x), numbers.x, low.x);
    tensor::split(__uint_as_float(numbers.y), numbers.y, low.y);
    tensor::split(__uint_as_float(numbers.z), numbers.z, low.z);
    tensor::split(__uint_as_float(numbers.w), numbers.w, low.w);
    *high = numbers;
    *(high + kPartBytes / kLaneBytes) = low;
  }
}

// A warp's share of a tile: kWarpRows rows of a stage, then kWarpColumns columns.
template <class Sources>
struct Gatherer {
  const Sources& sources;
  const Tile& tile;
  int warp, lane, end;
  Position positions[kLanePositions];
  Position first;  // by taps, the first one whose taps the lane reads
  unsigned bits[kWarpRows + kWarpColumns][kLanePositions];  // loads in flight

  __device__ __forceinline__ Gatherer(const Sources& sources, const Tile& tile, int warp, int batch)
      : sources(sources),
        tile(tile),
        warp(warp),
        lane(static_cast<int>(threadIdx.x) % 32),
        end(batch * kPositions) {}

  // Finds the lane's positions of a step; if the step does not exist, neither do they.
  __device__ __forceinline__ void find(int step, bool exists) {
    if constexpr (C::by_taps) {
      find_in_line(step, exists);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      positions[i].find(sources, tile.group, step * kDepth + lane * kLanePositions + i,
                        exists ? end : 0);
    }
  }
  __device__ __forceinline__ void find_in_line(int step, bool exists) {
    const int line = step / kLineSteps, in_line = (step - line * kLineSteps) * kDepth;
    const auto find_one = [&](Position& position, int at) {
      const bool is_there = exists && at < kLinePositions;
      position.find(sources, tile.group, line * kLinePositions + at, is_there ? end : 0);
    };
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      find_one(positions[i], in_line + lane * kLanePositions + i);
    }
    find_one(first, in_line + lane / 8 * kLanePositions);
  }
  // Writes what was loaded for a row of a stage, at the lane's positions.
  __device__ __forceinline__ void store(unsigned char* first, int row, int index) const {
    store_bits(first + row * kSpan + (lane * 4 ^ row % 8 * 16), index);
  }
  // Writes the four bytes that were loaded. float32 is rounded to TF32, or split for 3xTF32, here
  // or later.
  __device__ __forceinline__ void store_bits(unsigned char* target, int index) const {
    if constexpr (kSplitsLater) {
      *reinterpret_cast<unsigned*>(target) = bits[index][0];
    } else if constexpr (C::parts == 2) {
      unsigned high, low;
      tensor::split(__uint_as_float(bits[index][0]), high, low);
      *reinterpret_cast<unsigned*>(target) = high;
      *reinterpret_cast<unsigned*>(target + kPartBytes) = low;
    } else if constexpr (sizeof(Scalar) == 4) {
      *reinterpret_cast<float*>(target) = round_to_even_tf32(__uint_as_float(bits[index][0]));
    } else {
      *reinterpret_cast<unsigned*>(target) = bits[index][0] | bits[index][1] << 16;
    }
  }

  template <bool kStores>
  __device__ __forceinline__ void move_rows(unsigned char* target) {
    const int first = tile.row + warp * 8;
    const Scalar* sources[kLanePositions];
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      sources[i] = positions[i].grad + OutOffset{first} * kPositions;
      hold_address(sources[i]);
    }
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if constexpr (kStores) store(target, row_place(row), row);
      const bool is_row = kOut % kTileRows == 0 || first + row_place(row) < kOut;
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        bits[row][i] = tensor::load_bits(sources[i] + 1LL * row_place(row) * kPositions,
                                         is_row && positions[i].exists);
      }
    }
  }

  template <bool kStores>
  __device__ __forceinline__ void move_columns(unsigned char* target) {
    unsigned first[1] = {static_cast<unsigned>(tile.column / 8 + warp)};
    // Expressions that depend on it would take more registers than recomputing them takes
    // instructions.
    hold_registers(first);
#pragma unroll
    for (int number = 0; number < kWarpColumns / 8; ++number) {
      const Octet octet(static_cast<int>(first[0] + number * C::team_warps) * 8);
      const Scalar* sources[kLanePositions];
      bool read[kLanePositions];
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        sources[i] = positions[i].first_tap + octet.offset();
        hold_address(sources[i]);
        read[i] = octet.is_read(positions[i]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = number * 8 + j, index = kWarpRows + column;
        if constexpr (kStores) store(target, column_place(column), index);
        const bool is_channel = kIn % 8 == 0 || octet.first.channel + j < kIn;
#pragma unroll
        for (int i = 0; i < kLanePositions; ++i) {
          bits[index][i] =
              tensor::load_bits(sources[i] + 1LL * j * kChannelStride, is_channel && read[i]);
        }
      }
    }
  }

  // Moves columns by taps.
  template <bool kStores>
  __device__ __forceinline__ void move_tap_columns(unsigned char* target) {
    const int in_octet = lane % 8, in_piece = lane / 8 * 4;
    unsigned own[1] = {static_cast<unsigned>(tile.column + warp * 8 + in_octet)};
    hold_registers(own);  // for the reason given above
#pragma unroll
    for (int number = 0; number < kWarpColumns / 8; ++number) {
      const LaneColumn column(first, static_cast<int>(own[0] + row_place(number * 8)));
      unsigned char* const row = target + (row_place(number * 8) + in_octet) * kSpan;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int index = kWarpRows + number * 8 + j;
        if constexpr (kStores) store_bits(row + ((j ^ in_octet) * 16 + in_piece), index);
#pragma unroll
        for (int i = 0; i < kLanePositions; ++i) {
          bits[index][i] = column.load(j * 4 * kLanePositions + i);
        }
      }
    }
  }

  // Moves columns whose taps are compile-time constants, from column kFirst on (few channels).
  template <bool kStores, int kFirst>
  __device__ __forceinline__ void move_few_columns(unsigned char* target) {
    const Scalar* sources[kLanePositions];
    unsigned read[kLanePositions], of_row[kLanePositions];
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      read[i] = columns_read(positions[i]);
      sources[i] = positions[i].first_tap;
      hold_address(sources[i]);
    }
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) {
      const int column = kFirst + column_place(j);
      if constexpr (kStores) store(target, column_place(j), kWarpRows + j);
      const int number = column / kIn, channel = column % kIn;
      const int tap_column = number % C::kernel_width;
      const Tap tap(number);
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        if (j == 0 || (tap_column == 0 && channel == 0)) {
          of_row[i] = positions[i].has_row(tap.plane, tap.row) ? read[i] : 0;
        }
        bits[kWarpRows + j][i] =
            tensor::load_bits(sources[i] + tap.offset() + InOffset{channel} * kChannelStride,
                              number < kTaps && (of_row[i] >> tap_column & 1));
      }
    }
  }

  // Stores to a stage what was loaded, and starts loading the positions that were found. With few
  // channels, kFirst is the warp's first column.
  template <bool kStores, int kFirst>
  __device__ __forceinline__ void move(const Shared& shared, int stage) {
    move_rows<kStores>(shared.rows(stage) + warp * 8 * kSpan);
    unsigned char* const columns = shared.columns(stage) + warp * kFirstPitch * kSpan;
    if constexpr (C::few) {
      move_few_columns<kStores, kFirst>(columns);
    } else if constexpr (C::by_taps) {
      move_tap_columns<kStores>(columns);
    } else {
      move_columns<kStores>(columns);
    }
  }

  // Splits what the warp has written to a stage.
  __device__ __forceinline__ void split(const Shared& shared, int stage) const {
    __syncwarp();
    split_rows<kWarpRows, 8 * C::team_warps>(shared.rows(stage) + warp * 8 * kSpan, lane);
    split_rows<kWarpColumns, 8>(shared.columns(stage) + warp * kFirstPitch * kSpan, lane);
  }
};

// A warp's share of a run's steps. It begins with step `ahead`, and leaves in `ahead` by how many
// steps it is then ahead in the next run.
template <int kFirst, class Sources>
__device__ __forceinline__ void gather_run(const Shared& shared, Ring& ring, const Run& run,
                                           int& ahead, Gatherer<Sources>& gatherer) {
  int step = run.first + ahead;
  gatherer.find(step, step < run.end);
  gatherer.template move<false, kFirst>(shared, 0);
  for (; step < run.end; step += C::teams) {
    const int next = step + C::teams;
    gatherer.find(next, next < run.end);
    barrier_wait(shared.empty(ring.stage), ring.parity);
    if constexpr (C::grad_copied) {
      if (gatherer.warp == 0 && is_elected()) {
        copy_step(shared, gatherer.sources, ring.stage, gatherer.tile, step);
      }
    }
    gatherer.template move<true, kFirst>(shared, ring.stage);
    if constexpr (kSplitsLater) gatherer.split(shared, ring.stage);
    fence_async_shared();
    __syncwarp();
    if (gatherer.lane == 0) barrier_arrive(shared.full(ring.stage));
#pragma unroll
    for (int i = 0; i < C::teams; ++i) ring.advance();
  }
  ahead = step - run.end;
}

// Calls gather_run with a compile-time kFirst: that of the `number`-th warp, counted through all
// columns of a group's tiles.
template <int kNumber, class Sources>
__device__ __forceinline__ void gather_share(int number, const Shared& shared, Ring& ring,
                                             const Run& run, int& ahead,
                                             Gatherer<Sources>& gatherer) {
  constexpr int kLast = C::few ? kColumnTiles * C::team_warps - 1 : 0;
  if (kNumber == kLast || number == kNumber) {
    gather_run<kNumber / C::team_warps * kTileColumns + kNumber % C::team_warps * kFirstPitch>(
        shared, ring, run, ahead, gatherer);
  } else {
    gather_share<min_of(kNumber + 1, kLast)>(number, shared, ring, run, ahead, gatherer);
  }
}

template <class Sources>
__device__ __forceinline__ void gather_steps(const Shared& shared, const Sources& sources,
                                             const Share& share, int batch) {
  const int number = static_cast<int>(threadIdx.x) / 32 - kConsumerWarps;
  const int warp = number % C::team_warps;
  int ahead = number / C::team_warps;  // the team's first step
  Ring ring(1);
  for (int i = 0; i < ahead; ++i) ring.advance();
  // The compiler would make a function of so much code, and call it with its variables in memory.
  const auto gather = [&](const Run& run, int) __attribute__((always_inline)) {
    const Tile tile(run.tile);
    Gatherer<Sources> gatherer(sources, tile, warp, batch);
    gather_share<0>(tile.column / kTileColumns * C::team_warps + warp, shared, ring, run, ahead,
                    gatherer);
  };
  for_runs(share, static_cast<int>(blockIdx.x), gather);
}

}  // namespace hopper
}  // namespace fastconv
