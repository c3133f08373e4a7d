#include "thread_mma.h"

#include <cstdint>
#include <cstring>

namespace emulator {

namespace {

constexpr int kPieceRows = 8, kCoreBytes = 16;

// Applies a swizzle of `span` bytes to an address. Shared memory begins at a multiple of 1024, so
// address bits are those of the hardware.
const unsigned char* swizzled(const unsigned char* place, int span) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  const uintptr_t chunk = address / 128 % (span / kCoreBytes);
  return place - address % span + (address % span ^ chunk * kCoreBytes);
}

void read_row_of_cores(unsigned char* target, const Operand& operand, int row) {
  const unsigned char* const source =
      operand.start + row / kPieceRows * operand.stride + row % kPieceRows * kCoreBytes;
  memcpy(target, source, kCoreBytes);
  memcpy(target + kCoreBytes, source + operand.leading, kCoreBytes);
}

void read_swizzled_row(unsigned char* target, const Operand& operand, int row) {
  const unsigned char* const source =
      operand.start + row / kPieceRows * operand.stride + row % kPieceRows * operand.span;
  memcpy(target, swizzled(source, operand.span), kCoreBytes);
  memcpy(target + kCoreBytes, swizzled(source + kCoreBytes, operand.span), kCoreBytes);
}

void read_row_across(unsigned char* target, const Operand& operand, int row) {
  constexpr int kElement = 2;
  const int rows = operand.span / kElement;
  const unsigned char* const start =
      operand.start + row / rows * operand.leading + row % rows * kElement;
  for (int place = 0; place < kRowBytes / kElement; ++place) {
    const int offset = place / kPieceRows * operand.stride + place % kPieceRows * operand.span;
    memcpy(target + place * kElement, swizzled(start + offset, operand.span), kElement);
  }
}

void read_row(unsigned char* target, const Operand& operand, int row) {
  if (operand.order == Order::kCores) return read_row_of_cores(target, operand, row);
  if (operand.order == Order::kSwizzled) return read_swizzled_row(target, operand, row);
  read_row_across(target, operand, row);
}

float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The hardware ignores the mantissa bits that TF32 lacks.
struct Tf32 {
  using Bits = uint32_t;
  static float widen(Bits bits) { return as_float(bits & 0xffffe000u); }
};

struct Bfloat16 {
  using Bits = uint16_t;
  static float widen(Bits bits) { return as_float(uint32_t{bits} << 16); }
};

// Computes what half_to_float in device/ptx.cuh does, without branches.
struct Float16 {
  using Bits = uint16_t;
  static float widen(Bits bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = (bits & 0x7fffu) << 13;
    const float finite = as_float(magnitude) * 0x1p112f;
    uint32_t widened;
    memcpy(&widened, &finite, sizeof widened);
    return as_float(sign | (magnitude >= 0x0f800000u ? 0x70000000u | magnitude : widened));
  }
};

template <class Element>
struct Row {
  static constexpr int kLength = kRowBytes / sizeof(typename Element::Bits);
  double values[kLength];

  explicit Row(const unsigned char* bytes) {
    typename Element::Bits bits[kLength];
    memcpy(bits, bytes, kRowBytes);
    for (int k = 0; k < kLength; ++k) values[k] = Element::widen(bits[k]);
  }
};

// Each product is exact in double. Four partial sums let the compiler use vector instructions.
template <class Element>
double dot(const Row<Element>& a, const Row<Element>& b) {
  double sums[4] = {};
  for (int k = 0; k < Row<Element>::kLength; k += 4) {
    for (int i = 0; i < 4; ++i) sums[i] += a.values[k + i] * b.values[k + i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class Element>
void multiply_as(const Fragment& fragment, int columns, float* accumulators) {
  const Row<Element> top(fragment.left[0]), bottom(fragment.left[1]);
  for (int i = 0; i < columns / 4; ++i) {
    const Row<Element> column(fragment.right[i]);
    float* const pair = accumulators + i / 2 * 4 + i % 2;
    pair[0] = static_cast<float>(pair[0] + dot(top, column));
    pair[2] = static_cast<float>(pair[2] + dot(bottom, column));
  }
}

}  // namespace

void gather_left(Fragment& fragment, const Operand& left, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
  read_row(fragment.left[0], left, row);
  read_row(fragment.left[1], left, row + 8);
}

void gather_right(Fragment& fragment, const Operand& right, int columns, int thread) {
  for (int i = 0; i < columns / 4; ++i) {
    read_row(fragment.right[i], right, i / 2 * 8 + thread % 4 * 2 + i % 2);
  }
}

unsigned long long fingerprint(const Fragment& fragment, int columns) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&fragment);
  const int size = (2 + columns / 4) * kRowBytes;
  uint64_t lanes[4] = {1, 2, 3, 4};  // four independent chains, so that their latencies overlap
  for (int i = 0; i < size; i += 32) {
    uint64_t words[4];
    memcpy(words, bytes + i, sizeof words);
    for (int k = 0; k < 4; ++k) {
      lanes[k] = (lanes[k] ^ words[k]) * 0x9e3779b97f4a7c15u;
      lanes[k] ^= lanes[k] >> 29;
    }
  }
  uint64_t result = 0;
  for (const uint64_t lane : lanes) result = (result ^ lane) * 0x9e3779b97f4a7c15u;
  return result;
}

void multiply(Scalar scalar, const Fragment& fragment, int columns, float* accumulators) {
  if (scalar == Scalar::kTf32) return multiply_as<Tf32>(fragment, columns, accumulators);
  if (scalar == Scalar::kFloat16) return multiply_as<Float16>(fragment, columns, accumulators);
  return multiply_as<Bfloat16>(fragment, columns, accumulators);
}

}  // namespace emulator
