// Contiguous (NCHW) input: copied to shared memory as it lies in global memory, then transposed
// from there into the halo tile.
//
// Each loading warp copies pieces: one line of as many channels as one or two 16-byte vectors of
// the tile have (`piece_vectors`). The copies run some pieces ahead of the one that the warp
// transposes, rounds or splits. A TMA box brings a piece at once (`box_loads`): the tensor map has
// all pixels of a plane as one dimension, so that a line may continue into the next row, and
// columns that are padding are whatever lies there. Otherwise, a long line takes one bulk copy per
// channel
// (`bulk_loads`), a short one cp.async of 16 bytes per lane. All of them start at the multiple of
// 16 bytes before a line's first pixel, so that rows may begin anywhere. A line has the columns of
// all residues of a column stride, which are taken apart as they are transposed: each column of the
// image is copied once.
#pragma once
#include "device/tensor/load.cuh"

namespace fastconv {
namespace hopper {

// The input as the kernel is given it. TMA boxes are found by coordinates, so the addresses that
// pieces have are not read from; they are counted from the tensor map because null has no offsets.
using Given = Either<C::box_loads, TensorMap, const void*>::type;
__device__ __forceinline__ const Loaded* address_of(const void* given) {
  return static_cast<const Loaded*>(given);
}
__device__ __forceinline__ const Loaded* address_of(const TensorMap& given) {
  return reinterpret_cast<const Loaded*>(&given);
}

constexpr int kLinePieces = C::k_steps * 2 / C::piece_vectors;  // pieces of a line's channels
constexpr int kPieces = kLinePieces * kRowSlots * kStageRows;
static_assert(!C::staged || (!C::in_channels_last && !kSpaceToDepth), "");

// The column of a line that a residue's pixel reads. Residues are counted by their slots.
__device__ __forceinline__ int raw_column(int slot, int pixel) {
  const int residue = kColumnSlots == 1 ? 0 : slot * kColumnStep % kColumnResidues;
  return kColumnUnit * residue + pixel * C::stride_width;
}

// Iterates over the pieces of one warp: every kLoaderWarps-th, from stage to stage.
struct PieceCursor : StageCursor {
  int piece;

  __device__ PieceCursor(const Items& items, int warp) : StageCursor(items), piece(warp) {
    settle();
  }
  __device__ void settle() {
    for (; piece >= kPieces && more(); piece -= kPieces) StageCursor::advance();
  }
  __device__ void advance() {
    piece += kLoaderWarps;
    settle();
  }
};

// A piece, and which part of it lies inside the image.
struct Piece : Front {
  int channel;          // first channel, in its group
  int target;           // offset of its first pixel in its stage, in units of 16 bytes
  int before;           // columns of padding before the first column inside
  int columns;          // columns inside
  int start;            // the line's first column, in pixels of its plane
  const Loaded* first;  // first column inside; in images, of the first channel

  __device__ Piece(const Source& source, int index) : Front(source.front) {
    const int of_line = index % kLinePieces;
    const int line = index / kLinePieces;
    const int slot = kRowSlots == 1 ? 0 : line / kStageRows;
    const int y = source.row +
                  C::dilation_height * (slot + (line - slot * kStageRows) * kRowResidues) -
                  C::padding_top;
    const int x = source.column - C::padding_left;
    channel = source.channel + of_line * kPieceChannels;
    const int lines_before =
        kColumnSlots == 1 ? line : line + slot * (kColumnSlots - 1) * kStageRows;
    target = C::piece_vectors * of_line * kPlanePixels + lines_before * C::pitch;
    before = max(-x, 0);
    bool exists = static_cast<unsigned>(y) < static_cast<unsigned>(C::in_height);
    int end = C::in_width - x;
    start = y * C::in_width + x;
    if constexpr (C::wraps) {
      // The strip continues into the next row, if there is one. Above the image, that row is all
      // that the piece has.
      if (y == -1) before = end;
      if (y + 1 < C::in_height) end += C::in_width;
      exists = exists || y == -1;
    }
    columns = exists ? max(min(kRawReach, end) - before, 0) : 0;
    if constexpr (Depth::exists) {
      first = source.group + (InOffset{y} * kInRow + x + before);
    } else {
      first = source.group + (InOffset{channel} * kInChannel + InOffset{y} * kInRow + x + before);
    }
  }
  __device__ __forceinline__ bool has(int of_piece) const {
    if constexpr (Depth::exists) {
      if (!plane_exists(front, channel + of_piece)) return false;
    }
    return kWholeChunks || channel + of_piece < C::group_in;
  }
  __device__ __forceinline__ bool has_all() const {
    if constexpr (Depth::exists) {
      // Planes that lie between two of the volume's are its own.
      const int last = channel + kPieceChannels - 1;
      if (!plane_exists(front, channel) || !plane_exists(front, last)) return false;
    }
    return kWholeChunks || channel + kPieceChannels <= C::group_in;
  }
  // The offset of one of the piece's channels, from the first column inside.
  template <class Index>
  __device__ __forceinline__ auto offset(Index of_piece) const {
    if constexpr (Depth::exists) {
      return channel_offset(channel + static_cast<int>(of_piece));
    } else {
      return of_piece * kInChannel;
    }
  }
  // Where a channel's line begins among the elements of the piece, with the columns of padding.
  __device__ __forceinline__ int raw_start(int of_piece) const {
    const int at = of_piece * kRawChannel;
    return C::box_loads ? at + box_shift() : at + shift(of_piece) - before;
  }
  // Pixels of a box before the line's first column: those after a multiple of 16 bytes.
  __device__ __forceinline__ int box_shift() const { return start & (kVector - 1); }
  // The misalignment of a channel's first pixel: elements after a multiple of 16 bytes.
  __device__ __forceinline__ int shift(int of_piece) const {
    if constexpr (kRawAligned) return 0;
    const auto low_bits = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first));
    return static_cast<int>(
        (low_bits / kScalarBytes + static_cast<unsigned>(offset(static_cast<unsigned>(of_piece)))) %
        kVector);
  }
};

// Starts the copy of a piece as a TMA box.
__device__ __forceinline__ void fetch_box(const TensorMap& input, const Piece& piece,
                                          const Item& item, Loaded* raw, Barrier* full, int lane) {
  if (lane > 0) return;
  barrier_arrive_expect(full, piece.columns > 0 ? kBoxBytes : 0);
  if (piece.columns == 0) return;
  const InChannel read(piece.channel);
  const int channel = item.group * kInChannels + read.channel;
  const int first = piece.start - piece.box_shift();
  if constexpr (Depth::exists) {
    const int plane = piece.front + read.plane();
    tensor_load(raw, input, {first, plane, channel, item.image / Depth::out}, full);
  } else {
    tensor_load(raw, input, {first, channel, item.image}, full);
  }
}
__device__ __forceinline__ void fetch_box(const void*, const Piece&, const Item&, Loaded*, Barrier*,
                                          int) {}

// Starts the bulk copies of a piece: each of the first kPieceChannels lanes copies its channel.
__device__ __forceinline__ void fetch_lines(const Piece& piece, const Loaded* input_end,
                                            Loaded* raw, Barrier* full, int lane) {
  if (lane >= kPieceChannels) return;
  int bytes = 0;
  if (piece.columns > 0 && piece.has(lane)) {
    const int shift = piece.shift(lane);
    const Loaded* const source = piece.first + piece.offset(lane) - shift;
    const int count = shift + piece.columns;
    Loaded* const target = raw + lane * kRawChannel;
    bytes = round_up(count, kVector) * kScalarBytes;
    if (kInImage % kVector != 0 && source + round_up(count, kVector) > input_end) {
      // The tensor ends within the last 16 bytes.
      bytes -= 16;
      for (int i = bytes / kScalarBytes; i < count; ++i) target[i] = source[i];
    }
    if (bytes > 0) bulk_load(target, source, bytes, full);
  }
  // The mbarrier's phase completes when all these lanes have arrived and all bytes are there.
  barrier_arrive_expect(full, bytes);
}

// Starts the copies of a piece with cp.async, 16 bytes per lane at a time.
__device__ __forceinline__ void fetch_vectors(const Piece& piece, const Loaded* input_end,
                                              Loaded* raw, int lane) {
  constexpr int kOfChannel = kRawChannel / kVector;
  constexpr int kOfPiece = kPieceChannels * kOfChannel;
#pragma unroll 4
  for (int i = lane; i < kOfPiece; i += 32) {
    const int channel = i / kOfChannel;
    const int at = i % kOfChannel * kVector;
    const int count = piece.shift(channel) + piece.columns;
    if (at >= count || piece.columns == 0 || !piece.has(channel)) continue;
    const Loaded* const source = piece.first + (piece.offset(channel) - piece.shift(channel) + at);
    Loaded* const target = raw + channel * kRawChannel + at;
    if (kInImage % kVector != 0 && source + kVector > input_end) {
      // The tensor ends within these 16 bytes.
      for (int j = 0; j < count - at; ++j) target[j] = source[j];
    } else {
      copy_async<16>(target, source, true);
    }
  }
}

// Writes one vector of channels for each of C::batch pixels of a residue, 32 apart, to the input
// stage.
template <bool kInside>
__device__ __forceinline__ void convert_batch(const Piece& piece, int plane, int slot,
                                              const Loaded* const (&channels)[kVectorChannels],
                                              unsigned char* target, int first, const Scale& scale,
                                              Range& range) {
  Channels vectors[C::batch];
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    const int column = raw_column(slot, pixel);
    const bool inside = kInside ? pixel < C::pitch
                                : static_cast<unsigned>(column - piece.before) <
                                      static_cast<unsigned>(piece.columns);
    Loaded elements[kVectorChannels];
#pragma unroll
    for (int j = 0; j < kVectorChannels; ++j) {
      const bool valid = inside && (kInside || piece.has(plane * kVectorChannels + j));
      elements[j] = valid ? channels[j][column] : Loaded{};
    }
    vectors[k] = vector_of<Channels>(elements);
  }
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    if (pixel < C::pitch) {
      store_input(target + pixel * 16, kPartPixels * 16, vectors[k], scale, range);
    }
  }
}

// Transposes a piece that has arrived into its input stage. `scales` belong to its vectors, and
// `of_chunk` is its first channel in the chunk.
__device__ __forceinline__ void convert(const Piece& piece, const Loaded* raw, unsigned char* stage,
                                        int lane, const Scale (&scales)[2],
                                        const ChunkPowers<kPowersCopied>& powers, int of_chunk,
                                        Range& range) {
  const bool whole = piece.columns == kRawReach && piece.has_all();
#pragma unroll
  for (int plane = 0; plane < C::piece_vectors; ++plane) {
    // Operands in two parts leave no registers for the scales of both vectors.
    const Scale scale =
        C::parts == 1 ? scales[plane] : powers.of(of_chunk + plane * kVectorChannels);
    const Loaded* channels[kVectorChannels];  // the line's first column, which may be padding
#pragma unroll
    for (int j = 0; j < kVectorChannels; ++j) {
      const int i = plane * kVectorChannels + j;
      channels[j] = raw + piece.raw_start(i);
    }
    unsigned char* target = stage + (piece.target + plane * kPlanePixels) * 16;
#pragma unroll 1
    for (int slot = 0; slot < kColumnSlots; ++slot, target += kSlotPixels * 16) {
      if (whole) {
#pragma unroll
        for (int first = 0; first < C::pitch; first += 32 * C::batch) {
          convert_batch<true>(piece, plane, slot, channels, target, first + lane, scale, range);
        }
      } else {
#pragma unroll
        for (int first = 0; first < C::pitch; first += 32 * C::batch) {
          convert_batch<false>(piece, plane, slot, channels, target, first + lane, scale, range);
        }
      }
    }
  }
}

// Checks the range of every number that pixels read in those channels of a piece whose power is
// marked negative, because the sample did not prove them large enough (see scale.cuh).
__device__ __forceinline__ void inspect(const Piece& piece, const Loaded* raw, int lane,
                                        const ChunkPowers<kPowersCopied>& powers, int of_chunk,
                                        Range& range) {
#pragma unroll 1
  for (int i = 0; i < kPieceChannels; ++i) {
    const float power = powers.powers[of_chunk + i];
    if (power >= 0.0f || !piece.has(i)) continue;
    const Loaded* const channel = raw + piece.raw_start(i) + piece.before;
    if constexpr (C::stride_width == 1) {
      for (int column = lane; column < piece.columns; column += 32) {
        const float number = widen(channel[column]);
        range.see(number, number * power);
      }
    } else {
      for (int at = lane; at < kColumnSlots * C::pitch; at += 32) {
        const int column = raw_column(at / C::pitch, at % C::pitch) - piece.before;
        if (static_cast<unsigned>(column) >= static_cast<unsigned>(piece.columns)) continue;
        const float number = widen(channel[column]);
        range.see(number, number * power);
      }
    }
  }
}

// The loading warps: fill all input stages.
__device__ __forceinline__ void stage_input(const Given& given, const Loaded* input,
                                            const Loaded* input_end, const Items& items) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The shuffle tells the compiler that the warp's number is uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 1;
  Barrier* const full = barriers().raw_full + warp * C::raw_slots;
  Loaded* const raw =
      reinterpret_cast<Loaded*>(shared_memory() + kRawRing + warp * C::raw_slots * kRawBytes);
  PieceCursor next(items, warp);
  const auto fetch_next = [&](int slot) {
    if (next.more()) {
      const Piece piece(Source(input, next), next.piece);
      if constexpr (C::box_loads) {
        fetch_box(given, piece, next.item, raw + slot * kRawElements, full + slot, lane);
      } else if constexpr (C::bulk_loads) {
        fetch_lines(piece, input_end, raw + slot * kRawElements, full + slot, lane);
      } else {
        fetch_vectors(piece, input_end, raw + slot * kRawElements, lane);
      }
      next.advance();
    }
    if constexpr (!C::bulk_loads) copy_async_commit();  // may be empty: waits count groups
  };
  for (int slot = 0; slot < C::raw_slots; ++slot) fetch_next(slot);
  Ring<C::input_stages> at(1);
  Ring<C::raw_slots> arrived(0);
  ChunkPowers<kPowersCopied> powers(Input::powers(warp));
  int piece = warp;
  for (StageCursor stage(items); stage.more(); stage.advance()) {
    const Source source(input, stage);
    Range range;
    powers.load(items, stage.item.image, source.column_of(stage.item.group));
    Input::wait(at);
    for (; piece < kPieces; piece += kLoaderWarps) {
      const int of_chunk = piece % kLinePieces * kPieceChannels;
      const Scale scales[2] = {powers.of(of_chunk),
                               powers.of(of_chunk + (C::piece_vectors - 1) * kVectorChannels)};
      if constexpr (C::bulk_loads) {
        barrier_wait(full + arrived.stage, arrived.parity);
      } else {
        copy_async_wait<C::raw_slots - 1>();
        __syncwarp();
      }
      const Loaded* const arrived_raw = raw + arrived.stage * kRawElements;
      convert(Piece(source, piece), arrived_raw, Input::stage(at.stage), lane, scales, powers,
              of_chunk, range);
      if (powers.strict) inspect(Piece(source, piece), arrived_raw, lane, powers, of_chunk, range);
      __syncwarp();
      fetch_next(arrived.stage);
      arrived.advance();
    }
    piece -= kPieces;
    judge<Input>(items, range, stage.item.image, at.stage);
    Input::show(at.stage);
    at.advance();
  }
}

}  // namespace hopper
}  // namespace fastconv
