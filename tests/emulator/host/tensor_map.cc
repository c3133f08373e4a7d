// Maps the elements of a TMA box to global and to shared memory.
#include "tensor_map.h"

#include <algorithm>
#include <cstdint>
#include <sstream>

#include "runtime.h"

namespace emulator {

namespace {

constexpr int kChunk = 16;  // bytes that a swizzle keeps together

template <class T>
void read(std::istream& from, T* numbers, int first, int end) {
  for (int i = first; i < end; ++i) from >> numbers[i];
}

int row_bytes(const TensorMap& map) {
  return (map.im2col ? map.channels : map.box[0]) * map.element_bytes;
}

int count(const TensorMap& map, int dimension) {
  return (map.box[dimension] + map.steps[dimension] - 1) / map.steps[dimension];
}

int rows(const TensorMap& map) {
  if (map.im2col) return map.pixels;
  int product = 1;
  for (int i = 1; i < map.rank; ++i) product *= count(map, i);
  return product;
}

// The offset of a box's byte in shared memory. The swizzle permutes chunks within a span by the
// index of their 128 bytes.
int swizzled(const TensorMap& map, int offset) {
  if (map.swizzle == 0) return offset;
  return offset ^ (offset >> 7 & (map.swizzle / kChunk - 1)) * kChunk;
}

struct Visitor {
  void (*visit)(void* context, unsigned char* global, int offset, int bytes);
  void* context;
};

// Visits the row at these coordinates, which may lie partly outside of the tensor.
void visit_row(const TensorMap& map, const long long* at, int row, const Visitor& visitor) {
  unsigned char* global = map.begin;
  for (int i = 1; i < map.rank; ++i) {
    if (at[i] < 0 || at[i] >= map.sizes[i]) return;
    global += at[i] * map.strides[i];
  }
  const int elements = kChunk / map.element_bytes;
  const int bytes = row_bytes(map);
  for (int chunk = 0; chunk < bytes / kChunk; ++chunk) {
    const long long start = at[0] + chunk * elements;
    const long long first = std::max(start, 0ll), end = std::min(start + elements, map.sizes[0]);
    if (first >= end) continue;
    const int target = swizzled(map, row * bytes + chunk * kChunk);
    visitor.visit(visitor.context, global + first * map.element_bytes,
                  target + static_cast<int>(first - start) * map.element_bytes,
                  static_cast<int>(end - first) * map.element_bytes);
  }
}

void visit_tile(const Box& box, const Visitor& visitor) {
  const TensorMap& map = *box.map;
  for (int row = 0, number = rows(map); row < number; ++row) {
    long long at[kMaxRank] = {box.at[0]};
    for (int i = 1, rest = row; i < map.rank; ++i) {
      at[i] = box.at[i] + static_cast<long long>(rest % count(map, i)) * map.steps[i];
      rest /= count(map, i);
    }
    visit_row(map, at, row, visitor);
  }
}

// Visits pixels of a row of the bounding box, then of the next row, then of the next image.
void visit_pixels(const Box& box, const Visitor& visitor) {
  const TensorMap& map = *box.map;
  const int images = map.rank - 1;
  long long pixel[kMaxRank];
  std::copy_n(box.at, map.rank, pixel);
  for (int row = 0; row < map.pixels; ++row) {
    long long at[kMaxRank];
    std::copy_n(pixel, map.rank, at);
    for (int i = 1; i < images; ++i) at[i] += box.offset[i - 1];
    visit_row(map, at, row, visitor);
    int i = 1;
    for (; i < images; ++i) {
      pixel[i] += map.steps[i];
      if (pixel[i] < map.sizes[i] + map.upper[i]) break;
      pixel[i] = map.lower[i];
    }
    if (i == images) ++pixel[images];
  }
}

void check_im2col(const Box& box) {
  const TensorMap& map = *box.map;
  for (int i = 1; i < map.rank - 1; ++i) {
    const long long end = map.sizes[i] + map.upper[i];
    if (box.at[i] < map.lower[i] || box.at[i] >= end) {
      fail("%s: coordinate %d is %d, outside of the bounding box from %d to %lld", box.function, i,
           box.at[i], map.lower[i], end - 1);
    }
    const int most = (1 << 16 / (map.rank - 2)) - 1;
    if (box.offset[i - 1] < 0 || box.offset[i - 1] > most) {
      fail("%s: offset %d is %d, not from 0 to %d", box.function, i - 1, box.offset[i - 1], most);
    }
  }
}

}  // namespace

TensorMap read_tensor_map(unsigned char* begin, const char* numbers) {
  TensorMap map = {};
  map.begin = begin;
  std::istringstream from(numbers);
  from >> map.im2col >> map.element_bytes >> map.rounds >> map.swizzle >> map.rank;
  if (!from || map.rank < 1 || map.rank > kMaxRank) fail("a tensor map of rank %d", map.rank);
  map.strides[0] = map.element_bytes;
  read(from, map.sizes, 0, map.rank);
  read(from, map.strides, 1, map.rank);
  read(from, map.steps, 0, map.rank);
  if (map.im2col) {
    read(from, map.lower, 1, map.rank - 1);
    read(from, map.upper, 1, map.rank - 1);
    from >> map.channels >> map.pixels;
  } else {
    read(from, map.box, 0, map.rank);
  }
  if (!from) fail("a tensor map is cut short: %s", numbers);
  return map;
}

int box_bytes(const Box& box) {
  const TensorMap& map = *box.map;
  if (map.im2col != box.im2col || map.rank != box.rank) {
    fail("%s of rank %d, by %s map of rank %d", box.function, box.rank,
         map.im2col ? "an im2col" : "a tiled", map.rank);
  }
  if (!map.begin) fail("%s: the tensor is absent", box.function);
  if (reinterpret_cast<uintptr_t>(map.begin) % 16) {
    fail("%s: misaligned tensor in global memory", box.function);
  }
  if (map.swizzle && row_bytes(map) != map.swizzle) {
    fail("%s: rows of %d bytes in spans of %d: their layout is not documented", box.function,
         row_bytes(map), map.swizzle);
  }
  if (box.at[0] * map.element_bytes % kChunk) {
    fail("%s: coordinate 0 is %d, not a multiple of %d: illegal instruction", box.function,
         box.at[0], kChunk / map.element_bytes);
  }
  if (map.im2col) check_im2col(box);
  return rows(map) * row_bytes(map);
}

int box_alignment(const TensorMap& map) { return map.swizzle ? 8 * map.swizzle : 128; }

void visit_pieces(const Box& box,
                  void (*visit)(void* context, unsigned char* global, int offset, int bytes),
                  void* context) {
  (box.im2col ? visit_pixels : visit_tile)(box, {visit, context});
}

}  // namespace emulator
