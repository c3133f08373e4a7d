// One thread's part of a wgmma. Compiled for speed and without sanitizers: callers check bounds.
#pragma once

namespace emulator {

enum class Scalar { kTf32, kFloat16, kBfloat16 };

// How a matrix lies in shared memory. A row is what the sum goes along: 32 bytes.
enum class Order {
  kCores,     // 8 rows by 16 bytes in one piece
  kSwizzled,  // 8 rows by 128 bytes in one piece, of which the matrix is a part
  kAcross,    // 8 places of the sum, each with 128 bytes of neighbouring rows; swizzled, too
};

struct Operand {
  Order order;
  const unsigned char* start;
  int leading;  // bytes between neighbouring pieces: along the sum, but of kAcross across it
  int stride;   // the same the other way
};

constexpr int kRowBytes = 32;

// What a thread multiplies: 2 rows by a quarter of the columns.
struct alignas(32) Fragment {
  unsigned char left[2][kRowBytes];
  unsigned char right[64][kRowBytes];
};

// Read the fragment of one of a warpgroup's 128 threads.
void gather_left(Fragment& fragment, const Operand& left, int thread);
void gather_right(Fragment& fragment, const Operand& right, int columns, int thread);

// The same for equal fragments, and hardly for others.
unsigned long long fingerprint(const Fragment& fragment, int columns);

// sums += left * right, in a thread's order of sums.
void multiply(Scalar scalar, const Fragment& fragment, int columns, float* sums);

}  // namespace emulator
