// Epilogue: a consumer's accumulators go through shared memory to global memory.
#pragma once
#include "hopper/halo/multiply.cuh"
#include "device/tensor/target.cuh"

namespace fastconv {
namespace hopper {

constexpr int kPasses = ceil_div(C::pixels, C::pass_pixels);
constexpr int kStoredPass = C::interleave * C::pass_pixels;
static_assert(!C::bulk_stores || kDepthToSpace || C::out_step_width == C::interleave,
              "of whole rows");

using Pair = decltype(narrow_pair(Scalar{}, 0.0f, 0.0f));

__device__ __forceinline__ void stage_pair(Scalar* target, float first, float second) {
  const auto pair = narrow_pair(Scalar{}, first, second);
  if constexpr (!C::bulk_stores || kStoredWidth % 2 == 0) {
    *reinterpret_cast<Pair*>(target) = pair;
  } else {
    const auto& elements = reinterpret_cast<const Vector<Scalar, 2>&>(pair);
    target[0] = elements.element[0];
    target[1] = elements.element[1];
  }
}

// Stages a pair in a row that continues into the next one (`wraps`). The first pixel lies `past`
// pixels after the row's end, or before it if negative. The kGap pixels after the end are
// discarded, and the next row's pixels are staged right behind this row's.
__device__ __forceinline__ void stage_wrapped(Scalar* target, int past, float first, float second) {
  if constexpr (C::out_width % 2 == 0 && kGap % 2 == 0) {
    if (past < 0) stage_pair(target, first, second);
    if (past >= kGap) stage_pair(target - kGap, first, second);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Scalar value = narrow<Scalar>(i == 0 ? first : second);
      if (past + i < 0) target[i] = value;
      if (past + i >= kGap) target[i - kGap] = value;
    }
  }
}

// The residual of two neighbouring pixels of a channel, for contiguous outputs, loaded straight
// from global memory: the lanes of a warp have neighbouring pixels.
template <bool kAdds>
struct RowResidual {
  // Whether a pair that begins at an even pixel is aligned, and inside the image as a whole or not
  // at all.
  static constexpr bool kPairs = C::bulk_stores && C::out_width % 2 == 0 && C::pitch % 2 == 0 &&
                                 (kStrips == 1 || C::tile_columns % 2 == 0) &&
                                 (!C::wraps || kGap % 2 == 0);
  Scalar first, second;

  // The lane takes one of 8 rows of M from first_row on, and two of 8 pixels from first_pixel on.
  __device__ __forceinline__ RowResidual(const Target& target, const Epilogue<C>& epilogue,
                                         int first_row, int first_pixel, int lane) {
    const int mma_row = first_row + lane / 4;
    const int pixel = first_pixel + lane % 4 * 2;
    if constexpr (kPairs) {
      const auto both = load<2>(target, epilogue, mma_row, pixel);
      first = both.element[0];
      second = both.element[1];
    } else {
      first = load<1>(target, epilogue, mma_row, pixel).element[0];
      second = load<1>(target, epilogue, mma_row, pixel + 1).element[0];
    }
  }
  template <int kCount>
  __device__ __forceinline__ static Vector<Scalar, kCount> load(const Target& target,
                                                                const Epilogue<C>& epilogue,
                                                                int mma_row, int pixel) {
    const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
    int column = target.column - C::lead + pixel - line * C::pitch;
    bool valid = column >= 0 && line < C::tile_rows && target.exists(mma_row, line);
    if constexpr (C::wraps) {
      // After the gap comes the next row.
      const bool beyond = column >= C::out_width + kGap;
      const int end = target.output_row(mma_row, line) + 1 < C::out_height ? 2 : 1;
      valid = valid && (beyond || column < C::out_width);
      if (beyond) column -= kGap;
      valid = valid && column < end * C::out_width;
    } else {
      valid = valid && column < C::out_width;
    }
    return epilogue.residual_of<kCount>(target.place(mma_row, line, column), valid);
  }
};

template <>
struct RowResidual<false> {
  Nothing first, second;

  __device__ RowResidual(const Target&, const Epilogue<C>&, int, int, int) {}
};

// Stages the accumulators of 8 channels as rows of pixels; `half` tells which 8 of the warp's 16.
// With bulk stores, a staged row has the misalignment to 16 bytes that it will have in global
// memory.
template <bool kWrapped>
__device__ __forceinline__ void stage_rows(const float (&acc)[kAccumulators], Scalar* row,
                                           int row_end, int store_pass, int half,
                                           const Finish& finish, const Target& to,
                                           const Epilogue<C>& epilogue, int first_row, int lane) {
  // Recomputes the residuals' addresses for each use: kept, they would take registers that the
  // accumulators need.
  const int fresh_lane = kAddsResidual ? once_more(lane) : lane;
  const int past = lane % 4 * 2 - row_end;
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; ++i) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if (8 * j < C::pixels) {
      Scalar* const target = row + C::interleave * (8 * i + lane % 4 * 2);
      const RowResidual<kAddsResidual> added(to, epilogue, first_row, 8 * j, fresh_lane);
      const float first = finish(acc[4 * j + 2 * half], added.first);
      const float second = finish(acc[4 * j + 2 * half + 1], added.second);
      if constexpr (kWrapped) {
        stage_wrapped(target, 8 * i + past, first, second);
      } else if constexpr (C::interleave == 1) {
        stage_pair(target, first, second);
      } else if constexpr (C::stacked_columns == 2) {
        stage_pair(target, first, finish(acc[4 * j + 2]));
        stage_pair(target + 2, second, finish(acc[4 * j + 3]));
      } else {
        stage_pair(target, C::column_at ? 0.0f : first, C::column_at ? first : 0.0f);
        stage_pair(target + 2, C::column_at ? 0.0f : second, C::column_at ? second : 0.0f);
      }
    }
  }
}

// Whether every stored row, and every strip of one, starts at a multiple of 16 bytes.
constexpr bool kRowsAligned = C::lead == 0 && kStoredWidth % kVector == 0 &&
                              (kStrips == 1 || kStoredColumns % kVector == 0) && !kDepthToSpace;

// Stores columns [begin, end) of a row: whole 16-byte vectors with a bulk copy, the rest element by
// element.
__device__ __forceinline__ void store_columns(Scalar* row, const Scalar* staged, int begin,
                                              int end) {
  if (begin >= end) return;
  const int shift = kRowsAligned ? 0 : misalignment(row, kVector);
  const int aligned_begin = min(round_up(begin + shift, kVector) - shift, end);
  const int aligned_end = max((end + shift) / kVector * kVector - shift, aligned_begin);
  if (aligned_begin < aligned_end) {
    bulk_store(row + aligned_begin, staged + aligned_begin,
               (aligned_end - aligned_begin) * kScalarBytes);
  }
  if constexpr (!kRowsAligned) {
#pragma unroll 1
    for (int x = begin; x < aligned_begin; ++x) row[x] = staged[x];
#pragma unroll 1
    for (int x = aligned_end; x < end; ++x) row[x] = staged[x];
  }
}

// The columns of a row that one pass stores, for the tile's line-th row of pixels. With `lead`,
// they begin at a multiple of `lead` elements in memory. If the strip also `wraps`, the next row's
// own columns begin at such a multiple too, and those before it are stored with this row, as
// columns beyond its end.
struct Window {
  Scalar* row;     // the element in the image's column 0
  int at;          // the stored column of the pass's first pixel, counted along this line
  int begin, end;  // stored columns
  int beyond;      // elements from a multiple of 16 bytes, or of `lead`, to the row's start

  __device__ __forceinline__ Window(Scalar* row, const Target& target, int y, int line,
                                    int store_pass)
      : row(row) {
    at = target.column - C::lead + store_pass * kStoredPass - line * kStoredPitch;
    beyond = kRowsAligned ? 0 : misalignment(row, C::lead > 0 ? C::lead : kVector);
    begin = target.column - (C::lead > 0 ? beyond : 0);
    int first = C::lead > 0 ? 0 : begin;
    int last = kStoredWidth;
    if constexpr (C::wraps) {
      if (y > 0) first = round_up(beyond, C::lead) - beyond;
      if (y + 1 < C::out_height) last = round_up(last + beyond, C::lead) - beyond;
    }
    end = min(min(begin + kStoredColumns, at + kStoredPass), last);
    begin = max(max(begin, first), at);
  }
};

constexpr int kStoringLanes = kDepthToSpace ? 32 : 8;  // lanes of a warp that issue bulk stores

// Stores staged rows of 8 channels, each by one lane: the lanes' bulk copies start one after the
// other, but their addresses are computed in parallel.
__device__ __forceinline__ void store_staged(const Scalar* staging, const Target& target, int first,
                                             int store_pass, int lane) {
  if (lane >= kStoringLanes) return;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
    const int y = target.image_row(first, line, C::row_at);
    if (!target.exists(first + lane, line) || (!kRowsInside && y >= C::image_height)) continue;
    const Window window(target.row_start(first + lane, y), target, y, line, store_pass);
    store_columns(window.row, staging + lane * kRowPitch - window.at + window.beyond % kVector,
                  window.begin, window.end);
  }
  bulk_store_commit();
}

// Clears the neighbouring rows that belong to residues which no tap reaches.
__device__ __forceinline__ void clear_beside(const Target& target, int first, int store_pass,
                                             int lane) {
  constexpr int kCleared = kRowsAligned ? kVector : 1;
  constexpr int kRowsAtOnce = kFewRows ? kPixelRows : 1;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
#pragma unroll kRowsAtOnce
    for (int image_row = C::row_begin; image_row < C::row_end; ++image_row) {
      const int y = target.image_row(first, line, image_row);
      if (!kFewRows && y >= C::image_height) break;
      if (image_row == C::row_at || (!kRowsInside && y >= C::image_height)) continue;
      for (int i = 0; i < 8 && target.exists(first + i, line); ++i) {
        const Window window(target.row_start(first + i, y), target, y, line, store_pass);
        for (int x = window.begin + kCleared * lane; x < window.end; x += kCleared * 32) {
          *reinterpret_cast<Vector<Scalar, kCleared>*>(window.row + x) = {};
        }
      }
    }
  }
}

// Stores contiguous outputs, 8 channels at a time. With `lead`, neighbouring strips share no
// sector.
__device__ __forceinline__ void store_rows(const float (&acc)[kAccumulators],
                                           const Finish (&finish)[2], Scalar* staging,
                                           const Target& target, const Epilogue<C>& epilogue,
                                           int warp, int lane) {
  constexpr int kRowHalves = 2 / C::stacked_columns;
  static_assert(kRowHalves * kPasses % C::buffers == 0, "tiles begin with the same buffer");
#pragma unroll
  for (int half = 0; half < kRowHalves; ++half) {
    const int first = 16 * warp + 8 * half;  // row of M
    const Scalar* const row = target.row_start(first, target.image_row(first, 0, C::row_at));
    const int shift =
        C::bulk_stores ? misalignment(row + static_cast<long long>(lane / 4) * kOutChannel, kVector)
                       : 0;
#pragma unroll
    for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
      if constexpr (C::bulk_stores) {
        if (lane < kStoringLanes) bulk_store_wait_read<C::buffers - 1>();
      }
      __syncwarp();
      Scalar* const buffer = staging + (half * kPasses + store_pass) % C::buffers * (8 * kRowPitch);
      Scalar* const rows = buffer + lane / 4 * kRowPitch + shift;
      const int row_end = C::out_width - target.column + C::lead;  // in pixels
      if (C::wraps && row_end < C::pixels) {
        stage_rows<C::wraps>(acc, rows, row_end, store_pass, half, finish[half], target, epilogue,
                             first, lane);
      } else {
        stage_rows<false>(acc, rows, row_end, store_pass, half, finish[half], target, epilogue,
                          first, lane);
      }
      if constexpr (C::bulk_stores) {
        fence_async_shared();
        __syncwarp();
        store_staged(buffer, target, first, store_pass, lane);
        clear_beside(target, first, store_pass, lane);
      } else {
        __syncwarp();
#pragma unroll 1
        for (int channel = 0; channel < 8; ++channel) {
#pragma unroll
          for (int i = 0; i < ceil_div(kStoredPass, 32); ++i) {
            const int staged = 32 * i + lane;
            const int line = (store_pass * kStoredPass + staged) / kStoredPitch;
            const int at = (store_pass * kStoredPass + staged) % kStoredPitch;
            if (staged < kStoredPass && line < C::tile_rows && at < kStoredColumns &&
                target.column + at < kStoredWidth && target.exists(first + channel, line)) {
              target.store(first + channel, line, target.column + at,
                           buffer[channel * kRowPitch + staged], true);
            }
          }
        }
      }
    }
  }
}

// Stages the accumulators of a warp's 16 channels among pixels of 64 channels, in the place of
// their residuals.
template <class T>
__device__ __forceinline__ void stage_pixels(const float (&acc)[kAccumulators], T* staging,
                                             int store_pass, const Finish (&finish)[2], int warp,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; i += 2) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if constexpr (sizeof(T) == 2) {
      // stmatrix of 2 x 8 pixels by 2 x 8 channels.
      const int pixel = 8 * (i + lane / 16) + lane % 8;
      T* const place = staging + pixel * kPixelPitch + 16 * warp + lane / 8 % 2 * 8;
      unsigned rows[4];
      if constexpr (kAddsResidual) load_transposed(rows, place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = min(4 * (j + k / 2) + k % 2 * 2, kAccumulators - 2);
        if constexpr (kAddsResidual) {
          const auto added = reinterpret_cast<const Vector<T, 2>&>(rows[k]);
          rows[k] = narrow_pair(T{}, finish[k % 2](acc[at], added.element[0]),
                                finish[k % 2](acc[at + 1], added.element[1]));
        } else {
          rows[k] = narrow_pair(T{}, finish[k % 2](acc[at]), finish[k % 2](acc[at + 1]));
        }
      }
      store_transposed(place, rows);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int pixel = 8 * (i + k / 4) + lane % 4 * 2 + k % 2;
        if (8 * (j + k / 4) < C::pixels) {
          T& place = staging[pixel * kPixelPitch + 16 * warp + lane / 4 + k / 2 % 2 * 8];
          place = narrow<T>(finish[k / 2 % 2](acc[4 * j + k], Epilogue<C>::staged(place)));
        }
      }
    }
  }
}

// Channels-last outputs: a pixel's 64 channels are neighbours in memory. With `joint_stores`, both
// consumers store a pixel's 128 channels together.
constexpr int kStoring = C::joint_stores ? kConsumers : 1;  // consumers that store together
static_assert(!C::joint_stores || (C::out_channels_last && C::channel_groups == kConsumers &&
                                   kStackChannels == kOutputs && !C::turns),
              "the same pixels at the same time");

__device__ __forceinline__ void storing_sync(int warpgroup) {
  if constexpr (C::joint_stores) {
    warpgroups_sync<2>(kConsumers);
  } else {
    warpgroup_sync(warpgroup);
  }
}

__device__ __forceinline__ void store_pixels(const float (&acc)[kAccumulators],
                                             const Finish (&finish)[2], Scalar* staging,
                                             const Target& target, const Epilogue<C>& epilogue,
                                             int warpgroup, int warp, int lane) {
  using Stored = Either<C::vector_stores, uint4, Scalar>::type;
  constexpr int kStored = C::vector_stores ? kVector : 1;  // channels of one store
  constexpr int kStores = kStoring * kOutputs / kStored;   // stores of a pixel
  constexpr int kStep = kStoring * 128 / kStores;          // pixels stored by all threads at once
  constexpr int kAtOnce = 4;                               // loads that a thread has in flight
  const int thread = (C::joint_stores ? 128 * warpgroup : 0) + 32 * warp + lane;
  const int channel = thread % kStores * kStored;
  const int mma_row = channel % kOutputs;
  // Which consumer's accumulators the thread stores: 0 its own, -1 or 1 those of the one before or
  // after it.
  const int other = C::joint_stores ? channel / kOutputs - warpgroup : 0;
  Scalar* const staged = staging + other * (kStagingBytes / kScalarBytes) + mma_row;
  Target owner = target;
  owner.outputs += other * kOutputs;
  const int columns = min(C::tile_columns, C::out_width - target.column);
#pragma unroll
  for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
    const int count = min(C::pass_pixels, C::pixels - store_pass * C::pass_pixels);
    storing_sync(warpgroup);
    if constexpr (kAddsResidual) {
#pragma unroll 1
      for (int first = thread / kStores; first < count; first += kAtOnce * kStep) {
        Vector<Scalar, kStored> values[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int pixel = store_pass * C::pass_pixels + first + k * kStep;
          const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
          const int at = pixel - line * C::pitch;
          values[k] =
              epilogue.residual_of<kStored>(owner.place(mma_row, line, target.column + at),
                                            first + k * kStep < count && line < C::tile_rows &&
                                                at < columns && owner.exists(mma_row, line));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int pixel = first + k * kStep;
          if (pixel < count) {
            *reinterpret_cast<Vector<Scalar, kStored>*>(staged + pixel * kPixelPitch) = values[k];
          }
        }
      }
      storing_sync(warpgroup);
    }
    stage_pixels(acc, staging, store_pass, finish, warp, lane);
    storing_sync(warpgroup);
#pragma unroll 1
    for (int first = thread / kStores; first < count; first += kAtOnce * kStep) {
      Stored values[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = min(first + k * kStep, count - 1);
        values[k] = *reinterpret_cast<const Stored*>(staged + pixel * kPixelPitch);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = store_pass * C::pass_pixels + first + k * kStep;
        const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
        const int at = pixel - line * C::pitch;
        owner.store(mma_row, line, target.column + at, values[k],
                    first + k * kStep < count && line < C::tile_rows && at < columns &&
                        owner.exists(mma_row, line));
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
