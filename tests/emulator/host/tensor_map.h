// The emulator's form of a tensor map (CUtensorMap). Like runtime.h, this header includes no
// standard headers.
#pragma once

namespace emulator {

constexpr int kMaxRank = 5;

// Dimensions come innermost first. The innermost is contiguous.
struct TensorMap {
  unsigned char* begin;  // the tensor, or null if it is absent
  int element_bytes;
  bool rounds;  // loads round to TF32
  int swizzle;  // span in bytes, or 0
  int rank;
  bool im2col;
  long long sizes[kMaxRank];
  long long strides[kMaxRank];  // in bytes
  int steps[kMaxRank];          // element strides
  int box[kMaxRank];
  int lower[kMaxRank], upper[kMaxRank];  // corners of the bounding box, by dimension
  int channels, pixels;
};

// Parses a map from numbers that are separated by spaces: whether it is an im2col map, the bytes of
// an element, whether loads round, the bytes of the swizzle, the rank, sizes, strides of all but
// the innermost dimension, element strides; then the TMA box, or the lower corner, upper corner,
// channels and pixels.
TensorMap read_tensor_map(unsigned char* begin, const char* numbers);

// The TMA box that one copy reads or writes.
struct Box {
  const char* function;
  const TensorMap* map;
  bool im2col;
  int rank;
  const int* at;
  const int* offset;  // column, row and plane of the tap; im2col copies only
};

// Bytes that a box takes in shared memory. Fails if the map does not allow such a copy.
int box_bytes(const Box& box);

// The alignment that a box needs in shared memory, in bytes.
int box_alignment(const TensorMap& map);

// Calls `visit` for each piece of the box that lies in the tensor, with its address in global
// memory, its offset in shared memory, and its size of at most 16 bytes.
void visit_pieces(const Box& box,
                  void (*visit)(void* context, unsigned char* global, int offset, int bytes),
                  void* context);

}  // namespace emulator
