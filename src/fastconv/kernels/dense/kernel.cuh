// Layers with one output position, whose kernel covers the whole image: products of small matrices.
//
//   result[row][column] = sum over k of left(row, k) * right(column, k)
//
//                    rows             columns               k
//   forward          images           output channels       the image's numbers
//   input gradient   images           the image's numbers   output channels
//   weight gradient  output channels  the image's numbers   images
//
// Such layers take no longer than a launch and a few accesses to memory, so a block requests all
// that it needs before it waits for anything, and its threads divide k among them: a slice of the
// threads has four neighbouring k of every 4 * slices. Slices are added up in their order, so a
// result does not depend on the number of images.
#include "device/begin.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace dense {

using Scalar = Config::Scalar;
using Acc = AccOf<Scalar>::type;

// A thread computes kOwn rows by kOwn columns, from four k at a time.
constexpr int kOwn = 4;
constexpr int kStageK = 4 * Config::slices * Config::steps;
constexpr int kRowLanes = Config::tile_rows / kOwn;
constexpr int kColumnLanes = Config::tile_columns / kOwn;
constexpr int kThreads = kRowLanes * kColumnLanes * Config::slices;

// How one of the two matrices lies in memory, and a tile of it in shared memory: in lines of k, if
// neighbouring numbers have neighbouring k, or else in lines of rows (or columns).
template <bool kAlongK, int kTile, int kPitch, int kVector>
struct Side {
  static constexpr int kLanes = kTile / kOwn;
  static constexpr int kLines = kAlongK ? kTile : kStageK;
  static constexpr int kLength = kAlongK ? kStageK : kTile;
  static constexpr int kElements = kLines * kPitch;
  static_assert(kPitch >= kLength && kPitch % 4 == 0 && kPitch % kVector == 0, "aligned lines");
  static_assert(kLength % kVector == 0, "whole vectors in a line");

  // Requests the part of a tile with k from `first_k` on; what the matrix does not have is zero.
  __device__ static void copy(Scalar* shared, const Scalar* matrix, int first, int size,
                              int first_k, int ks) {
    constexpr int kVectors = kLength / kVector;
    for (int i = threadIdx.x; i < kLines * kVectors; i += kThreads) {
      const int line = i / kVectors, along = i % kVectors * kVector;
      const int at = first + (kAlongK ? line : along), k = first_k + (kAlongK ? along : line);
      const bool valid = at < size && k < ks;
      const long long offset =
          kAlongK ? static_cast<long long>(at) * ks + k : static_cast<long long>(k) * size + at;
      copy_elements<kVector>(&shared[line * kPitch + along], &matrix[valid ? offset : 0], valid);
    }
  }

  // Where a thread's i-th row (or column) is in the tile. Threads read neighbouring lines of k, and
  // four neighbours of a line of rows.
  __device__ static int place(int lane, int i) {
    return kAlongK ? lane + i * kLanes : lane * kOwn + i;
  }

  // Loads a thread's numbers of four neighbouring k.
  __device__ __forceinline__ static void load(const Scalar* shared, int lane, int k,
                                              Acc (&numbers)[kOwn][4]) {
    if constexpr (kAlongK) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) load4(&shared[place(lane, i) * kPitch + k], numbers[i]);
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Acc line[kOwn];
        load4(&shared[(k + q) * kPitch + lane * kOwn], line);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) numbers[i][q] = line[i];
      }
    }
  }
};

using Left = Side<Config::left_along_k, Config::tile_rows, Config::left_pitch, Config::left_vector>;
using Right =
    Side<Config::right_along_k, Config::tile_columns, Config::right_pitch, Config::right_vector>;

constexpr int kStageElements = Left::kElements + Right::kElements;
// Results of a slice: rows of columns, then the sums of rows for the bias's gradient.
constexpr int kSliceAccs = Config::tile_rows * (Config::tile_columns + Config::sums_bias);
static_assert(Config::stages * kStageElements * sizeof(Scalar) <= Config::shared_bytes, "stages");
static_assert(Config::slices * kSliceAccs * sizeof(Acc) <= Config::shared_bytes, "slices");

// A thread's accumulators. `stage` has the products of a stage, `total` those of all before.
struct Accumulators {
  Acc stage[kOwn][kOwn], total[kOwn][kOwn], stage_bias[kOwn], total_bias[kOwn];

  __device__ Accumulators() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      total_bias[i] = Acc(0);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) total[i][j] = Acc(0);
    }
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      stage_bias[i] = Acc(0);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) stage[i][j] = Acc(0);
    }
  }

  __device__ __forceinline__ void multiply(const Acc (&left)[kOwn][4],
                                           const Acc (&right)[kOwn][4]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if constexpr (Config::sums_bias) stage_bias[i] += left[i][q];
#pragma unroll
        for (int j = 0; j < kOwn; ++j) stage[i][j] += left[i][q] * right[j][q];
      }
    }
  }

  __device__ __forceinline__ void end() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      total_bias[i] += stage_bias[i];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) total[i][j] += stage[i][j];
    }
  }

  // Leaves the results of a slice in shared memory.
  __device__ void leave(Acc* slice, int row_lane, int column_lane) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = Left::place(row_lane, i);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        slice[row * Config::tile_columns + Right::place(column_lane, j)] = total[i][j];
      }
      if constexpr (Config::sums_bias) {
        if (column_lane == 0) slice[Config::tile_rows * Config::tile_columns + row] = total_bias[i];
      }
    }
  }
};

// Adds up what all slices have left at a place.
__device__ __forceinline__ Acc sum_of_slices(const Acc* slices, int place) {
  Acc sum = slices[place];
#pragma unroll
  for (int slice = 1; slice < Config::slices; ++slice) sum += slices[slice * kSliceAccs + place];
  return sum;
}

// Stores the sums of a tile's rows, which are the bias's gradient of a weight gradient.
template <class Bias>
__device__ __forceinline__ void store_row_sums(Bias* sums, const Acc* slices, int first_row,
                                               int rows) {
  if constexpr (Config::sums_bias) {
    const int at = static_cast<int>(threadIdx.x);
    if (at < Config::tile_rows && first_row + at < rows) {
      const Acc sum = sum_of_slices(slices, Config::tile_rows * Config::tile_columns + at);
      sums[first_row + at] = narrow<Scalar>(sum);
    }
  }
}

}  // namespace dense
}  // namespace fastconv

// A bias has `bias_count` numbers, each of them for `bias_run` neighbouring columns, over and over.
// In a weight gradient, `bias` is the bias's gradient: the sums of rows, if Config has `sums_bias`.
extern "C" __global__ void __launch_bounds__(fastconv::dense::kThreads)
    dense(const Config::Scalar* __restrict__ left, const Config::Scalar* __restrict__ right,
          Config::Bias* __restrict__ bias, Config::Scalar* __restrict__ output, int rows,
          int columns, int ks, int bias_run, int bias_count FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv;
  using namespace fastconv::dense;
  begin_launch();
  Scalar* const stages = reinterpret_cast<Scalar*>(shared_memory());
  const int column_tiles = ceil_div(columns, Config::tile_columns);
  const int first_row = static_cast<int>(blockIdx.x) / column_tiles * Config::tile_rows;
  const int first_column = static_cast<int>(blockIdx.x) % column_tiles * Config::tile_columns;
  const int count = ceil_div(ks, kStageK);

  const auto request = [&](int stage) {
    if (stage < count) {
      Scalar* const shared = &stages[stage % Config::stages * kStageElements];
      Left::copy(shared, left, first_row, rows, stage * kStageK, ks);
      Right::copy(shared + Left::kElements, right, first_column, columns, stage * kStageK, ks);
    }
    copy_async_commit();
  };
  for (int stage = 0; stage < Config::stages - 1; ++stage) request(stage);

  const int column_lane = threadIdx.x % kColumnLanes;
  const int row_lane = threadIdx.x / kColumnLanes % kRowLanes;
  const int slice = threadIdx.x / (kColumnLanes * kRowLanes);
  Accumulators accumulators;
  for (int stage = 0; stage < count; ++stage) {
    copy_async_wait<Config::stages - 2>();
    __syncthreads();  // All have copied this stage, and multiplied the one before.
    request(stage + Config::stages - 1);
    const Scalar* const shared = &stages[stage % Config::stages * kStageElements];
    accumulators.begin();
#pragma unroll
    for (int step = 0; step < Config::steps; ++step) {
      const int k = (step * Config::slices + slice) * 4;
      Acc of_rows[kOwn][4], of_columns[kOwn][4];
      Left::load(shared, row_lane, k, of_rows);
      Right::load(shared + Left::kElements, column_lane, k, of_columns);
      accumulators.multiply(of_rows, of_columns);
    }
    accumulators.end();
  }

  __syncthreads();  // All have multiplied the last stage.
  Acc* const slices = reinterpret_cast<Acc*>(shared_memory());
  accumulators.leave(&slices[slice * kSliceAccs], row_lane, column_lane);
  __syncthreads();
  const auto epilogue = FASTCONV_EPILOGUE(output);
  for (int i = threadIdx.x; i < Config::tile_rows * Config::tile_columns; i += kThreads) {
    const int row = first_row + i / Config::tile_columns;
    const int column = first_column + i % Config::tile_columns;
    if (row >= rows || column >= columns) continue;
    Acc acc = sum_of_slices(slices, i);
    if constexpr (!Config::gives_weight) {
      if (bias != nullptr) acc += Acc(widen(bias[column / bias_run % bias_count]));
    }
    Scalar* const target = &output[static_cast<long long>(row) * columns + column];
    *target = epilogue(acc, target);
  }
  store_row_sums(bias, slices, first_column == 0 ? first_row : rows, rows);
}
