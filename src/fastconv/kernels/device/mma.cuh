// mma.sync, the warp-wide MMA of sm_80 and later. All 32 lanes take part.
//
// A fragment is a lane's 4 bytes of an 8-row matrix with rows of 16 bytes: lane 4 g + t holds bytes
// 4 t to 4 t + 3 of row g. These are two 16-bit elements, or one TF32 element.
#pragma once
#include "device/sm80.cuh"

namespace fastconv {

// acc += left * right^T, with 16 rows of `left` and 8 rows of `right`, each of 32 bytes along K.
// `left` has four fragments: the first 16 bytes of the upper and of the lower 8 rows, then the last
// 16 bytes of both. `right` has two: the first and the last 16 bytes. Lane 4 g + t holds the
// accumulators of row g, columns 2 t and 2 t + 1, then those of row g + 8.
__device__ __forceinline__ void mma(Tf32, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Float16, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Bfloat16, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace fastconv
