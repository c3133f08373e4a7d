// Producer warps that load the input, chunk by chunk: to registers and from there to shared memory,
// transposed and rounded or split; or by cp.async, as it is.
//
// A kernel's `Input` describes its ring of stages: producers wait until a stage is empty, and
// signal when it is full. Warp 0 has another role; the loaders are the warps after it.
#pragma once
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

constexpr int kLoaders = C::loaders;  // threads that load input

// Whether cp.async copies the input as it is, neither transposed nor rounded.
constexpr bool kInputCopied = C::vector_loads && sizeof(Loaded) == 2;

// The powers that a chunk's channels are multiplied by (scaled fp16). A warp may keep a copy of
// them in shared memory.
template <bool kCopied>
struct ChunkPowers {
  const float* powers;
  unsigned at = ~0u;    // where they begin in the tables, modulo 2^32
  bool strict = false;  // whether some power is negative: every number of that channel must fit

  __device__ explicit ChunkPowers(float* copy) : powers(copy) {}

  __device__ __forceinline__ void load(const Items& items, int image, int column) {
    const unsigned begin = static_cast<unsigned>(image) * C::table_columns + column;
    if (!kScalesInput || at == begin) return;
    at = begin;
    const float* const source = items.tables.powers(image) + column;
    if constexpr (!kCopied) powers = source;
    strict = false;
    __syncwarp();  // the previous powers have been read
#pragma unroll
    for (int first = 0; first < kChunkChannels; first += 32) {
      const int i = first + static_cast<int>(threadIdx.x) % 32;
      const float power = i < kChunkChannels ? source[i] : 0.0f;
      if (kCopied && i < kChunkChannels) const_cast<float*>(powers)[i] = power;
      strict = strict || power < 0.0f;
    }
    strict = __any_sync(~0u, strict);
    __syncwarp();  // the powers have been written
  }
  // The powers of the vector that begins with a channel of the chunk.
  __device__ __forceinline__ Scale of(int channel) const { return Scale(powers + channel); }
};

// Evaluates what a warp has seen since the last call: marks the image if its numbers do not all fit
// float16, or the stage if they are not all finite.
template <class Input>
__device__ __forceinline__ void judge(const Items& items, HalfRange& range, int image, int) {
  items.judge(range, image);
}
template <class Input>
__device__ __forceinline__ void judge(const Items&, LowRange& range, int, int stage) {
  const bool watched = !__all_sync(~0u, range.finite());
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1;
  if (threadIdx.x % 32 == 0) Input::mark(stage, warp, watched);
  range = LowRange();
}
template <class Input>
__device__ __forceinline__ void judge(const Items&, NoRange&, int, int) {}

// Iterates over all input stages of a block, and over the batches of each stage.
struct LoadCursor : StageCursor {
  int batch = 0;

  __device__ explicit LoadCursor(const Items& items) : StageCursor(items) {}
  __device__ void advance() {
    if (++batch < kBatches) return;
    batch = 0;
    StageCursor::advance();
  }
};

// A thread's units of a batch, with their image and the table column of their first channel.
struct Batch {
  Unit units[C::batch];
  int image;
  int column;

  // Starts loading the units.
  __device__ __forceinline__ void load(const Loaded* input, const LoadCursor& at, int thread) {
    const Source source(input, at);
    image = at.item.image;
    column = source.column_of(at.item.group);
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (at.batch * C::batch + k);
      units[k].load(source.find(index), source.channel_of(index));
    }
  }

  // Writes the units to a stage.
  template <class Powers>
  __device__ __forceinline__ void store(unsigned char* stage, int batch, int thread,
                                        const Powers& powers, Range& range) const {
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (batch * C::batch + k);
      if (!unit_exists(index)) continue;
      const int first = Unit::plane(index) * kPlanePixels + Unit::pixel(index);
      const int channel = Unit::plane(index) * kVectorChannels;
#pragma unroll
      for (int i = 0; i < Unit::kVectors; ++i) {
        const Scale scale = powers.of(channel + i * kVectorChannels);
        store_input(stage + (first + Unit::offset(i)) * 16, kPartPixels * 16, units[k].vector(i),
                    scale, range);
        if (powers.strict) range.see_strictly(units[k].vector(i), scale);
      }
    }
  }
};

// Loads all input stages, a few batches ahead of what is written to shared memory.
template <class Input>
__device__ __forceinline__ void load_input(const Loaded* input, const Items& items) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  Batch batches[C::batches_ahead];
  Range range;
  ChunkPowers<Input::kPowersCopied> powers(Input::powers(thread / 32));
  LoadCursor next(items);
  Ring<Input::kStages> at(1);
  int in_flight = 0;
  int batch = 0;
#pragma unroll
  for (int i = 0; i < C::batches_ahead - 1; ++i) {
    if (next.more()) {
      batches[i].load(input, next, thread);
      next.advance();
      ++in_flight;
    }
  }
  while (in_flight > 0 || next.more()) {
#pragma unroll
    for (int i = 0; i < C::batches_ahead; ++i) {
      if (next.more()) {
        batches[(i + C::batches_ahead - 1) % C::batches_ahead].load(input, next, thread);
        next.advance();
        ++in_flight;
      }
      if (in_flight == 0) break;
      --in_flight;
      if (batch == 0) {
        powers.load(items, batches[i].image, batches[i].column);
        Input::wait(at);
      }
      batches[i].store(Input::stage(at.stage), batch, thread, powers, range);
      if (++batch == kBatches) {
        batch = 0;
        judge<Input>(items, range, batches[i].image, at.stage);
        Input::show(at.stage);
        at.advance();
      }
    }
  }
}

// A thread's share of the lines of a stage, for cp.async: every kLineStep-th pixel of one plane.
// What the copies of a line have in common is computed once for all of them.
struct LineCopy {
  static constexpr int kLineStep = kLoaders / kChunkPlanes;
  static constexpr int kCopies = ceil_div(C::pitch, kLineStep);
  static_assert(!kInputCopied || kLoaders % kChunkPlanes == 0, "a thread stays in its plane");
  int plane, pixel;

  __device__ explicit LineCopy(int thread)
      : plane(thread % kChunkPlanes), pixel(thread / kChunkPlanes) {}

  __device__ __forceinline__ void start(const Source& source, int line,
                                        unsigned char* stage) const {
    const Place place = source.find_in_line(line, pixel);
    const int channel = source.channel + plane * kVectorChannels;
    const bool exists = VectorUnit::row_exists(place, channel);
    const Loaded* const from = place.address(channel);
    unsigned char* const to = stage + (plane * kPlanePixels + line * C::pitch + pixel) * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int on = i * kLineStep;
      if (C::pitch % kLineStep == 0 || i + 1 < kCopies || pixel + on < C::pitch) {
        const bool inside = static_cast<unsigned>(place.x + on * C::stride_width) <
                            static_cast<unsigned>(C::in_width);
        copy_async<16>(to + on * 16, from + 1LL * on * C::stride_width * kInColumn,
                       exists && inside);
      }
    }
  }
};

// Copies all input stages with cp.async. A consumer releases a stage only when it has the next one,
// so with two stages no copy may be in flight while this waits for a stage.
template <class Input>
__device__ __forceinline__ void copy_input(const Loaded* input, const Items& items) {
  static_assert(!C::wraps || !C::vector_loads || sizeof(Loaded) == 4, "lines do not go on");
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const LineCopy copy(thread);
  Ring<Input::kStages> at(1);
  Ring<Input::kStages> landed(0);
  const auto arrive = [&] {
    Input::show(landed.stage);
    landed.advance();
  };
  // Stages that are in flight while the next one is copied.
  constexpr int kAhead = Input::kStages > 2 ? 1 : 0;
  // Unrolls all lines only if that takes few instructions.
  constexpr int kLinesAtOnce = kLines * LineCopy::kCopies <= 32 ? kLines : 1;
  int in_flight = 0;
  for (StageCursor next(items); next.more(); next.advance()) {
    const Source source(input, next);
    Input::wait(at);
    unsigned char* const stage = Input::stage(at.stage);
#pragma unroll kLinesAtOnce
    for (int line = 0; line < kLines; ++line) copy.start(source, line, stage);
    copy_async_commit();
    at.advance();
    if (++in_flight > kAhead) {
      copy_async_wait<kAhead>();
      arrive();
      --in_flight;
    }
  }
  copy_async_wait<0>();
  if (in_flight > 0) arrive();
}

// Fills all input stages, in the way that the input's format asks for.
template <class Input>
__device__ __forceinline__ void fill_stages(const Loaded* input, const Items& items) {
  if constexpr (kInputCopied) {
    copy_input<Input>(input, items);
  } else {
    load_input<Input>(input, items);
  }
}

}  // namespace tensor
}  // namespace fastconv
