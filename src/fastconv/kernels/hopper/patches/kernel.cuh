// Patch embeddings of contiguous volumes, whose kernel is their stride, as matrix products by
// mma.sync. A forward pass embeds: it makes a position's filters of its patch. An input gradient
// restores: it makes a position's patch of its filters (tile.cuh).
//
// The products are so small that memory is all that counts. A block keeps the weights in shared
// memory, packed as fragments, and walks over tiles of positions: cp.async copies the next tile
// while this one is multiplied. Elements reach shared memory in pieces, as they lie in memory, and
// which row, column or step along K of an MMA each is follows from what a lane can load and store
// at once:
//
// Embedding: lane 4 g + t loads piece t of four, of one position, which is all of its B fragments
// of 16 steps along K. Columns (N) are positions in such an order that a lane's accumulators of two
// or four MMAs are 16 bytes of a filter.
//
// Restoring: rows (M) are positions. Columns are pieces in such an order that a lane's accumulators
// of two MMAs are a piece.
#pragma once
#include "hopper/patches/tile.cuh"

namespace fastconv {
namespace patches {

constexpr int kAcross = kWarps / 2;         // warps that share the positions of a tile
constexpr int kWarpTile = kTile / kAcross;  // positions of a warp

// Finishes kCount accumulators and stores them side by side, if they are `valid`.
template <int kCount>
__device__ __forceinline__ void store(Scalar* target, const float (&accs)[kCount], bool valid,
                                      const Epilogue<C>& epilogue) {
  using Stored = typename Bits<kCount * kScalarBytes>::type;
  const auto outputs = epilogue(accs, target, valid);
  store_if(reinterpret_cast<Stored*>(target), *reinterpret_cast<const Stored*>(&outputs), valid);
}

// --- Forward -------------------------------------------------------------------------------------

namespace embedding {

// The tile: for each piece a row of all positions. Lanes that load pieces of a few positions use
// all banks.
constexpr int kPitch = pitch(kTile * kPieceBytes, kTf32 ? 32 : 16);
constexpr int kStageBytes = kAllPieces * kPitch;
constexpr int kCopyBytes = C::copied_patches * kPieceBytes;
constexpr int kCopies = kTile / C::copied_patches;  // of a row

constexpr int kSteps = kAllPieces / 4;  // of 16 along K
constexpr int kMmas = kTf32 ? 2 : 1;    // of a step
constexpr int kRows = kFilters / 16;    // MMAs along M
constexpr int kWarpRows = ceil_div(kRows, 2);
constexpr int kColumns = kWarpTile / 8;  // MMAs along N of a warp
constexpr int kStored = kVector / 2;     // MMAs whose accumulators a lane stores at once
constexpr int kWeightBytes = kSteps * kMmas * kRows * 512;
constexpr int kSharedBytes = kWeightBytes + 2 * kStageBytes;

// Packs the weights as A fragments: of each step, MMA of the step and row of MMAs, a vector of each
// lane. Along K, lane 4 g + t has columns of piece t.
__device__ __forceinline__ void pack(const Scalar* weight, unsigned* packed) {
  for (int i = static_cast<int>(threadIdx.x); i < kWeightBytes / 4; i += kThreads) {
    const int word = i % 4, lane = i / 4 % 32, row = i / 128 % kRows, step = i / 128 / kRows;
    const int filter = row * 16 + lane / 4 + word % 2 * 8;
    const int piece = step / kMmas * 4 + lane % 4;
    const int column = kTf32 ? step % kMmas * 2 + word / 2 : word / 2 * 2;
    const Scalar next = kTf32 ? Scalar{} : weight_at(weight, filter, piece, column + 1);
    packed[i] = word_of(weight_at(weight, filter, piece, column), next);
  }
}

// A lane's piece as B fragments of a step.
__device__ __forceinline__ void load_piece(unsigned (&right)[2][2], const uint4* piece) {
  const uint4 loaded = *piece;
  right[0][0] = rounded(loaded.x);
  right[0][1] = rounded(loaded.y);
  right[1][0] = rounded(loaded.z);
  right[1][1] = rounded(loaded.w);
}
__device__ __forceinline__ void load_piece(unsigned (&right)[1][2], const uint2* piece) {
  const uint2 loaded = *piece;
  right[0][0] = loaded.x;
  right[0][1] = loaded.y;
}

struct Pass {
  const Scalar* input;
  const Scalar* bias;
  Scalar* output;
  Epilogue<C> epilogue;
  unsigned char* stages;
  const uint4* weights;

  __device__ __forceinline__ void copy(int volume, int first, int stage) const {
    constexpr int kRound = kThreads / kCopies;
    static_assert(kThreads % kCopies == 0, "a thread copies the same positions of all rows");
    const int thread = static_cast<int>(threadIdx.x);
    const int at = thread % kCopies * C::copied_patches;
    const bool exists = first + at < kPositions;
    const Scalar* const patch =
        input + 1ll * volume * kVolume + (exists ? patch_offset(first + at) : 0);
    unsigned char* const target = stages + stage * kStageBytes + at * kPieceBytes;
#pragma unroll
    for (int i = 0; i < ceil_div(kAllPieces, kRound); ++i) {
      const int piece = thread / kCopies + i * kRound;
      if (kAllPieces % kRound != 0 && piece >= kAllPieces) break;
      const bool valid = exists && piece < kPieces;
      copy_async<kCopyBytes>(target + piece * kPitch, patch + (valid ? piece_offset(piece) : 0),
                             valid);
    }
  }

  __device__ __forceinline__ void compute(int volume, int first, int stage) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int column = warp % kAcross * kWarpTile, row = warp / kAcross * kWarpRows;
    float accs[kWarpRows][kColumns][4];
    start(accs, row, g);
    using Loaded = Bits<kPieceBytes>::type;
    const unsigned char* source = stages + stage * kStageBytes + t * kPitch;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step, source += 4 * kPitch) {
      unsigned right[kColumns][kMmas][2];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int position = column + place(n, g / 2) + g % 2;
        load_piece(right[n], reinterpret_cast<const Loaded*>(source + position * kPieceBytes));
      }
#pragma unroll
      for (int m = 0; m < kWarpRows; ++m) {
        if (kRows % 2 != 0 && row + m >= kRows) break;
#pragma unroll
        for (int i = 0; i < kMmas; ++i) {
          const uint4 four = weights[((step * kMmas + i) * kRows + row + m) * 32 + lane];
          const unsigned left[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) mma(Operand{}, accs[m][n], left, right[n][i]);
        }
      }
    }
    finish(accs, volume, first + column, row, g, t);
  }

  // The place of the first of two neighbouring columns of an MMA, which are positions.
  __device__ __forceinline__ static int place(int n, int pair) {
    return n / kStored * (8 * kStored) + pair * (2 * kStored) + n % kStored * 2;
  }

  __device__ __forceinline__ void start(float (&accs)[kWarpRows][kColumns][4], int row,
                                        int g) const {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int filter = (row + m) * 16 + half * 8 + g;
        const bool exists = bias != nullptr && filter < C::filters;
        const float begin = exists ? widen(bias[filter]) : 0.0f;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) accs[m][n][2 * half] = accs[m][n][2 * half + 1] = begin;
      }
    }
  }

  __device__ __forceinline__ void finish(const float (&accs)[kWarpRows][kColumns][4], int volume,
                                         int first, int row, int g, int t) const {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int filter = (row + m) * 16 + half * 8 + g;
        Scalar* const line =
            output + 1ll * volume * (C::filters * kPositions) + filter * kPositions;
#pragma unroll
        for (int n = 0; n < kColumns; n += kStored) {
          float stored[kVector];
#pragma unroll
          for (int i = 0; i < kVector; ++i) stored[i] = accs[m][n + i / 2][2 * half + i % 2];
          const int position = first + place(n, t);
          const bool valid = filter < C::filters && position < kPositions;
          store(line + position, stored, valid, epilogue);
        }
      }
    }
  }
};

}  // namespace embedding

// --- Input gradient ------------------------------------------------------------------------------

namespace restoring {

// The tile: for each filter a row of all positions.
constexpr int kPitch = pitch(kTile * kScalarBytes, kTf32 ? 32 : 16);
constexpr int kStageBytes = kFilters * kPitch;

constexpr int kStep = kTf32 ? 8 : 16;  // filters of an MMA along K
constexpr int kSteps = kFilters / kStep;
constexpr int kRows = kWarpTile / 16;   // MMAs along M of a warp
constexpr int kFours = kAllPieces / 4;  // pairs of MMAs along N: four pieces
constexpr int kWarpFours = ceil_div(kFours, 2);
constexpr int kWeightBytes = kSteps * kFours * 512;
constexpr int kSharedBytes = kWeightBytes + 2 * kStageBytes;

// Packs the weights as B fragments: of each step and four pieces, a vector of each lane for both
// MMAs.
__device__ __forceinline__ void pack(const Scalar* weight, unsigned* packed) {
  for (int i = static_cast<int>(threadIdx.x); i < kWeightBytes / 4; i += kThreads) {
    const int word = i % 4, lane = i / 4 % 32, four = i / 128 % kFours, step = i / 128 / kFours;
    const int g = lane / 4, t = lane % 4;
    const int filter = step * kStep + (kTf32 ? word % 2 * 4 + t : word % 2 * 8 + 2 * t);
    const int piece = four * 4 + g / 2, column = word / 2 * 2 + g % 2;
    const Scalar next = kTf32 ? Scalar{} : weight_at(weight, filter + 1, piece, column);
    packed[i] = word_of(weight_at(weight, filter, piece, column), next);
  }
}

// The positions of a lane's two rows of an MMA, and its A fragments of a step. `source` is the
// element of the lane's first filter at its first position.
__device__ __forceinline__ int first_row(float, int g) { return g; }
template <class Half>
__device__ __forceinline__ int first_row(Half, int g) {
  return 2 * g;
}
constexpr int kNextRow = kTf32 ? 8 : 1;

__device__ __forceinline__ void load_left(unsigned (&left)[4], const float* source) {
  constexpr int kLine = kPitch / kScalarBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    left[i] = rounded(__float_as_uint(source[i / 2 * 4 * kLine + i % 2 * kNextRow]));
  }
}
template <class Half>
__device__ __forceinline__ void load_left(unsigned (&left)[4], const Half* source) {
  constexpr int kLine = kPitch / kScalarBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Two positions of two filters.
    const unsigned low = *reinterpret_cast<const unsigned*>(source + i * 8 * kLine);
    const unsigned high = *reinterpret_cast<const unsigned*>(source + (i * 8 + 1) * kLine);
    left[2 * i] = (low & 0xffff) | high << 16;
    left[2 * i + 1] = low >> 16 | (high & 0xffff0000u);
  }
}

struct Pass {
  const Scalar* input;  // the output's gradient
  const Scalar* bias;
  Scalar* output;
  Epilogue<C> epilogue;
  unsigned char* stages;
  const uint4* weights;

  __device__ __forceinline__ void copy(int volume, int first, int stage) const {
    constexpr int kCopies = kTile / kVector, kRound = kThreads / kCopies;
    const int thread = static_cast<int>(threadIdx.x);
    const int at = thread % kCopies * kVector;
    const bool exists = first + at < kPositions;
    const Scalar* const source = input + 1ll * volume * (C::filters * kPositions) + first + at;
    unsigned char* const target = stages + stage * kStageBytes + at * kScalarBytes;
#pragma unroll
    for (int i = 0; i < ceil_div(kFilters, kRound); ++i) {
      const int filter = thread / kCopies + i * kRound;
      if (kFilters % kRound != 0 && filter >= kFilters) break;
      const bool valid = exists && filter < C::filters;
      copy_async<16>(target + filter * kPitch, valid ? source + filter * kPositions : input, valid);
    }
  }

  __device__ __forceinline__ void compute(int volume, int first, int stage) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int row = warp % kAcross * kWarpTile + first_row(Scalar{}, g);
    const int four = warp / kAcross * kWarpFours;
    float accs[kRows][kWarpFours][2][4];
    start(accs, four, t);
    const Scalar* source = reinterpret_cast<const Scalar*>(stages + stage * kStageBytes +
                                                           (kTf32 ? t : 2 * t) * kPitch) +
                           row;
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step, source += kStep * (kPitch / kScalarBytes)) {
      unsigned left[kRows][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m) load_left(left[m], source + 16 * m);
#pragma unroll
      for (int n = 0; n < kWarpFours; ++n) {
        if (kFours % 2 != 0 && four + n >= kFours) break;
        const uint4 both = weights[(step * kFours + four + n) * 32 + lane];
        const unsigned right[2][2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) mma(Operand{}, accs[m][n][i], left[m], right[i]);
        }
      }
    }
    finish(accs, volume, first + row, four, t);
  }

  __device__ __forceinline__ void start(float (&accs)[kRows][kWarpFours][2][4], int four,
                                        int t) const {
#pragma unroll
    for (int n = 0; n < kWarpFours; ++n) {
      const int piece = (four + n) * 4 + t;
      const bool exists = bias != nullptr && piece < kPieces;
      const float begin = exists ? widen(bias[piece / kChannelPieces]) : 0.0f;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 8; ++i) accs[m][n][i / 4][i % 4] = begin;
      }
    }
  }

  __device__ __forceinline__ void finish(const float (&accs)[kRows][kWarpFours][2][4], int volume,
                                         int first, int four, int t) const {
    Scalar* const result = output + 1ll * volume * kVolume;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int position = first + 16 * m;
      const int patches[2] = {patch_offset(position), patch_offset(position + kNextRow)};
#pragma unroll
      for (int n = 0; n < kWarpFours; ++n) {
        const int piece = (four + n) * 4 + t, offset = piece_offset(piece);
        if constexpr (C::copied_patches == 2) {
          // The pieces of both positions are neighbours.
          float stored[2 * kPiece];
#pragma unroll
          for (int i = 0; i < 8; ++i) stored[i] = accs[m][n][i % 4 / 2][i / 4 * 2 + i % 2];
          const bool valid = piece < kPieces && position < kPositions;
          store(result + patches[0] + offset, stored, valid, epilogue);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float stored[kPiece];
#pragma unroll
            for (int i = 0; i < 4; ++i) stored[i] = accs[m][n][i / 2][half * 2 + i % 2];
            const bool valid = piece < kPieces && position + half * kNextRow < kPositions;
            store(result + patches[half] + offset, stored, valid, epilogue);
          }
        }
      }
    }
  }
};

}  // namespace restoring

}  // namespace patches
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::patches::kThreads, Config::blocks_per_sm)
    multiply_patches(const Config::Scalar* __restrict__ input,
                     const Config::Scalar* __restrict__ weight,
                     const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
                     int volumes FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::patches;
  unsigned char* const shared = fastconv::shared_memory();
  const auto* const packed = reinterpret_cast<const uint4*>(shared);
  const auto epilogue = FASTCONV_EPILOGUE(output);
  // The first barrier of the walk makes the weights visible to all threads.
  if constexpr (C::transposed) {
    static_assert(!C::transposed || restoring::kSharedBytes == C::shared_bytes, "as planned");
    restoring::pack(weight, reinterpret_cast<unsigned*>(shared));
    unsigned char* const stages = shared + restoring::kWeightBytes;
    walk(restoring::Pass{input, bias, output, epilogue, stages, packed}, volumes);
  } else {
    static_assert(C::transposed || embedding::kSharedBytes == C::shared_bytes, "as planned");
    embedding::pack(weight, reinterpret_cast<unsigned*>(shared));
    unsigned char* const stages = shared + embedding::kWeightBytes;
    walk(embedding::Pass{input, bias, output, epilogue, stages, packed}, volumes);
  }
}
