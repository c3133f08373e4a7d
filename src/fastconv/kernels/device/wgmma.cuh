// wgmma.mma_async, the warpgroup-wide MMA of sm_90a, for each of its 32 values of N. Inline
// assembly names every accumulator register, so the macros below list them; each list extends the
// one before.
#pragma once
#include "device/sm90.cuh"

namespace fastconv {

// clang-format off
#define FASTCONV_REGISTERS_4 "%0, %1, %2, %3"
#define FASTCONV_REGISTERS_8 FASTCONV_REGISTERS_4 ", %4, %5, %6, %7"
#define FASTCONV_REGISTERS_12 FASTCONV_REGISTERS_8 ", %8, %9, %10, %11"
#define FASTCONV_REGISTERS_16 FASTCONV_REGISTERS_12 ", %12, %13, %14, %15"
#define FASTCONV_REGISTERS_20 FASTCONV_REGISTERS_16 ", %16, %17, %18, %19"
#define FASTCONV_REGISTERS_24 FASTCONV_REGISTERS_20 ", %20, %21, %22, %23"
#define FASTCONV_REGISTERS_28 FASTCONV_REGISTERS_24 ", %24, %25, %26, %27"
#define FASTCONV_REGISTERS_32 FASTCONV_REGISTERS_28 ", %28, %29, %30, %31"
#define FASTCONV_REGISTERS_36 FASTCONV_REGISTERS_32 ", %32, %33, %34, %35"
#define FASTCONV_REGISTERS_40 FASTCONV_REGISTERS_36 ", %36, %37, %38, %39"
#define FASTCONV_REGISTERS_44 FASTCONV_REGISTERS_40 ", %40, %41, %42, %43"
#define FASTCONV_REGISTERS_48 FASTCONV_REGISTERS_44 ", %44, %45, %46, %47"
#define FASTCONV_REGISTERS_52 FASTCONV_REGISTERS_48 ", %48, %49, %50, %51"
#define FASTCONV_REGISTERS_56 FASTCONV_REGISTERS_52 ", %52, %53, %54, %55"
#define FASTCONV_REGISTERS_60 FASTCONV_REGISTERS_56 ", %56, %57, %58, %59"
#define FASTCONV_REGISTERS_64 FASTCONV_REGISTERS_60 ", %60, %61, %62, %63"
#define FASTCONV_REGISTERS_68 FASTCONV_REGISTERS_64 ", %64, %65, %66, %67"
#define FASTCONV_REGISTERS_72 FASTCONV_REGISTERS_68 ", %68, %69, %70, %71"
#define FASTCONV_REGISTERS_76 FASTCONV_REGISTERS_72 ", %72, %73, %74, %75"
#define FASTCONV_REGISTERS_80 FASTCONV_REGISTERS_76 ", %76, %77, %78, %79"
#define FASTCONV_REGISTERS_84 FASTCONV_REGISTERS_80 ", %80, %81, %82, %83"
#define FASTCONV_REGISTERS_88 FASTCONV_REGISTERS_84 ", %84, %85, %86, %87"
#define FASTCONV_REGISTERS_92 FASTCONV_REGISTERS_88 ", %88, %89, %90, %91"
#define FASTCONV_REGISTERS_96 FASTCONV_REGISTERS_92 ", %92, %93, %94, %95"
#define FASTCONV_REGISTERS_100 FASTCONV_REGISTERS_96 ", %96, %97, %98, %99"
#define FASTCONV_REGISTERS_104 FASTCONV_REGISTERS_100 ", %100, %101, %102, %103"
#define FASTCONV_REGISTERS_108 FASTCONV_REGISTERS_104 ", %104, %105, %106, %107"
#define FASTCONV_REGISTERS_112 FASTCONV_REGISTERS_108 ", %108, %109, %110, %111"
#define FASTCONV_REGISTERS_116 FASTCONV_REGISTERS_112 ", %112, %113, %114, %115"
#define FASTCONV_REGISTERS_120 FASTCONV_REGISTERS_116 ", %116, %117, %118, %119"
#define FASTCONV_REGISTERS_124 FASTCONV_REGISTERS_120 ", %120, %121, %122, %123"
#define FASTCONV_REGISTERS_128 FASTCONV_REGISTERS_124 ", %124, %125, %126, %127"

#define FASTCONV_OPERANDS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FASTCONV_OPERANDS_8 FASTCONV_OPERANDS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FASTCONV_OPERANDS_12 FASTCONV_OPERANDS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FASTCONV_OPERANDS_16 FASTCONV_OPERANDS_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FASTCONV_OPERANDS_20 FASTCONV_OPERANDS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FASTCONV_OPERANDS_24 FASTCONV_OPERANDS_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FASTCONV_OPERANDS_28 FASTCONV_OPERANDS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FASTCONV_OPERANDS_32 FASTCONV_OPERANDS_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FASTCONV_OPERANDS_36 FASTCONV_OPERANDS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FASTCONV_OPERANDS_40 FASTCONV_OPERANDS_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FASTCONV_OPERANDS_44 FASTCONV_OPERANDS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FASTCONV_OPERANDS_48 FASTCONV_OPERANDS_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FASTCONV_OPERANDS_52 FASTCONV_OPERANDS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FASTCONV_OPERANDS_56 FASTCONV_OPERANDS_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FASTCONV_OPERANDS_60 FASTCONV_OPERANDS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FASTCONV_OPERANDS_64 FASTCONV_OPERANDS_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FASTCONV_OPERANDS_68 FASTCONV_OPERANDS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FASTCONV_OPERANDS_72 FASTCONV_OPERANDS_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FASTCONV_OPERANDS_76 FASTCONV_OPERANDS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FASTCONV_OPERANDS_80 FASTCONV_OPERANDS_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FASTCONV_OPERANDS_84 FASTCONV_OPERANDS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FASTCONV_OPERANDS_88 FASTCONV_OPERANDS_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FASTCONV_OPERANDS_92 FASTCONV_OPERANDS_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FASTCONV_OPERANDS_96 FASTCONV_OPERANDS_92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FASTCONV_OPERANDS_100 FASTCONV_OPERANDS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FASTCONV_OPERANDS_104 FASTCONV_OPERANDS_100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FASTCONV_OPERANDS_108 FASTCONV_OPERANDS_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FASTCONV_OPERANDS_112 FASTCONV_OPERANDS_108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FASTCONV_OPERANDS_116 FASTCONV_OPERANDS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FASTCONV_OPERANDS_120 FASTCONV_OPERANDS_116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FASTCONV_OPERANDS_124 FASTCONV_OPERANDS_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FASTCONV_OPERANDS_128 FASTCONV_OPERANDS_124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// One instruction for N = `columns`. The input operands are numbered after the accumulator
// registers: `left` is a matrix descriptor in shared memory, or four registers.
#define FASTCONV_WGMMA(columns, registers, a, b, c, d, e, f, shape, types, flags)                   \
  if constexpr (kColumns == columns) {                                                              \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred accumulate;\n"                                                                  \
        "setp.ne.b32 accumulate, %" #c ", 0;\n"                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #columns shape ".f32" types                             \
        " {" FASTCONV_REGISTERS_##registers "}, %" #a ", %" #b ", accumulate, 1, 1" flags ";\n"     \
        "}"                                                                                         \
        : FASTCONV_OPERANDS_##registers                                                             \
        : "l"(left), "l"(right), "r"(static_cast<int>(accumulate)));                                \
  }
#define FASTCONV_WGMMA_FROM_REGISTERS(columns, registers, a, b, c, d, e, f, shape, types, flags)    \
  if constexpr (kColumns == columns) {                                                              \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred accumulate;\n"                                                                  \
        "setp.ne.b32 accumulate, %" #f ", 0;\n"                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #columns shape ".f32" types                             \
        " {" FASTCONV_REGISTERS_##registers "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #e         \
        ", accumulate, 1, 1" flags ";\n"                                                            \
        "}"                                                                                         \
        : FASTCONV_OPERANDS_##registers                                                             \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),                       \
          "r"(static_cast<int>(accumulate)));                                                       \
  }
#define FASTCONV_WGMMA_WIDTHS(instruction, ...) \
  instruction(8, 4, 4, 5, 6, 7, 8, 9, __VA_ARGS__) \
  instruction(16, 8, 8, 9, 10, 11, 12, 13, __VA_ARGS__) \
  instruction(24, 12, 12, 13, 14, 15, 16, 17, __VA_ARGS__) \
  instruction(32, 16, 16, 17, 18, 19, 20, 21, __VA_ARGS__) \
  instruction(40, 20, 20, 21, 22, 23, 24, 25, __VA_ARGS__) \
  instruction(48, 24, 24, 25, 26, 27, 28, 29, __VA_ARGS__) \
  instruction(56, 28, 28, 29, 30, 31, 32, 33, __VA_ARGS__) \
  instruction(64, 32, 32, 33, 34, 35, 36, 37, __VA_ARGS__) \
  instruction(72, 36, 36, 37, 38, 39, 40, 41, __VA_ARGS__) \
  instruction(80, 40, 40, 41, 42, 43, 44, 45, __VA_ARGS__) \
  instruction(88, 44, 44, 45, 46, 47, 48, 49, __VA_ARGS__) \
  instruction(96, 48, 48, 49, 50, 51, 52, 53, __VA_ARGS__) \
  instruction(104, 52, 52, 53, 54, 55, 56, 57, __VA_ARGS__) \
  instruction(112, 56, 56, 57, 58, 59, 60, 61, __VA_ARGS__) \
  instruction(120, 60, 60, 61, 62, 63, 64, 65, __VA_ARGS__) \
  instruction(128, 64, 64, 65, 66, 67, 68, 69, __VA_ARGS__) \
  instruction(136, 68, 68, 69, 70, 71, 72, 73, __VA_ARGS__) \
  instruction(144, 72, 72, 73, 74, 75, 76, 77, __VA_ARGS__) \
  instruction(152, 76, 76, 77, 78, 79, 80, 81, __VA_ARGS__) \
  instruction(160, 80, 80, 81, 82, 83, 84, 85, __VA_ARGS__) \
  instruction(168, 84, 84, 85, 86, 87, 88, 89, __VA_ARGS__) \
  instruction(176, 88, 88, 89, 90, 91, 92, 93, __VA_ARGS__) \
  instruction(184, 92, 92, 93, 94, 95, 96, 97, __VA_ARGS__) \
  instruction(192, 96, 96, 97, 98, 99, 100, 101, __VA_ARGS__) \
  instruction(200, 100, 100, 101, 102, 103, 104, 105, __VA_ARGS__) \
  instruction(208, 104, 104, 105, 106, 107, 108, 109, __VA_ARGS__) \
  instruction(216, 108, 108, 109, 110, 111, 112, 113, __VA_ARGS__) \
  instruction(224, 112, 112, 113, 114, 115, 116, 117, __VA_ARGS__) \
  instruction(232, 116, 116, 117, 118, 119, 120, 121, __VA_ARGS__) \
  instruction(240, 120, 120, 121, 122, 123, 124, 125, __VA_ARGS__) \
  instruction(248, 124, 124, 125, 126, 127, 128, 129, __VA_ARGS__) \
  instruction(256, 128, 128, 129, 130, 131, 132, 133, __VA_ARGS__)
// clang-format on

// d (+)= left * right^T: M = 64 rows of `left` by N = kColumns rows of `right`, over 32 bytes along
// K. A warpgroup's threads hold the accumulators in wgmma's layout:
//   d[4 j + 2 h + i] is row 16 warp + lane / 4 + 8 h, column 8 j + 2 (lane % 4) + i.
// The instruction is asynchronous: between wgmma_fence and wgmma_wait neither d nor the operands
// may be accessed. By default both operands are K-major: elements that follow each other in shared
// memory follow each other along K. 16-bit operands may also be MN-major, which kLeftMnMajor and
// kRightMnMajor say of `left` and `right`.
template <int kColumns>
__device__ __forceinline__ void wgmma(Tf32, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k8", ".tf32.tf32", "")
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
__device__ __forceinline__ void wgmma(Float16, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  if constexpr (kLeftMnMajor && kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 1, 1")
  } else if constexpr (kLeftMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 1, 0")
  } else if constexpr (kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 0, 1")
  } else {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 0, 0")
  }
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
__device__ __forceinline__ void wgmma(Bfloat16, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  if constexpr (kLeftMnMajor && kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 1, 1")
  } else if constexpr (kLeftMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 1, 0")
  } else if constexpr (kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 0, 1")
  } else {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 0, 0")
  }
}

// `left` in registers: left[h + 2 i] holds 4 bytes of row 16 warp + lane / 4 + 8 h, from byte 16 i
// + 4 (lane % 4) on. These registers may not be written either until the wgmma is complete.
template <int kColumns>
__device__ __forceinline__ void wgmma(Tf32, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k8", ".tf32.tf32", "")
}
template <int kColumns>
__device__ __forceinline__ void wgmma(Float16, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k16", ".f16.f16", ", 0")
}
template <int kColumns>
__device__ __forceinline__ void wgmma(Bfloat16, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k16", ".bf16.bf16", ", 0")
}

}  // namespace fastconv
