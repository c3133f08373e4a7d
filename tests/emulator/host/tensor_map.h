// A tensor map as the emulator has it: what the CUDA driver makes a descriptor of. As runtime.h, it
// includes no standard headers.
#pragma once

namespace emulator {

constexpr int kMaxRank = 5;

// Dimensions come innermost first; along the innermost, elements lie side by side.
struct TensorMap {
  unsigned char* begin;  // the tensor, or null if it is absent
  int element_bytes;
  bool rounds;  // to TF32, what is loaded
  int swizzle;  // bytes of the span, or 0
  int rank;
  bool im2col;
  long long sizes[kMaxRank];
  long long strides[kMaxRank];  // in bytes
  int steps[kMaxRank];          // the element strides
  int box[kMaxRank];
  int lower[kMaxRank], upper[kMaxRank];  // corners of the bounding box, by dimension
  int channels, pixels;
};

// Makes one of numbers, separated by spaces: whether it is an im2col map, the bytes of an element,
// whether it is rounded, bytes of the swizzle, the rank, sizes, strides of all but the innermost
// dimension, element strides; then the box, or lower corner, upper corner, channels and pixels.
TensorMap read_tensor_map(unsigned char* begin, const char* numbers);

// A tensor copy, and its part of a map.
struct Box {
  const char* function;
  const TensorMap* map;
  bool im2col;
  int rank;
  const int* at;
  const int* offset;  // of an im2col copy: column, row
};

// Bytes of a box in shared memory; fails if the map is not for such a copy.
int box_bytes(const Box& box);

// The multiple that a box's address in shared memory has to be of.
int box_alignment(const TensorMap& map);

// Calls `visit` for each piece of the box that lies in the tensor: its address in global memory,
// its offset in shared memory, its bytes, at most 16.
void visit_pieces(const Box& box,
                  void (*visit)(void* context, unsigned char* global, int offset, int bytes),
                  void* context);

}  // namespace emulator
