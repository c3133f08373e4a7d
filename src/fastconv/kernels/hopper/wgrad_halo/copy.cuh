// Producer warps of grad_output: copy it to shared memory as it is.
#pragma once
#include "hopper/wgrad_halo/tile.cuh"

namespace fastconv {
namespace hopper {

// How the four producer warps are divided.
constexpr int kGradWarps = C::grad_boxes && !kClears ? 1 : 2;
constexpr int kInputWarps = 4 - kGradWarps;
constexpr int kGradArrivals = C::grad_boxes ? 1 : 32 * kGradWarps;  // arrivals that fill a stage
constexpr int kInImage = C::groups * kInChannels * Depth::in * C::in_height * C::in_width;
constexpr int kInColumn = C::in_channels_last ? C::groups * C::group_in : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInChannel = C::in_channels_last ? 1 : Depth::in * kInPlane;
constexpr int kOutPlane = C::out_height * C::out_width;
constexpr int kOutChannel = Depth::out * kOutPlane;
constexpr int kOutImage = C::groups * C::group_out * kOutChannel;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");
static_assert(elements_of(C::groups, C::group_out, Depth::out, C::out_height, C::out_width) <
                  kMostElements,
              "");

// The offset of an image in grad_output, or of an output plane.
template <class Offset>
__device__ __forceinline__ Offset grad_image(int image) {
  if constexpr (Depth::exists) {
    return static_cast<Offset>(image / Depth::out) * kOutImage +
           static_cast<Offset>(image % Depth::out) * kOutPlane;
  } else {
    return static_cast<Offset>(image) * kOutImage;
  }
}

// By how many columns a step begins early. It is the same for all members, and for all channels of
// an alignment class.
__device__ __forceinline__ int early(int output_row, int of_class = 0) {
  // The row may be beyond the image; the lowest bits are right in any case.
  const unsigned first = static_cast<unsigned>(output_row) * C::out_width +
                         static_cast<unsigned>(of_class) * kOutChannel;
  return C::lead == 0 ? 0 : static_cast<int>(first % static_cast<unsigned>(kVector));
}

// Where a member of a step lies in grad_output.
struct MemberPlace {
  int image;
  int row;
  bool exists;

  // `first_image` and `first_row` are those of member 0.
  __device__ MemberPlace(int first_image, int first_row, int member, int batch) {
    image = first_image + member % C::interleaved_images;
    row = first_row + member / C::interleaved_images * (kSteps * kRowStep);
    exists = image < batch && row < C::out_height;
  }
};

// Elements that a lane copies at once: at a row's ends, which are whole multiples of them, or of a
// pixel's channels. Less than 4 bytes are stored from registers, since cp.async cannot copy them.
constexpr int kCopied = C::grad_channels_last ? C::grad_vector : gcd(C::out_width, C::grad_vector);
// Inside of a row, lanes copy whole units of 16 bytes.
constexpr int kMostCopied = C::grad_channels_last || kShifted ? kCopied : kVector;

// The part of a step that fills a stage.
struct StagePlace {
  int image;  // image of member 0
  int row;
  int column;   // first column
  int columns;  // columns that consumers read
};

// Elements from the last multiple of 16 bytes to an address.
__device__ __forceinline__ int misalignment(const Scalar* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) / kScalarBytes % kVector);
}

// The units of 16 bytes of a row in a stage, beginning at `column` of the row. One bulk copy takes
// [begin, end), all units that lie entirely in the row.
struct Units {
  int column;
  int begin;
  int end;
  int count;

  // `row` is any address with the alignment of the row's first column.
  __device__ Units(const Scalar* row, const StagePlace& place, bool exists) {
    column = place.column - (kShifted ? misalignment(row) : early(place.row));
    count = place.columns / kVector + (kShifted ? 1 : 0);
    begin = column < 0 ? 1 : 0;
    end = max(min(count, floor_div(C::out_width - column, kVector)), begin);
    if (!exists) end = begin;
  }

  __device__ int bytes() const { return (end - begin) * 16; }
};

// A warp's part of the copies of a stage: the rows of some channels, of all members. One bulk copy
// brings the whole units inside of a row; lanes copy the others, and write zeros beyond a row's
// ends.
struct RowCopier {
  static constexpr int kChannels = kStageChannels / kGradWarps;

  const Scalar* channels;  // the first channel, in image 0
  int count;               // channels that exist
  int first;               // index of the first among the stage's channels
  int lane;

  __device__ RowCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    first = thread / 32 * kChannels;
    lane = thread % 32;
    const int channel = tile.output + first;
    channels =
        grad_output + static_cast<long long>(tile.group * C::group_out + channel) * kOutChannel;
    count = C::group_out % kStageChannels == 0 ? kChannels
                                               : max(min(kChannels, C::group_out - channel), 0);
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int member = 0; member < kInterleave; ++member) {
      const MemberPlace of(place.image, place.row, member, batch);
      const Scalar* const row =
          channels + (of.exists ? grad_image<long long>(of.image) + of.row * C::out_width : 0);
      unsigned char* const target = stage + stage_row(first, member) * kRowBytes;
      if constexpr (!C::grad_bulk) {
        copy_all(target, row, place, of.exists);
      } else {
        if (of.exists && is_elected()) copy_inside(target, row, barrier, place);
        if (!of.exists || has_edges(place)) copy_edges(target, row, place, of.exists);
      }
    }
  }

  // Whether some row of the stage may have units that are not entirely inside of it.
  __device__ static __forceinline__ bool has_edges(const StagePlace& place) {
    const int first = place.column - (kShifted ? kVector - 1 : early(place.row));
    const int end = place.column - early(place.row) + place.columns + (kShifted ? kVector : 0);
    return first < 0 || end > C::out_width;
  }

  // Called by the elected lane. All operands are the same for the whole warp.
  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* row,
                                              Barrier* barrier, const StagePlace& place) const {
    if constexpr (!kShifted) {
      const Units units(row, place, true);  // the same for every row
      if (units.bytes() == 0) return;
      barrier_expect(barrier, count * units.bytes());
      const Scalar* source = row + (units.column + units.begin * kVector);
      unsigned char* to = target + units.begin * 16;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        bulk_load(to, source, units.bytes(), barrier);
        to += 4 * kRowBytes;
        source += kOutChannel;
      }
    } else {
      int bytes = 0;
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const Scalar* const of = row + i * kOutChannel;
        const Units units(of, place, true);
        bytes += units.bytes();
        if (units.bytes() == 0) continue;
        bulk_load(target + i * (4 * kRowBytes) + units.begin * 16,
                  of + (units.column + units.begin * kVector), units.bytes(), barrier);
      }
      barrier_expect(barrier, bytes);
    }
  }

  // Copies what copy_inside leaves out, one row for each lane, with zeros beyond the row's ends.
  __device__ __forceinline__ void copy_edges(unsigned char* target, const Scalar* row,
                                             const StagePlace& place, bool exists) const {
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const Scalar* const source = row + i * kOutChannel;
      unsigned char* const to = target + i * (4 * kRowBytes);
      const Units units(source, place, exists);
      if (units.begin > 0) copy_unit(to, source, units.column, exists);
#pragma unroll 1
      for (int unit = units.end; unit < units.count; ++unit) {
        copy_unit(to + unit * 16, source, units.column + unit * kVector, exists);
      }
    }
  }

  // Copies all units without bulk copies: neighbouring lanes have neighbouring units.
  __device__ __forceinline__ void copy_all(unsigned char* target, const Scalar* row,
                                           const StagePlace& place, bool exists) const {
#pragma unroll 2
    for (int i = lane; i < count * kStageUnits; i += 32) {
      const int channel = i / kStageUnits;
      const int unit = i % kStageUnits;
      const Scalar* const source = row + channel * kOutChannel;
      const Units units(source, place, exists);
      if (unit < units.count) {
        copy_unit(target + channel * (4 * kRowBytes) + unit * 16, source,
                  units.column + unit * kVector, exists);
      }
    }
  }

  // Copies 16 bytes of a row, from a column on, with zeros beyond its ends, or everywhere if the
  // row does not exist (then `row` is just an aligned address).
  __device__ static __forceinline__ void copy_unit(unsigned char* target, const Scalar* row,
                                                   int column, bool exists) {
    Scalar* const unit = reinterpret_cast<Scalar*>(target);
    const bool inside = column >= 0 && column + kVector <= C::out_width;
    if (!kShifted && (inside || !exists)) {
      copy_elements<kVector>(unit, row + (exists ? column : 0), exists);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; i += kCopied) {
      const int at = column + i;
      const bool valid = exists && at >= 0 && at < C::out_width;
      copy_elements<kCopied>(unit + i, row + (valid ? at : 0), valid);
    }
  }
};

// The copies of channels-last tensors. The warps take turns at the members. A member's columns are
// one bulk copy if all channels of a pixel are the block's, otherwise each column is one.
struct PixelCopier {
  static constexpr int kOutChannels = C::groups * C::group_out;
  // With several groups, a pixel has channels of other groups between the block's.
  static constexpr bool kWholePixels = C::groups == 1 && kOutChannels == kStageChannels;
  static constexpr int kPixelVectors = kStageChannels / kVector;
  using Offset = IndexTo<elements_of(kCoveredRows, C::out_width, kOutChannels) +
                         elements_of(kStrips, kStripColumns, kOutChannels)>;

  const Scalar* channels;
  int count;  // channels that exist
  int warp;
  int lane;

  __device__ PixelCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    channels = grad_output + (tile.group * C::group_out + tile.output);
    count = min(kStageChannels, C::group_out - tile.output);
    warp = thread / 32;
    lane = thread % 32;
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int member = warp; member < kInterleave; member += kGradWarps) {
      const MemberPlace of(place.image, place.row, member, batch);
      const int columns = of.exists ? min(place.columns, C::out_width - place.column) : 0;
      const Scalar* const pixel =
          channels + static_cast<long long>(of.image) * kOutImage +
          (static_cast<Offset>(of.row) * C::out_width + place.column) * kOutChannels;
      unsigned char* const target = stage + member * kMemberBytes;
      if (C::grad_bulk && columns > 0 && is_elected()) copy_inside(target, pixel, columns, barrier);
      copy_rest(target, pixel, C::grad_bulk ? max(columns, 0) : 0, columns, place.columns);
    }
  }

  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* pixel,
                                              int columns, Barrier* barrier) const {
    const int bytes = count * kScalarBytes;
    barrier_expect(barrier, columns * bytes);
    if constexpr (kWholePixels) {
      bulk_load(target, pixel, columns * bytes, barrier);
    } else {
#pragma unroll 4
      for (int i = 0; i < columns; ++i) {
        bulk_load(target + i * kPixelBytes, pixel + i * kOutChannels, bytes, barrier);
      }
    }
  }

  // Copies columns from `first` to `end`, with zeros from `columns` on.
  __device__ __forceinline__ void copy_rest(unsigned char* target, const Scalar* pixel, int first,
                                            int columns, int end) const {
    for (int i = first * kPixelVectors + lane; i < end * kPixelVectors; i += 32) {
      const int column = i / kPixelVectors;
      const int channel = i % kPixelVectors * kVector;
      Scalar* const unit = reinterpret_cast<Scalar*>(target + i * 16);
#pragma unroll
      for (int j = 0; j < kVector; j += kCopied) {
        const bool exists = column < columns && channel + j < count;
        copy_elements<kCopied>(
            unit + j, exists ? pixel + column * kOutChannels + channel + j : channels, exists);
      }
    }
  }
};

template <bool kChannelsLast>
struct CopierFor {
  using type = RowCopier;
};
template <>
struct CopierFor<true> {
  using type = PixelCopier;
};
using GradCopier = CopierFor<C::grad_channels_last>::type;

// Arrives when everything that this thread has stored or copied to shared memory is visible.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  constexpr bool kCopies = kMostCopied * kScalarBytes >= 4;
  constexpr bool kWrites = kCopied * kScalarBytes < 4;
  if constexpr (kCopies && kWrites) {
    barrier_expect_copies(barrier);
    barrier_arrive(barrier);
  } else if constexpr (kCopies) {
    barrier_arrive_after_copies(barrier);
  } else {
    barrier_arrive(barrier);
  }
}

// Calls `fill` for every stage that the block needs, when it is empty, with its position in the
// ring.
template <class Fill>
__device__ __forceinline__ void for_stages(const Partition& partition, Fill fill) {
  Share share = partition.share();
  Ring<C::grad_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const int columns = columns_of(run.strip);
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
#pragma unroll 1
      for (int column = 0; column < columns; column += C::stage_columns) {
        barrier_wait(&barriers().grad_empty[at.stage()], at.parity());
        fill(at, StagePlace{run.image, run.output_row(step), run.strip * kStripColumns + column,
                            min(C::stage_columns, columns - column)});
        at.advance();
      }
    }
  }
}
__device__ __forceinline__ unsigned char* grad_stage(const Ring<C::grad_stages>& at) {
  return shared_memory() + kGradRing + at.stage() * kStageBytes;
}

// Copies grad_output with two warps.
__device__ __forceinline__ void load_grad(const Scalar* grad_output, const Partition& partition) {
  const GradCopier copier(grad_output, partition.tile(), static_cast<int>(threadIdx.x));
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    Barrier* const full = &barriers().grad_full[at.stage()];
    // Bulk copies will overwrite what lanes may have stored to the stage.
    fence_async_shared();
    __syncwarp();
    copier.copy(grad_stage(at), full, partition.batch, place);
    __syncwarp();
    arrive_after_copies(full);
  });
}

// Copies grad_output with one lane, in TMA boxes of all channels and members. TMA gives zeros
// beyond the tensor's ends.
__device__ __forceinline__ void load_boxes(const TensorMap& grad_output,
                                           const Partition& partition) {
  tensor_map_prefetch(grad_output);
  const Tile tile = partition.tile();
  const int channel = (tile.group * C::group_out + tile.output) / kClasses;
  const int plane = tile.of_class() * kOutChannel;
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    Barrier* const full = (kClears ? barriers().box_full : barriers().grad_full) + at.stage();
    const int images = place.image / kLaneMembers;
    barrier_arrive_expect(full, kStageBytes);
    if constexpr (kClears) {
      fence_async_shared();  // clear_boxes has written to the stage
      const int first = place.column - early(place.row, tile.of_class());
      // A row of the tensor map is several planes, one behind the other. A row beyond the image
      // would be one of the next plane: its box goes behind all planes instead, where TMA gives
      // zeros.
      const bool exists = kSteps * kRowStep <= C::out_height || place.row < C::out_height;
      const int pixel = exists ? plane + place.row * C::out_width + first : kClasses * kOutChannel;
      tensor_load(grad_stage(at), grad_output, {pixel, images, channel, 0}, full);
    } else {
      tensor_load(grad_stage(at), grad_output, {place.column, images, channel, 0, place.row}, full);
    }
  });
}

// Writes zeros to columns [begin, end) of a lane's rows.
__device__ __forceinline__ void clear_columns(unsigned char* stage, int begin, int end) {
  if (begin >= end) return;  // most stages have nothing to clear, and consumers wait for them
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kStageRows; row += 32) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int at = row * kRowBytes + (i * kScalarBytes ^ swizzle_of(row));
      *reinterpret_cast<Scalar*>(stage + at) = Scalar{};
    }
  }
}

// Clears what a box has beyond its row's ends.
__device__ __forceinline__ void clear_box(unsigned char* stage, const StagePlace& place,
                                          int of_class) {
  const int first = place.column - early(place.row, of_class);
  clear_columns(stage, 0, -first);
  // The box may begin beyond the row's end.
  clear_columns(stage, max(C::out_width - first, 0), place.columns);
}

// Clears every box with one warp, and hands it to the consumers.
__device__ __forceinline__ void clear_boxes(const Partition& partition) {
  const int of_class = partition.tile().of_class();
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    barrier_wait(&barriers().box_full[at.stage()], 1u - at.parity());
    clear_box(grad_stage(at), place, of_class);
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers().grad_full[at.stage()]);
  });
}

__device__ __forceinline__ void load_grad(const TensorMap& grad_output,
                                          const Partition& partition) {
  if (kClears && threadIdx.x >= 32) {
    clear_boxes(partition);
  } else if (is_elected()) {
    load_boxes(grad_output, partition);
  }
}

// The kernel's parameter for grad_output.
using Grad = Either<C::grad_boxes, TensorMap, const Scalar*>::type;
__device__ __forceinline__ int misalignment(const TensorMap&) { return 0; }

}  // namespace hopper
}  // namespace fastconv
