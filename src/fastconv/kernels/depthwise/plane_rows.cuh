// How rows of contiguous tensors lie in shared memory, and how a thread reads its window's.
#pragma once
#include "depthwise/axis.cuh"

namespace fastconv {
namespace depthwise {

// Copies begin at multiples of `vector`, up to kShift columns before the first one that is read.
constexpr int kShift = (Columns::kOrigin % C::vector + C::vector) % C::vector;
constexpr int kColumns = round_up(kShift + kHaloColumns, C::vector);
constexpr int kFirstVector = C::inside ? (kShift + kFirstColumn) / C::vector : 0;
constexpr int kEndVector =
    C::inside ? ceil_div(kShift + kEndColumn, C::vector) : kColumns / C::vector;
static_assert(kColumns <= C::pitch && C::pitch % C::vector == 0, "rows are aligned");
static_assert(kTilesX == 1 || kTileColumns * Columns::kTimes / Columns::kOver % C::vector == 0,
              "tiles begin alike");
constexpr int kPlane = kHaloRows * C::pitch + C::plane_padding;

// A window's row is read in pieces, where threads begin at multiples of them.
constexpr int kThreadStep = C::columns * Columns::kTimes / Columns::kOver;
constexpr bool kInPieces = C::piece > 1;
constexpr int kLead = kInPieces ? kShift % C::piece : 0;  // of the first piece, that is not read
constexpr int kPieces = ceil_div(kLead + kWindowColumns, C::piece);
constexpr int kFirstPiece = kShift - kLead;  // of the first thread's window
static_assert(!kInPieces || (Columns::kUnit == 1 && kThreadStep % C::piece == 0 &&
                             C::pitch % C::piece == 0 && kPlane % C::piece == 0),
              "pieces are aligned");

// Elements of a plane.
constexpr long long kInPlane = 1ll * C::in_height * C::in_width;
constexpr long long kOutPlane = 1ll * C::out_height * C::out_width;

// All of a piece is kept, or the compiler would read elements one by one if some are not used: as
// threads are pieces apart, these hit the same banks.
struct WindowRow {
  Sum elements[kPieces * C::piece];

  __device__ explicit WindowRow(const Scalar* row) {
    if constexpr (kInPieces) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        using Piece = Vector<Scalar, C::piece>;
        widen_vector(*reinterpret_cast<const Piece*>(row + i * C::piece), elements + i * C::piece);
      }
#pragma unroll
      for (Sum& element : elements) element = kept(element);
    } else {
#pragma unroll
      for (int i = 0; i < kWindowColumns; ++i) elements[i] = widen(row[i * Columns::kUnit]);
    }
  }
  __device__ __forceinline__ Sum operator[](int i) const { return elements[kLead + i]; }
};

}  // namespace depthwise
}  // namespace fastconv
