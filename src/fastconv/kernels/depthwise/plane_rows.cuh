// The layout of contiguous (NCHW) tensors' rows in shared memory, and how threads read their
// windows from them.
#pragma once
#include "depthwise/depth.cuh"

namespace fastconv {
namespace depthwise {

// Vector copies begin at multiples of `vector`: kShift columns before the first one needed.
constexpr int kShift = (Columns::kOrigin % C::vector + C::vector) % C::vector;
constexpr int kColumns = round_up(kShift + kHaloColumns, C::vector);
constexpr int kFirstVector = C::inside ? (kShift + kFirstColumn) / C::vector : 0;
constexpr int kEndVector =
    C::inside ? ceil_div(kShift + kEndColumn, C::vector) : kColumns / C::vector;
static_assert(kColumns <= C::pitch && C::pitch % C::vector == 0, "rows are aligned");
static_assert(kTilesX == 1 || kTileColumns * Columns::kTimes / Columns::kOver % C::vector == 0,
              "all tiles have the same shift");
constexpr int kPlane = kHaloRows * C::pitch + C::plane_padding;

// A window's row is read in vectors of `piece` elements if every thread's row begins at a multiple
// of them.
constexpr int kThreadStep = C::columns * Columns::kTimes / Columns::kOver;
constexpr bool kInPieces = C::piece > 1;
constexpr int kLead = kInPieces ? kShift % C::piece : 0;  // unused elements of the first piece
constexpr int kPieces = ceil_div(kLead + kWindowColumns, C::piece);
constexpr int kFirstPiece = kShift - kLead;  // column where the first thread's window begins
static_assert(!kInPieces || (Columns::kUnit == 1 && kThreadStep % C::piece == 0 &&
                             C::pitch % C::piece == 0 && kPlane % C::piece == 0),
              "pieces are aligned");

// Elements of a plane in global memory, and of a channel: its planes at all depths of a volume.
constexpr long long kInPlane = 1ll * C::in_height * C::in_width;
constexpr long long kOutPlane = 1ll * C::out_height * C::out_width;
constexpr long long kInChannel = kInPlane * D::in;
constexpr long long kOutChannel = kOutPlane * D::out;

// A row of a thread's window in registers. `kept` makes the compiler load whole pieces: it would
// otherwise load elements one by one where some are unused, with bank conflicts, because threads
// are a piece apart.
struct WindowRow {
  Acc elements[kPieces * C::piece];

  __device__ explicit WindowRow(const Scalar* row) {
    if constexpr (kInPieces) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        using Piece = Vector<Scalar, C::piece>;
        widen_vector(*reinterpret_cast<const Piece*>(row + i * C::piece), elements + i * C::piece);
      }
#pragma unroll
      for (Acc& element : elements) element = kept(element);
    } else {
#pragma unroll
      for (int i = 0; i < kWindowColumns; ++i) elements[i] = widen(row[i * Columns::kUnit]);
    }
  }
  __device__ __forceinline__ Acc operator[](int i) const { return elements[kLead + i]; }
};

// Copies kRows rows of kVectors vectors from one plane of each of kSlots images, which are `image`
// elements apart. A thread copies vectors of one column; rows of more vectors than there are
// threads are copied in parts.
template <int kSlots, int kRows, int kVectors, int kVector, int kPitch, int kSlot, int kHeight,
          int kWidth, int kThreads>
__device__ __forceinline__ void load_planes(Scalar* target, const Scalar* plane, long long image,
                                            int images_left, int first_row, int first_column) {
  if constexpr (kVectors > kThreads) {
    constexpr int kDone = kThreads * kVector;  // columns
    load_planes<kSlots, kRows, kThreads, kVector, kPitch, kSlot, kHeight, kWidth, kThreads>(
        target, plane, image, images_left, first_row, first_column);
    load_planes<kSlots, kRows, kVectors - kThreads, kVector, kPitch, kSlot, kHeight, kWidth,
                kThreads>(target + kDone, plane, image, images_left, first_row,
                          first_column + kDone);
  } else {
    constexpr int kAtOnce = kThreads / kVectors;
    const int thread = static_cast<int>(threadIdx.x);
    if (kThreads % kVectors != 0 && thread >= kAtOnce * kVectors) return;
    const int at = thread % kVectors * kVector;
    const int x = first_column + at;
    const bool inside = static_cast<unsigned>(x) < kWidth;
    target += at;
#pragma unroll 4
    for (int row = thread / kVectors; row < kSlots * kRows; row += kAtOnce) {
      const int slot = kSlots == 1 ? 0 : row / kRows;
      const int y = first_row + (kSlots == 1 ? row : row % kRows);
      const bool exists =
          inside && static_cast<unsigned>(y) < kHeight && (kSlots == 1 || slot < images_left);
      const long long source = slot * image + 1ll * y * kWidth + x;
      copy_elements<kVector>(target + slot * (kSlot - kRows * kPitch) + row * kPitch,
                             plane + (exists ? source : 0), exists);
    }
  }
}

// What load_planes copies, of volumes that are kImage elements apart.
template <int kSlots, int kRows, int kVectors, int kCopied, int kPitch, int kSlot, int kHeight,
          int kWidth, int kThreads, long long kImage>
struct PlaneRectangle {
  static constexpr int kVector = kCopied;
  static constexpr bool kAtOnce = kVectors <= kThreads;
  static constexpr int kTotal = kSlots * kRows;
  static constexpr int kStep = max_of(1, kThreads / kVectors);
  static constexpr long long kReach = kSlots * kImage;

  int images_left, first_row, first_column;

  __device__ static int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return kThreads % kVectors != 0 && thread >= kStep * kVectors ? kTotal : thread / kVectors;
  }
  __device__ __forceinline__ Located<long long> locate(int row) const {
    const int at = static_cast<int>(threadIdx.x) % kVectors * kVector;
    const int x = first_column + at;
    const int slot = kSlots == 1 ? 0 : row / kRows;
    const int y = first_row + (kSlots == 1 ? row : row % kRows);
    const bool exists = static_cast<unsigned>(x) < kWidth && static_cast<unsigned>(y) < kHeight &&
                        (kSlots == 1 || slot < images_left);
    return {slot * kImage + 1ll * y * kWidth + x,
            at + slot * (kSlot - kRows * kPitch) + row * kPitch, exists};
  }
  __device__ __forceinline__ void load(Scalar* target, const Scalar* plane) const {
    load_planes<kSlots, kRows, kVectors, kVector, kPitch, kSlot, kHeight, kWidth, kThreads>(
        target, plane, kImage, images_left, first_row, first_column);
  }
};

}  // namespace depthwise
}  // namespace fastconv
