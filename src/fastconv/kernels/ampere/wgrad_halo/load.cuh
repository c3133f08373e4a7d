// Loads a step of both tensors to shared memory. Most of it is copied by cp.async. 16-bit elements
// that are copied one by one or transposed go through registers: each slice's share is loaded
// before the slice is multiplied, and written after it. float32 is converted in place, by the
// thread that copied it.
#pragma once
#include "ampere/wgrad_halo/tile.cuh"

namespace fastconv {
namespace ampere {

// How threads divide kRows rows of kWidth tasks each among themselves: kLanes threads take
// neighbours of a row. A task is one copy; a thread has kTasks of them.
template <int kWidth, int kRows, int kLanes>
struct Sheet {
  static constexpr int kAcross = ceil_div(kWidth, kLanes);
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kTasks = kAcross * ceil_div(kRows, kRowsAtOnce);

  __device__ static int column(int task) {
    return static_cast<int>(threadIdx.x) % kLanes + task % kAcross * kLanes;
  }
  __device__ static int row(int task) {
    return static_cast<int>(threadIdx.x) / kLanes + task / kAcross * kRowsAtOnce;
  }
  __device__ static bool exists(int task) {
    return (kWidth % kLanes == 0 || column(task) < kWidth) &&
           (kRows % kRowsAtOnce == 0 || row(task) < kRows);
  }
};

__device__ __forceinline__ bool is_below(int value, int bound) {
  return static_cast<unsigned>(value) < static_cast<unsigned>(bound);
}

// --- float32 to TF32 -----------------------------------------------------------------------------

// Whether the GPU rounds to nearest even with one instruction.
#if __CUDA_ARCH__ >= 900
constexpr bool kRoundsToEven = true;
#else
constexpr bool kRoundsToEven = false;
#endif

__device__ __forceinline__ void split_operand(float value, unsigned& high, unsigned& low) {
  if constexpr (kRoundsToEven) {
    split(value, high, low);
  } else {
    split_away(value, high, low);
  }
}

// Numbers are rounded, or split, in shared memory: once, not for every MMA that reads them. The
// input is not split there: that would take twice the room, and most of an MMA's operands are the
// output's gradient.
constexpr bool kConvertsGrad = !k16Bit;
constexpr bool kConvertsInput = !k16Bit && C::parts == 1;
constexpr int kConvertedAtOnce = 4;  // vectors that registers hold beside the accumulators

// Converts neighbouring numbers and writes them back to shared memory. If they are split, low parts
// go `low` bytes further.
template <int kParts, int kCount>
__device__ __forceinline__ void convert(Vector<float, kCount> numbers, unsigned char* first,
                                        int low) {
  Vector<float, kCount> rest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& number = numbers.element[i];
    if constexpr (kParts == 2) {
      unsigned parts[2];
      split_operand(number, parts[0], parts[1]);
      number = __uint_as_float(parts[0]);
      rest.element[i] = __uint_as_float(parts[1]);
    } else {
      number = round_operand_to_tf32(number);
    }
  }
  *reinterpret_cast<Vector<float, kCount>*>(first) = numbers;
  if constexpr (kParts == 2) *reinterpret_cast<Vector<float, kCount>*>(first + low) = rest;
}

// Converts what a thread's tasks have copied, several at once, so that loads do not wait for one
// another. `place` returns where a task's numbers are.
template <class Sheet, int kParts, int kCount, class Place>
__device__ __forceinline__ void convert_tasks(const Place& place, int low) {
#pragma unroll 1
  for (int first = 0; first < Sheet::kTasks; first += kConvertedAtOnce) {
    Vector<float, kCount> numbers[kConvertedAtOnce];
#pragma unroll
    for (int i = 0; i < kConvertedAtOnce; ++i) {
      if (first + i < Sheet::kTasks && Sheet::exists(first + i)) {
        numbers[i] = *reinterpret_cast<const Vector<float, kCount>*>(place(first + i));
      }
    }
#pragma unroll
    for (int i = 0; i < kConvertedAtOnce; ++i) {
      if (first + i < Sheet::kTasks && Sheet::exists(first + i)) {
        convert<kParts>(numbers[i], place(first + i), low);
      }
    }
  }
}

// --- The output's gradient -----------------------------------------------------------------------

constexpr int kOutPlane = C::out_height * C::out_width;
constexpr int kOutImage = C::groups * C::group_out * Depth::out * kOutPlane;
constexpr int kOutColumn = C::grad_channels_last ? C::groups * C::group_out : 1;
constexpr int kOutRow = C::out_width * kOutColumn;
constexpr int kOutChannel = C::grad_channels_last ? 1 : Depth::out * kOutPlane;
static_assert(elements_of(C::groups, C::group_out, Depth::out, C::out_height, C::out_width) <
                  kMostElements,
              "");
using OutOffset = IndexTo<elements_of(kWalkRows + 1, kRowStep, kOutRow) +
                          elements_of(kStrips, C::strip_columns, kOutColumn) +
                          elements_of(kBlockOutputs, kOutChannel)>;

// Elements of a task, neighbours of a row or of a pixel: copied at once, or loaded one by one and
// written at once.
constexpr bool kGradInRegisters = k16Bit && C::grad_vector == 1;
constexpr int kGradUnit = kGradInRegisters ? kVector : C::grad_vector;
// Tasks of an output row: along memory, and across.
using GradSheet = Sheet<(C::grad_channels_last ? kBlockOutputs : C::strip_columns) / kGradUnit,
                        C::grad_channels_last ? C::strip_columns : kBlockOutputs, C::grad_lanes>;
constexpr int kGradTasks = C::step_rows * GradSheet::kTasks;

// Loads the output's gradient.
struct GradLoader {
  const Scalar* channels;  // the tile's first channel in image 0
  int channels_left;       // channels of the group from there on
  const Scalar* image;
  int row;
  int column;

  __device__ GradLoader(const Scalar* grad_output, const WeightTile& tile)
      : channels(grad_output +
                 static_cast<long long>(tile.group * C::group_out + tile.output) * kOutChannel),
        channels_left(C::group_out - tile.output) {}

  __device__ void move_to(const Cursor& at) {
    image = channels + static_cast<long long>(at.image() / Depth::out) * kOutImage;
    if constexpr (Depth::exists) image += at.image() % Depth::out * kOutPlane;
    row = at.output_row();
    column = at.output_column();
  }

  // A task's first element: its address, its offset in a stage, and how many elements exist from it
  // on.
  struct Place {
    const Scalar* source;
    int target;
    int left;
  };
  __device__ __forceinline__ Place find(int step_row, int task) const {
    const int along = GradSheet::column(task) * kGradUnit;
    const int across = GradSheet::row(task);
    const int channel = C::grad_channels_last ? along : across;
    const int pixel = C::grad_channels_last ? across : along;
    const int y = row + step_row * kRowStep;
    const int x = column + pixel;
    const bool exists =
        y < C::out_height && (C::grad_channels_last ? x < C::out_width : channel < channels_left);
    Place place;
    place.source =
        image + (static_cast<OutOffset>(channel) * kOutChannel +
                 static_cast<OutOffset>(y) * kOutRow + static_cast<OutOffset>(x) * kOutColumn);
    place.target =
        C::grad_channels_last
            ? (step_row * C::strip_columns + pixel) * C::grad_pitch + channel * kScalarBytes
            : channel * C::grad_pitch + (step_row * C::strip_columns + pixel) * kScalarBytes;
    place.left = !exists ? 0 : C::grad_channels_last ? channels_left - channel : C::out_width - x;
    return place;
  }

  __device__ __forceinline__ void copy(unsigned char* stage) const {
#pragma unroll 1
    for (int step_row = 0; step_row < C::step_rows; ++step_row) {
#pragma unroll
      for (int task = 0; task < GradSheet::kTasks; ++task) {
        if (!GradSheet::exists(task)) continue;
        const Place place = find(step_row, task);
        copy_elements<C::grad_vector>(reinterpret_cast<Scalar*>(stage + place.target), place.source,
                                      place.left > 0);
      }
    }
  }

  // Converts what this thread has copied.
  __device__ __forceinline__ void convert_copied(unsigned char* stage) const {
#pragma unroll 1
    for (int step_row = 0; step_row < C::step_rows; ++step_row) {
      const auto place = [&](int task) { return stage + find(step_row, task).target; };
      convert_tasks<GradSheet, C::parts, C::grad_vector>(place, kPartBytes);
    }
  }

  // Some tasks' elements in registers.
  template <int kTasks>
  struct Batch {
    unsigned short elements[kTasks][kVector];
  };
  template <int kTasks>
  __device__ __forceinline__ void load(Batch<kTasks>& batch, int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = first + i;
      const bool exists = task < kGradTasks && GradSheet::exists(task % GradSheet::kTasks);
      const Place place = find(task / GradSheet::kTasks, task % GradSheet::kTasks);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        batch.elements[i][j] = load_or_zero(
            reinterpret_cast<const unsigned short*>(place.source) + j, exists && j < place.left);
      }
    }
  }
  template <int kTasks>
  __device__ __forceinline__ void store(const Batch<kTasks>& batch, int first,
                                        unsigned char* stage) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = first + i;
      if (task >= kGradTasks || !GradSheet::exists(task % GradSheet::kTasks)) continue;
      const Place place = find(task / GradSheet::kTasks, task % GradSheet::kTasks);
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = batch.elements[i][2 * j] | static_cast<unsigned>(batch.elements[i][2 * j + 1])
                                                  << 16;
      }
      *reinterpret_cast<uint4*>(stage + place.target) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// --- The input -----------------------------------------------------------------------------------

constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInImage = C::groups * kInChannels * Depth::in * kInPlane;
constexpr int kInColumn = C::in_channels_last ? C::groups * C::group_in : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInChannel = C::in_channels_last ? 1 : Depth::in * kInPlane;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");
// The largest distances of rows and columns that taps read from the input's first; InOffset holds
// the offset of the farthest element.
constexpr long long kFarRow = max_of<long long>(
    C::padding_top, elements_of(kWalkRows + 1, kRowStep, C::stride_height) +
                        elements_of(kRowBlocks, C::tile_rows, C::dilation_height));
constexpr long long kFarColumn = max_of<long long>(
    C::padding_left + C::shift, elements_of(kStrips, C::strip_columns, C::stride_width) +
                                    elements_of(kColumnBlocks, C::tile_columns, C::dilation_width) +
                                    elements_of(kLineColumns + 1, kColumnUnit));
using InOffset = IndexTo<elements_of(kFarRow, kInRow) + elements_of(kFarColumn, kInColumn) +
                         elements_of(C::tile_channels + kOctet, kInChannel)>;

// The planes of a volume that an output plane reads; images have one.
struct Planes : Front {
  int first_channel;  // the tile's, in its group

  // Whether the volume has the plane that one of the tile's channels reads.
  __device__ __forceinline__ bool exist(int channel) const {
    return plane_inside(front + InChannel(first_channel + channel).plane());
  }
  // The offset of the plane that one of the tile's channels reads, from the group's first.
  __device__ __forceinline__ long long offset(int channel) const {
    const InChannel from(first_channel + channel);
    return static_cast<long long>(from.channel) * kInChannel +
           (front + from.plane()) * static_cast<long long>(kInPlane);
  }
};

// With contiguous 16-bit types, a task is in_vector columns of 8 channels, which are transposed.
// Otherwise it is neighbours in memory: columns, or channels if the input is channels-last.
constexpr bool kInInRegisters = k16Bit && (!C::in_channels_last || C::in_vector == 1);
constexpr int kTaskChannels = kInInRegisters ? kOctet : C::in_channels_last ? C::in_vector : 1;
constexpr int kTaskColumns = C::in_channels_last ? 1 : C::in_vector;
// Tasks of a line: along memory, and across.
using InSheet =
    Sheet<C::in_channels_last ? C::tile_channels / kTaskChannels : kLineColumns / kTaskColumns,
          C::in_channels_last ? kLineColumns : C::tile_channels / kTaskChannels, C::in_lanes>;
constexpr int kInTasks = kNewLines * InSheet::kTasks;

// kCount neighbouring 16-bit elements in registers.
template <int kCount>
struct Neighbours {
  static_assert(kCount == 2 || kCount == 4, "");
  unsigned words[kCount / 2];

  __device__ __forceinline__ void load(const Scalar* source, bool valid) {
    if constexpr (kCount == 2) {
      words[0] = load_bits(reinterpret_cast<const float*>(source), valid);
    } else {
      const uint2 both = load_or_zero(reinterpret_cast<const uint2*>(source), valid);
      words[0] = both.x;
      words[kCount / 2 - 1] = both.y;
    }
  }
  __device__ __forceinline__ unsigned element(int i) const {
    return i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16;
  }
};
template <>
struct Neighbours<1> {
  unsigned short word;

  __device__ __forceinline__ void load(const Scalar* source, bool valid) {
    word = load_or_zero(reinterpret_cast<const unsigned short*>(source), valid);
  }
  __device__ __forceinline__ unsigned element(int) const { return word; }
};

// Loads the input.
struct InLoader {
  const Scalar* channels;  // the tile's first channel in image 0
  int channels_left;       // channels of the group from there on
  Planes planes;
  int first_row;     // input row of output row 0's first line
  int first_column;  // input column where the lines of output column 0 begin
  const Scalar* image;
  int row;
  int column;

  __device__ InLoader(const Scalar* input, const WeightTile& tile)
      : channels(input + static_cast<long long>(tile.group * kInChannels +
                                                (Depth::exists ? 0 : tile.channel)) *
                             kInChannel),
        channels_left(C::group_in - tile.channel),
        planes{Front(), tile.channel},
        first_row(tile.kernel_row * C::dilation_height - C::padding_top) {
    first_column = tile.kernel_column * C::dilation_width - C::padding_left;
    first_column -= shift(tile);
  }

  // Returns the columns by which lines begin early, which is the same for all strips.
  __device__ static int shift(const WeightTile& tile) {
    if constexpr (C::shift == 0) return 0;
    const int column = tile.kernel_column * C::dilation_width - C::padding_left;
    return column - floor_div(column, C::in_vector) * C::in_vector;
  }

  __device__ void move_to(const Cursor& at) {
    image = channels + static_cast<long long>(at.image() / Depth::out) * kInImage;
    static_cast<Front&>(planes) = Front(front_of(at.image()));
    row = first_row + at.output_row() * C::stride_height;
    column = first_column + at.output_column() * C::stride_width;
  }

  // Returns the input row of one of the step's lines.
  __device__ __forceinline__ int row_of(int line) const {
    constexpr bool kSkips = kRowAdvance > C::tile_rows;
    return row + C::dilation_height *
                     (kSkips ? line / C::tile_rows * kRowAdvance + line % C::tile_rows : line);
  }

  struct Place {
    const Scalar* source;
    int target;
    int channel;
    int channels;  // channels that exist, from the task's first on
  };
  __device__ __forceinline__ Place find(int y, int task) const {
    const int along = InSheet::column(task);
    const int across = InSheet::row(task);
    const int channel = (C::in_channels_last ? along : across) * kTaskChannels;
    const int at = (C::in_channels_last ? across : along) * kTaskColumns;
    const int x = column + at * kColumnUnit;
    Place place;
    const InOffset first = Depth::exists ? 0 : static_cast<InOffset>(channel) * kInChannel;
    place.source =
        image + (first + static_cast<InOffset>(y) * kInRow + static_cast<InOffset>(x) * kInColumn);
    place.target = channel_bytes(channel) + at * kColumnBytes;
    place.channel = channel;
    const bool exists = is_below(y, C::in_height) && is_below(x, C::in_width);
    place.channels = exists ? channels_left - channel : 0;
    return place;
  }

  // Copies lines `first` to `end` of a step whose first line is `position` in the ring.
  __device__ __forceinline__ void copy(int position, int first, int end) const {
#pragma unroll 1
    for (int line = first; line < end; ++line) {
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes;
      const int y = row_of(line);
#pragma unroll
      for (int task = 0; task < InSheet::kTasks; ++task) {
        if (!InSheet::exists(task)) continue;
        const Place place = find(y, task);
        auto* const to = reinterpret_cast<Scalar*>(target + place.target);
        if constexpr (Depth::exists) {
          copy_elements<C::in_vector>(to, place.source + planes.offset(place.channel),
                                      place.channels > 0 && planes.exist(place.channel));
        } else {
          copy_elements<C::in_vector>(to, place.source, place.channels > 0);
        }
      }
    }
  }

  // Converts what this thread has copied of these lines.
  __device__ __forceinline__ void convert_copied(int position, int first, int end) const {
#pragma unroll 1
    for (int line = first; line < end; ++line) {
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes;
      const auto place = [&](int task) { return target + find(0, task).target; };
      convert_tasks<InSheet, 1, C::in_vector>(place, 0);
    }
  }

  template <int kTasks>
  struct Batch {
    Neighbours<kTaskColumns> elements[kTasks][kOctet];
  };
  // Loads tasks from `first` on, of lines from `first_line` to kWindow.
  template <int kTasks>
  __device__ __forceinline__ void load(Batch<kTasks>& batch, int first_line, int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int line = first_line + (first + i) / InSheet::kTasks;
      const int task = (first + i) % InSheet::kTasks;
      const bool exists = line < kWindow && InSheet::exists(task);
      const Place place = find(row_of(line), task);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        if constexpr (Depth::exists) {
          const int channel = place.channel + j;
          batch.elements[i][j].load(place.source + planes.offset(channel),
                                    exists && j < place.channels && planes.exist(channel));
        } else {
          batch.elements[i][j].load(place.source + static_cast<InOffset>(j) * kInChannel,
                                    exists && j < place.channels);
        }
      }
    }
  }
  template <int kTasks>
  __device__ __forceinline__ void store(const Batch<kTasks>& batch, int position, int first_line,
                                        int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int line = first_line + (first + i) / InSheet::kTasks;
      const int task = (first + i) % InSheet::kTasks;
      if (line >= kWindow || !InSheet::exists(task)) continue;
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes + find(0, task).target;
#pragma unroll
      for (int column = 0; column < kTaskColumns; ++column) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = batch.elements[i][2 * j].element(column) |
                     batch.elements[i][2 * j + 1].element(column) << 16;
        }
        *reinterpret_cast<uint4*>(target + column * kColumnBytes) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

// --- Both ----------------------------------------------------------------------------------------

// A thread's tasks that go through registers while a slice is multiplied, and how many at once.
constexpr int kSliceGradTasks = kGradInRegisters ? ceil_div(kGradTasks, kWarpSlices) : 0;
constexpr int kSliceInTasks = kInInRegisters ? ceil_div(kInTasks, kWarpSlices) : 0;
constexpr int kGradBatch = kSliceGradTasks < C::grad_batch ? kSliceGradTasks : C::grad_batch;
constexpr int kInBatch = kSliceInTasks < C::in_batch ? kSliceInTasks : C::in_batch;
static_assert(C::grad_batch > 0 && C::in_batch > 0, "");

// A step's place in shared memory.
struct StepPlace {
  int position = 0;  // first line in the ring
  int stage = 0;

  __device__ unsigned char* grad() const { return shared_memory() + kGrad + stage * kStageBytes; }
  __device__ StepPlace next() const {
    StepPlace place;
    place.position = ring_line(position + kNewLines);
    place.stage = 1 - stage;
    return place;
  }
};

// Loads both tensors.
struct Loader {
  GradLoader grad;
  InLoader in;
  GradLoader::Batch<kGradBatch + (kGradBatch == 0)> grad_batch;
  InLoader::Batch<kInBatch + (kInBatch == 0)> in_batch;

  __device__ Loader(const Scalar* grad_output, const Scalar* input, const WeightTile& tile)
      : grad(grad_output, tile), in(input, tile) {}

  __device__ void move_to(const Cursor& at) {
    grad.move_to(at);
    in.move_to(at);
  }

  // Starts the asynchronous copies of a step, its lines from `first_line` on.
  __device__ __forceinline__ void copy(const StepPlace& to, int first_line) const {
    if constexpr (!kGradInRegisters) grad.copy(to.grad());
    if constexpr (!kInInRegisters) in.copy(to.position, first_line, kWindow);
    copy_async_commit();
  }

  // Waits for what this thread has copied of a step, and converts it.
  __device__ __forceinline__ void convert_copied(const StepPlace& to, int first_line) const {
    copy_async_wait<0>();
    if constexpr (kConvertsGrad) grad.convert_copied(to.grad());
    if constexpr (kConvertsInput) in.convert_copied(to.position, first_line, kWindow);
  }

  // Loads a slice's share of what goes through registers. All batches but the last are also
  // written; store_slice writes that one.
  __device__ __forceinline__ void load_slice(const StepPlace& to, int slice) {
    if constexpr (kGradBatch > 0) {
      int task = slice * kSliceGradTasks;
#pragma unroll 1
      for (; task < (slice + 1) * kSliceGradTasks - kGradBatch; task += kGradBatch) {
        grad.load(grad_batch, task);
        grad.store(grad_batch, task, to.grad());
      }
      grad.load(grad_batch, task);
    }
    if constexpr (kInBatch > 0) {
      int task = slice * kSliceInTasks;
#pragma unroll 1
      for (; task < (slice + 1) * kSliceInTasks - kInBatch; task += kInBatch) {
        in.load(in_batch, kOldLines, task);
        in.store(in_batch, to.position, kOldLines, task);
      }
      in.load(in_batch, kOldLines, task);
    }
  }
  __device__ __forceinline__ void store_slice(const StepPlace& to, int slice) const {
    if constexpr (kGradBatch > 0) {
      grad.store(grad_batch, last_batch(slice, kSliceGradTasks, kGradBatch), to.grad());
    }
    if constexpr (kInBatch > 0) {
      in.store(in_batch, to.position, kOldLines, last_batch(slice, kSliceInTasks, kInBatch));
    }
  }
  // Returns the first task of a slice's last batch.
  __device__ static int last_batch(int slice, int tasks, int batch) {
    return batch == 0 ? 0 : slice * tasks + (tasks - 1) / batch * batch;
  }

  // Loads all of a step, without overlap with MMAs.
  __device__ __forceinline__ void load_all(const StepPlace& to) {
    copy(to, 0);
    if constexpr (kGradBatch > 0) {
#pragma unroll 1
      for (int task = 0; task < kGradTasks; task += kGradBatch) {
        grad.load(grad_batch, task);
        grad.store(grad_batch, task, to.grad());
      }
    }
    if constexpr (kInBatch > 0) {
#pragma unroll 1
      for (int task = 0; task < kWindow * InSheet::kTasks; task += kInBatch) {
        in.load(in_batch, 0, task);
        in.store(in_batch, to.position, 0, task);
      }
    }
  }
};

}  // namespace ampere
}  // namespace fastconv
