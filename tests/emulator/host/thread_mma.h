// One thread's part of a wgmma or mma.sync. It is compiled for speed and without sanitizers, so
// callers check bounds.
#pragma once

namespace emulator {

enum class Scalar { kTf32, kFloat16, kBfloat16 };

// How a matrix lies in shared memory. A row holds the 32 bytes along K.
enum class Order {
  kCores,     // contiguous core matrices of 8 rows by 16 bytes, no swizzle
  kSwizzled,  // contiguous pieces of 8 rows by 128 bytes, 128-byte swizzle
  kMnMajor,   // contiguous pieces of 8 places of K by a swizzle's span of rows
};

struct Operand {
  Order order;
  const unsigned char* start;
  int leading;  // bytes between pieces: along K, but along M or N in kMnMajor
  int stride;   // bytes between pieces in the other direction
  int span;     // bytes of the swizzle, 0 without one
};

constexpr int kRowBytes = 32;

// The operands of one thread: 2 rows, and a quarter of the columns.
struct alignas(32) Fragment {
  unsigned char left[2][kRowBytes];
  unsigned char right[64][kRowBytes];
};

// Read the fragment of one of a warpgroup's 128 threads.
void gather_left(Fragment& fragment, const Operand& left, int thread);
void gather_right(Fragment& fragment, const Operand& right, int columns, int thread);

// A hash: equal for equal fragments, and almost never for others.
unsigned long long fingerprint(const Fragment& fragment, int columns);

// accumulators += left * right, in the order of a thread's accumulator registers.
void multiply(Scalar scalar, const Fragment& fragment, int columns, float* accumulators);

}  // namespace emulator
