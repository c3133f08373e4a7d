// Grouped forward convolution and input gradient on tensor cores (mma.sync), from sm_80 on: groups
// of 4, 8, 16 or 32 channels of channels-last tensors with 16-bit elements.
//
// A block computes a tile (grouped/tile.cuh), which it copies to shared memory at once; other
// blocks of the SM multiply meanwhile. A warp computes a bundle of 16 output channels. It walks
// down segments of 8 columns, two rows of positions at a time: the 16 rows (M) of an MMA. Columns
// (N) are 8 output channels of a group, or all 4 of them beside 4 that are dropped. Along K are
// input channels of the group at some taps, and nothing else, so that no number meets a zero that
// stands for another group's:
//
//   4 channels in a group   4 taps of a kernel row; lane 4 g + t reads tap t of pixel g
//   8 and more              any two octets of channels, each of one tap
//
// A warp keeps the window of the input rows that its taps read in registers, and loads what is new
// as it walks: each row is read once for all taps of a column. The weights stay in registers as
// well. A strided input gradient does this for each pair of residues, with their taps.
//
// Outputs are staged in shared memory, so that 32 bytes of each pixel are stored at once.
#pragma once
#include "device/epilogue.cuh"
#include "grouped/tile.cuh"

namespace fastconv {
namespace grouped {

constexpr bool kQuads = kWidth == 4;
constexpr int kTiles = kQuads ? 4 : 2;  // MMAs along N of a bundle
// Octets of input channels that a bundle reads, and those of a group.
constexpr int kOctets = max_of(kWidth, kBundle) / kOctet;
constexpr int kGroupOctets = kQuads ? 0 : kWidth / kOctet;
constexpr int kResidues = Rows::kOver * Columns::kOver;

// The taps of a residue, and how they are multiplied. Pieces are what a lane has of an input row:
// one register each.
template <int kResidue>
struct Taps {
  static constexpr int kRow = kResidue / Columns::kOver;
  static constexpr int kColumn = kResidue % Columns::kOver;
  static constexpr int kDown = Rows::taps(kRow);
  static constexpr int kAcross = Columns::taps(kColumn);
  // MMAs along K. Four taps of a row, or two of all octets.
  static constexpr int kFours = ceil_div(kAcross, 4);
  static constexpr int kParts = kDown * kAcross * kGroupOctets;
  static constexpr int kSteps = kQuads ? kDown * kFours : ceil_div(kParts, 2);
  static constexpr int kPieces = kQuads ? kTiles * kFours * 2 : kAcross * kOctets;
};

// The packed weights: for each bundle, residue, step along K and MMA along N the two fragments of
// each lane.
template <int kResidue>
constexpr int kStepsBefore = kStepsBefore<kResidue - 1> + Taps<kResidue - 1>::kSteps;
template <>
constexpr int kStepsBefore<0> = 0;
constexpr int kAllSteps = kStepsBefore<kResidues>;
constexpr int kBundleWords = kAllSteps * kTiles * 32 * 2;

// The weight's element from input channel `in` to output channel `out` of a group, at a tap.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column) {
  const int first = group * kWidth + (C::transposed ? in : out);
  const int second = C::transposed ? out : in;
  return weight[1ll * first * C::weight_stride_out + 1ll * second * C::weight_stride_in +
                1ll * row * C::weight_stride_height + 1ll * column * C::weight_stride_width];
}

// A word of the packed weights of a bundle: two numbers that are neighbours along K.
template <int kResidue>
__device__ __forceinline__ unsigned packed_word(const Scalar* weight, int bundle, int word) {
  if constexpr (kResidue + 1 < kResidues) {
    constexpr int kNext = kStepsBefore<kResidue + 1> * (kTiles * 64);
    if (word >= kNext) return packed_word<kResidue + 1>(weight, bundle, word);
  }
  using T = Taps<kResidue>;
  word -= kStepsBefore<kResidue> * (kTiles * 64);
  const int fragment = word % 2;
  const int lane = word / 2 % 32;
  const int tile = word / 64 % kTiles;
  const int step = word / (64 * kTiles);
  const int out = lane / 4, t = lane % 4;
  int channel, output, down, across;
  bool exists;
  if constexpr (kQuads) {
    down = step / T::kFours;
    across = step % T::kFours * 4 + t;
    channel = 2 * fragment;
    output = bundle * kBundle + tile * 4 + out;
    exists = across < T::kAcross && out < 4;
  } else {
    constexpr int kOfTap = max_of(kGroupOctets, 1);
    const int part = 2 * step + fragment;
    const int tap = part / kOfTap;
    down = tap / max_of(T::kAcross, 1);
    across = tap % max_of(T::kAcross, 1);
    channel = part % kOfTap * kOctet + 2 * t;
    output = bundle * kBundle + tile * kOctet + out;
    exists = part < T::kParts;
  }
  if (!exists) return 0;
  const int row = Rows::tap(T::kRow, down), column = Columns::tap(T::kColumn, across);
  unsigned pair = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Scalar value =
        weight_at(weight, output / kWidth, output % kWidth, channel + i, row, column);
    pair |= static_cast<unsigned>(value.bits) << (16 * i);
  }
  return pair;
}

// --- A warp --------------------------------------------------------------------------------------

// A warp's staging buffer: 16 channels of 16 pixels. Pixels are so far apart that lanes write to
// different banks.
constexpr int kStagedPixel = kBundle * kScalarBytes + 16;
constexpr int kStagingBytes = 16 * kStagedPixel;
constexpr int kSharedBytes = kHaloBytes + C::warps * kStagingBytes;
static_assert(kSharedBytes == C::shared_bytes, "as planned");

// Where a warp stores its outputs.
struct Target {
  Scalar* output;  // the bundle's first channel of the tile's first image
  Tile tile;
  int images;

  // The address of a bundle's eight channels of one of 16 pixels; whether it exists.
  template <int kResidue>
  __device__ __forceinline__ bool at(Scalar*& address, int slot, int segment, int pair,
                                     int lane) const {
    const int pixel = lane / 2;
    const int y = (tile.y + 2 * pair + pixel / 8) * Rows::kOver + Taps<kResidue>::kRow;
    const int x =
        (tile.x + segment * kOctet + pixel % 8) * Columns::kOver + Taps<kResidue>::kColumn;
    const bool exists = tile.image + slot < images && y < C::out_height && x < C::out_width;
    address = output;
    if (exists) {
      address += image_at<C::out_height, C::out_width>(slot) + (y * C::out_width + x) * kChannels +
                 lane % 2 * kOctet;
    }
    return exists;
  }
};

// Two numbers as a word of 16-bit floats.
__device__ __forceinline__ unsigned pair_of(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned pair_of(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

// The window of input rows that two rows of positions read.
constexpr int kWindowRows = Rows::kTimes + Rows::kReach + 1;
constexpr int kOldRows = max_of(kWindowRows - 2 * Rows::kTimes, 0);  // also of the pair before

template <int kResidue>
struct Walk {
  using T = Taps<kResidue>;
  unsigned weights[max_of(T::kSteps, 1)][kTiles][2];
  unsigned window[kWindowRows][max_of(T::kPieces, 1)];

  __device__ __forceinline__ void load_weights(const unsigned* packed, int lane) {
    const uint2* const source =
        reinterpret_cast<const uint2*>(packed) + kStepsBefore<kResidue> * kTiles * 32 + lane;
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint2 both = __ldg(source + (step * kTiles + tile) * 32);
        weights[step][tile][0] = both.x;
        weights[step][tile][1] = both.y;
      }
    }
  }

  // Loads rows kFirst to kEnd - 1 of the window, which begins at `input`: a segment's first pixel,
  // and the bundle's first channel.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_rows(const unsigned char* input, int lane) {
    if constexpr (kFirst < kEnd && T::kPieces > 0) {
      if constexpr (kQuads) {
        load_quads<kFirst, kEnd>(input, lane);
      } else {
        load_octets<kFirst, kEnd>(input, lane);
      }
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_quads(const unsigned char* input, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int four = 0; four < T::kFours; ++four) {
      const bool exists = 4 * four + t < T::kAcross;
      const int offset = Columns::offset(T::kColumn, exists ? 4 * four + t : 0);
      const unsigned char* const pixel = input + (place(offset) + g) * kPixelBytes;
#pragma unroll
      for (int row = kFirst; row < kEnd; ++row) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint2 quad = *reinterpret_cast<const uint2*>(pixel + row * kRowBytes + tile * 8);
          unsigned* const pieces = window[row] + (tile * T::kFours + four) * 2;
          pieces[0] = exists ? quad.x : 0;
          pieces[1] = exists ? quad.y : 0;
        }
      }
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_octets(const unsigned char* input, int lane) {
    constexpr int kCount = (kEnd - kFirst) * T::kPieces;
#pragma unroll
    for (int first = 0; first < kCount; first += 4) {
      // A lane passes the address of a row of one of four pieces.
      const int piece = min_of(first + lane / 8, kCount - 1);
      const int row = kFirst + piece / T::kPieces;
      const int across = piece % T::kPieces / kOctets;
      const int octet = piece % kOctets;
      const int pixel = place(Columns::offset(T::kColumn, across)) + lane % 8;
      unsigned four[4];
      load_matrices(four, input + row * kRowBytes + pixel * kPixelBytes + octet * 16);
#pragma unroll
      for (int i = 0; i < 4 && first + i < kCount; ++i) {
        window[kFirst + (first + i) / T::kPieces][(first + i) % T::kPieces] = four[i];
      }
    }
  }
  __device__ __forceinline__ void move_window() {
#pragma unroll
    for (int row = 0; row < kOldRows; ++row) {
#pragma unroll
      for (int piece = 0; piece < T::kPieces; ++piece) {
        window[row][piece] = window[row + 2 * Rows::kTimes][piece];
      }
    }
  }

  // The pixels of an MMA: two rows of positions at a step along K.
  __device__ __forceinline__ void pixels(unsigned (&left)[4], int step, int tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // along K
      int down, piece;
      bool exists = true;
      if constexpr (kQuads) {
        down = step / T::kFours;
        piece = (tile * T::kFours + step % T::kFours) * 2 + half;
      } else {
        constexpr int kOfTap = max_of(kGroupOctets, 1);
        const int part = 2 * step + half;
        const int tap = part / kOfTap;
        const int octet = kOctets == kGroupOctets ? part % kOfTap : tile;
        exists = part < T::kParts;
        down = exists ? tap / T::kAcross : 0;
        piece = exists ? tap % T::kAcross * kOctets + octet : 0;
      }
      const int row = Rows::offset(T::kRow, down);
      left[2 * half] = exists ? window[row][piece] : 0;
      left[2 * half + 1] = exists ? window[row + Rows::kTimes][piece] : 0;
    }
  }
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4]) const {
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        unsigned left[4];
        pixels(left, step, tile);
        mma(Factor{}, acc[tile], left, weights[step][tile]);
      }
    }
  }

  // Computes a segment of all rows. `bias` are the lane's two channels of each MMA along N.
  __device__ __forceinline__ void run(const unsigned char* input, const float (&bias)[kTiles][2],
                                      unsigned char* staging, const Target& target,
                                      const Epilogue<C>& epilogue, int slot, int segment,
                                      int lane) {
    unsigned char* const staged = staging + lane / 2 * kStagedPixel + lane % 2 * 16;
    load_rows<0, C::ahead ? kWindowRows : kOldRows>(input, lane);
#pragma unroll 1
    for (int pair = 0; pair < kRowPairs; ++pair) {
      if constexpr (!C::ahead) load_rows<kOldRows, kWindowRows>(input, lane);
      Scalar* address;
      const bool exists = target.template at<kResidue>(address, slot, segment, pair, lane);
      if constexpr (kAddsResidual) {
        *reinterpret_cast<Vector<Scalar, kOctet>*>(staged) =
            epilogue.template residual_of<kOctet>(address, exists);
      }
      float acc[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][i] = bias[tile][i % 2];
      }
      multiply(acc);
      move_window();
      input += 2 * Rows::kTimes * kRowBytes;
      // With registers to spare, the next rows are loaded while these are stored.
      if constexpr (C::ahead) {
        if (pair + 1 < kRowPairs) load_rows<kOldRows, kWindowRows>(input, lane);
      }
      if constexpr (kAddsResidual) __syncwarp();
      stage(acc, staging, lane);
      __syncwarp();
      store_if(reinterpret_cast<uint4*>(address), *reinterpret_cast<const uint4*>(staged), exists);
      __syncwarp();  // the next pair of rows overwrites what others read
    }
  }

  // Finishes a lane's accumulators and stages them. Residuals have been loaded to the same places.
  __device__ __forceinline__ static void stage(const float (&acc)[kTiles][4],
                                               unsigned char* staging, int lane) {
    const int g = lane / 4, t = lane % 4;
    if (kQuads && t >= 2) return;  // columns that do not exist
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // the row of positions
        const int channel = tile * (kBundle / kTiles) + 2 * t;
        unsigned char* const place =
            staging + (8 * half + g) * kStagedPixel + channel * kScalarBytes;
        const Scalar* const residual = reinterpret_cast<const Scalar*>(place);
        const float first =
            Epilogue<C>::activated(acc[tile][2 * half], Epilogue<C>::staged(residual[0]));
        const float second =
            Epilogue<C>::activated(acc[tile][2 * half + 1], Epilogue<C>::staged(residual[1]));
        *reinterpret_cast<unsigned*>(place) = pair_of(Scalar{}, first, second);
      }
    }
  }
};

// Computes all segments of a warp, for a residue and those after it.
template <int kResidue>
__device__ __forceinline__ void walk_all(const unsigned char* halo, const unsigned* packed,
                                         const float (&bias)[kTiles][2], unsigned char* staging,
                                         const Target& target, const Epilogue<C>& epilogue) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int bundle = warp % kBundles;
  constexpr int kRead = kOctets * kOctet;  // input channels that a bundle reads
  const int first_channel = bundle * kBundle / kRead * kRead;
  Walk<kResidue> walk;
  walk.load_weights(packed, lane);
#pragma unroll 1
  for (int item = warp / kBundles; item < C::slots * kSegments; item += C::warps / kBundles) {
    const int segment = item % kSegments, slot = item / kSegments;
    if (target.tile.image + slot >= target.images) break;
    walk.run(
        halo + slot * kSlotBytes + segment * (kOctet * kPixelBytes) + first_channel * kScalarBytes,
        bias, staging, target, epilogue, slot, segment, lane);
  }
  if constexpr (kResidue + 1 < kResidues) {
    walk_all<kResidue + 1>(halo, packed, bias, staging, target, epilogue);
  }
}

}  // namespace grouped
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(256)
    pack(const Config::Scalar* __restrict__ weight, unsigned* __restrict__ packed) {
  using namespace fastconv::grouped;
  constexpr int kWords = kChannels / kBundle * kBundleWords;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < kWords; i += step) {
    packed[i] = packed_word<0>(weight, i / kBundleWords, i % kBundleWords);
  }
}

extern "C" __global__ void __launch_bounds__(fastconv::grouped::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const unsigned* __restrict__ packed,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::grouped;
  const auto epilogue = FASTCONV_EPILOGUE(output);
  // Chunks change fastest: blocks that read the same pixels run together.
  const int chunk = static_cast<int>(blockIdx.x) % kChunks;
  const Tile tile(static_cast<int>(blockIdx.x) / kChunks);
  unsigned char* const halo = fastconv::shared_memory();
  copy_halo(halo, input, chunk, tile, images);
  fastconv::copy_async_commit();

  const int warp = static_cast<int>(threadIdx.x) / 32, t = static_cast<int>(threadIdx.x) % 4;
  const int first_channel = chunk * C::chunk + warp % kBundles * kBundle;
  float shift[kTiles][2];
#pragma unroll
  for (int tile_n = 0; tile_n < kTiles; ++tile_n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = bias != nullptr && (!kQuads || t < 2);
      const int channel = first_channel + tile_n * (kBundle / kTiles) + 2 * t + i;
      shift[tile_n][i] = exists ? fastconv::widen(bias[channel]) : 0.0f;
    }
  }
  const Target target{output + image_at<C::out_height, C::out_width>(tile.image) + first_channel,
                      tile, images};
  fastconv::copy_async_wait<0>();
  __syncthreads();
  walk_all<0>(halo, packed + first_channel / kBundle * kBundleWords, shift,
              halo + kHaloBytes + warp * kStagingBytes, target, epilogue);
}
