// Products of small matrices by the tensor cores of a warp, from sm_80 on: all lanes take part.
//
// What lane 4 g + t holds of a matrix of 8 rows of 16 bytes, a fragment of 4 bytes: bytes 4 t to
// 4 t + 3 of row g. These are two elements of 16 bits, or one of TF32.
#pragma once
#include "device/sm80.cuh"

namespace fastconv {

// sums += left * right^T: 16 rows by 8 rows, each of 32 bytes. `left` is four matrices: its upper
// and lower 8 rows, first of their first 16 bytes, then of the others; `right` is two: first and
// last 16 bytes. A lane has the sums of rows g, columns 2 t and 2 t + 1, then of row g + 8.
__device__ __forceinline__ void mma(Tf32, float (&sums)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Float16, float (&sums)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Bfloat16, float (&sums)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace fastconv
