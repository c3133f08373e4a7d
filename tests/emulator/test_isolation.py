"""Mutants: kernels that read elements which their results must not depend on.

The isolation check finds each mutant with its usual patterns, and passes the original kernel. The
emulator alone reports nothing, since all accesses are within the tensors' bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from effort import ALL
from emulator import corpus, driver, isolated, precompile
from emulator.faults import Fault, Faulty, FaultyPlanner
from emulator.pass_cases import PassCase
from fastconv.kernels import planner
from fastconv.problem import NO_EPILOGUE, Epilogue


@dataclass(frozen=True)
class Mutant:
    """A fault, and a small problem whose results it changes."""

    what: str
    line: str
    fault: Fault
    epilogue: Epilogue = NO_EPILOGUE

    @property
    def case(self) -> PassCase:
        return replace(corpus.case_of(self.line), epilogue=self.epilogue)

    @property
    def faulty(self) -> PassCase:
        case = self.case
        return replace(case, planner=FaultyPlanner(case.planner, self.fault))

    def __str__(self) -> str:
        return f"{self.fault.file}: {self.what} ({self.line})"


MUTANTS = [
    Mutant(
        "a row too far: the next channel's",
        "sm_75/1 forward float32 nchw/nchw: 2x3x5x6 4x3x3x3 padding=1,1",
        Fault(
            "direct/forward/kernel.cuh",
            "C::group_in && y >= 0 && y < C::in_height &&",
            "C::group_in && y >= 0 && "
            "y < C::in_height + (first_channel + channel + 1 < C::group_in) &&",
        ),
    ),
    Mutant(
        "weights of channels that do not exist",
        "sm_75/1 forward float32 nchw/nchw: 1x3x5x6 6x3x3x3 padding=1,1",
        Fault(
            "direct/forward/kernel.cuh",
            "|| !read.exists(depth) ||",
            "|| (!read.exists(depth) && m + 1 >= C::group_out) ||",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_75/1 input_grad bfloat16 nhwc/nhwc: 2x3x5x6 4x3x3x3 padding=1,1 stride=2,2",
        Fault(
            "direct/forward/kernel.cuh",
            "C::in_height && x >= 0 &&\n              x < C::in_width;",
            "C::in_height && x >= 0 && x < C::in_width + (y + 1 < C::in_height);",
        ),
    ),
    Mutant(
        "a row too far: the next channel's",
        "sm_75/1 weight_grad float32 nchw/nchw bias: 2x3x5x6 4x3x3x3 padding=1,1",
        Fault(
            "direct/wgrad/kernel.cuh",
            "c < end_channel && y >= 0 && y < kHeight &&",
            "c < end_channel && y >= 0 && y < kHeight + (c + 1 < end_channel) &&",
        ),
    ),
    Mutant(
        "a row too far: the next plane's",
        "sm_90a/1 forward float32 nchw/nchw: 2x4x20x40 4x1x3x3 padding=1,1 groups=4",
        Fault(
            "depthwise/fma/planes.cuh",
            "static_cast<unsigned>(y) < C::in_height)",
            "static_cast<unsigned>(y) < C::in_height + (tile.group(slot) + 1 < planes / kParts))",
        ),
    ),
    Mutant(
        "a halo that is not cleared",
        "sm_90a/1 forward float32 nchw/nchw: 2x4x9x9 4x1x3x3 padding=1,1 groups=4",
        Fault(
            "depthwise/fma/planes.cuh",
            "clear<kInputBytes, kThreads>(inputs(stage));",
            ";",
        ),
    ),
    Mutant(
        "a plane behind the volume: an older one's place",
        "sm_90a/1 forward float32 nhwc/nhwc: 2x8x9x6x8 8x1x3x3x3 padding=1,1,1,1,1,1 groups=8",
        Fault(
            "depthwise/fma/pixels.cuh",
            "if (!plane.reads(number)) continue;",
            "if (!plane.reads(number) && position == 0) continue;",
        ),
    ),
    Mutant(
        "a plane behind the volume: an older one's place",
        "sm_90a/1 forward float32 nchw/nchw: 2x8x9x6x8 8x1x3x3x3 padding=1,1,1,1,1,1 groups=8",
        Fault(
            "depthwise/fma/planes.cuh",
            "if (!plane.reads(number)) continue;",
            "if (!plane.reads(number) && position == 0) continue;",
        ),
    ),
    Mutant(
        "a plane behind the volume: an older one's place",
        "sm_90a/1 weight_grad float32 nhwc/nhwc: 1x8x7x6x8 8x1x3x3x3 padding=1,1,1,1,1,1 groups=8",
        Fault(
            "depthwise/wgrad/kernel.cuh",
            "|| !at.reads(tap)) continue;",
            "|| (!at.reads(tap) && at.position == 0)) continue;",
        ),
    ),
    Mutant(
        "an element too far: the last channel's last",
        "sm_90a/1 forward bfloat16 nchw/nchw: 1x4x1x517 4x1x1x3 padding=0,1 groups=4",
        Fault(
            "depthwise/rows/words.cuh",
            "p + e >= 0 && p + e < length ?",
            "p + e >= -static_cast<int>(blockIdx.x > 0) && p + e < length ?",
        ),
    ),
    Mutant(
        "an element too far: the last channel's last",
        "sm_90a/1 weight_grad float32 nchw/nchw bias: 1x4x1x261 4x1x1x3 padding=0,1 groups=4",
        Fault(
            "depthwise/rows/words.cuh",
            "p + e >= 0 && p + e < length ?",
            "p + e >= -static_cast<int>(blockIdx.x > 0) && p + e < length ?",
        ),
    ),
    Mutant(
        "a position too far: the next image's first",
        "sm_90a/1 forward float16 nhwc/nhwc: 2x8x1x65 8x1x1x3 padding=0,1 groups=8",
        Fault(
            "depthwise/rows/convolve.cuh",
            "first + tensors.origin, tensors.in_length, at.channels, nullptr);",
            "first + tensors.origin, tensors.in_length + (at.batch == 0), at.channels, nullptr);",
        ),
    ),
    Mutant(
        "the next channel's partial sums",
        "sm_90a/1 weight_grad float32 nhwc/nhwc bias: 2x40x1x65 40x1x1x3 padding=0,1 groups=40",
        Fault(
            "causal/reduce.cuh",
            "1ll * tap * dim + channel;",
            "1ll * tap * dim + (channel + 1 < dim ? channel + 1 : channel);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward float16 nhwc/nhwc: 2x8x12x17 8x1x3x3 padding=1,1 groups=8",
        Fault(
            "depthwise/pixel_tiles.cuh",
            "static_cast<unsigned>(x) < kWidth;",
            "static_cast<unsigned>(x) < kWidth + unsigned(y + 1 < kHeight);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 weight_grad float16 nhwc/nhwc: 2x8x6x5 8x1x3x3 padding=1,1 groups=8",
        Fault(
            "depthwise/pixel_tiles.cuh",
            "static_cast<unsigned>(x) < kWidth;",
            "static_cast<unsigned>(x) < kWidth + unsigned(y + 1 < kHeight);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 weight_grad float32 nchw/nchw bias: 2x4x9x9 4x1x3x3 padding=1,1 groups=4",
        Fault(
            "depthwise/plane_rows.cuh",
            "inside && static_cast<unsigned>(y) < kHeight",
            "(inside || (x == kWidth && y + 1 < kHeight)) && static_cast<unsigned>(y) < kHeight",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 input_grad float16 nchw/nchw: 2x2x18x96 2x1x3x15 padding=1,7 groups=2",
        Fault(
            "depthwise/plane_rows.cuh",
            "inside && static_cast<unsigned>(y) < kHeight",
            "(inside || (x == kWidth && y + 1 < kHeight)) && static_cast<unsigned>(y) < kHeight",
        ),
    ),
    Mutant(
        "a tap too far",
        "sm_90a/1 forward float16 nchw/nchw: 2x2x6x14 2x1x7x7 padding=3,3 groups=2",
        Fault(
            "depthwise/toeplitz/kernel.cuh",
            "return is_tap<Columns>(tap) ?",
            "return tap >= 0 && tap < C::kernel_width + (row + 1 < C::kernel_height) ?",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward float16 nhwc/nhwc: 1x8x20x80 8x1x2x37 padding=3,0,18,18 groups=8",
        Fault(
            "depthwise/toeplitz/pixels.cuh",
            "static_cast<unsigned>(x) < C::in_width;",
            "static_cast<unsigned>(x) < C::in_width + unsigned(y + 1 < C::in_height);",
        ),
    ),
    Mutant(
        "sums that are not cleared for the next row",
        "sm_90a/1 forward float16 nchw/nchw: 2x12x6x12 2x12x3x3 padding=1,1",
        Fault(
            "hopper/few_outputs/kernel.cuh",
            "acc[i + kSlotAccumulators] : 0.0f;",
            "acc[i + kSlotAccumulators] : acc[i];",
        ),
    ),
    Mutant(
        "weights of channels that do not exist",
        "sm_90a/1 forward float16 nchw/nchw: 1x12x6x12 3x12x3x3 padding=1,1",
        Fault(
            "hopper/few_outputs/kernel.cuh",
            "channel >= C::group_in) return",
            "(channel >= C::group_in && out + 1 >= C::group_out)) return",
        ),
    ),
    Mutant(
        "the row above an image: the last one's",
        "sm_90a/2 weight_grad bfloat16 nhwc/nchw: 2x2x4x76 66x2x1x4 stride=1,2 padding=3,2,1,2",
        Fault(
            "hopper/wgrad_few_inputs/kernel.cuh",
            "row >= 0 && row < C::in_height;",
            "row + (item.image > 0) >= 0 && row < C::in_height;",
        ),
    ),
    Mutant(
        "a row too far: the next class's",
        "sm_90a/1 weight_grad*1,3,3,1,3,4,16,1,4 tf32 nchw/nchw: 4x8x9x9 8x8x3x3 padding=2,2 "
        "dilation=2,2",
        Fault(
            "hopper/wgrad_halo/copy.cuh",
            "exists ? plane + place.row * C::out_width + first : kClasses * kOutChannel;",
            "plane + place.row * C::out_width + first;",
        ),
    ),
    Mutant(
        "columns behind a row that are not cleared",
        "sm_90a/1 weight_grad*1,3,3,1,3,4,16,1,4 tf32 nchw/nchw: 4x8x9x9 8x8x3x3 padding=2,2 "
        "dilation=2,2",
        Fault(
            "hopper/wgrad_halo/copy.cuh",
            "clear_columns(stage, max(C::out_width - first, 0), place.columns);",
            "",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 weight_grad* float32 nchw/nchw: 2x3x6x9 8x3x1x3 stride=2,1 padding=0,1",
        Fault(
            "hopper/wgrad_halo/load.cuh",
            "max(left, 0) : C::in_width;",
            "max(left, 0) : C::in_width + 1;",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 weight_grad*gemm tf32 nchw/nchw bias: 2x2x6x9 8x2x1x3 stride=2,1 padding=0,1",
        Fault(
            "hopper/wgrad_implicit_gemm/gather.cuh",
            "static_cast<unsigned>(column + offset) < C::in_width;",
            "static_cast<unsigned>(column + offset) < C::in_width + 1u;",
        ),
    ),
    Mutant(
        "a tap of the next row",
        "sm_90a/2 weight_grad*gemm bfloat16 nhwc/nhwc: 2x8x7x4 8x8x3x3 padding=1,1",
        Fault(
            "hopper/wgrad_implicit_gemm/load.cuh",
            "tap / C::kernel_width * C::dilation_height},",
            "(tap + 1) / C::kernel_width * C::dilation_height},",
        ),
    ),
    Mutant(
        "pixels of another residue",
        "sm_90a/1 weight_grad*boxes bfloat16 nhwc/nhwc bias: 2x16x4x19 24x16x2x3 stride=1,2",
        Fault(
            "hopper/wgrad_implicit_gemm/halo.cuh",
            "return start + box_of(tap) * box_distance + column * span;",
            "return start + column * span;",
        ),
    ),
    Mutant(
        "the row of the tap before",
        "sm_90a/2 weight_grad*boxes float16 nhwc/nhwc: 2x8x7x9 8x8x3x3 padding=1,1",
        Fault(
            "hopper/wgrad_implicit_gemm/load.cuh",
            "C::padding_top + block.row * C::dilation_height;",
            "C::padding_top + (block.row - (block.row > 0)) * C::dilation_height;",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward*gemm tf32 nchw/nchw: 2x8x6x9 8x8x3x3 padding=1,1",
        Fault(
            "hopper/implicit_gemm_nchw/multiply.cuh",
            "x < 0 || x >= C::in_width) return -1;",
            "x < 0 || x > C::in_width) return -1;",
        ),
    ),
    Mutant(
        "weights of channels that do not exist",
        "sm_90a/1 forward*gemm tf32 nchw/nchw: 1x9x6x8 8x9x3x3 padding=1,1",
        Fault(
            "hopper/implicit_gemm_nchw/weights.cuh",
            "out < C::group_out && in + i < C::group_in));",
            "out < C::group_out && in + i < C::group_in + (out + 1 < C::group_out)));",
        ),
    ),
    Mutant(
        "a row too far at the last tap",
        "sm_90a/1 forward*gemm float16 nhwc/nhwc: 2x8x9x4 16x8x3x3 padding=1,1",
        Fault(
            "hopper/implicit_gemm_nhwc/load.cuh",
            "height.offset(row), depth.offset(plane)}",
            "height.offset(row) + (row + 1 == C::kernel_height), depth.offset(plane)}",
        ),
    ),
    Mutant(
        "the next channels' bias",
        "sm_90a/1 forward*gemm float16 nhwc/nhwc: 2x8x5x6 16x8x1x1",
        Fault(
            "hopper/implicit_gemm_nhwc/store.cuh",
            "load_bias<2, kBiasPairs>(bias + channel);",
            "load_bias<2, kBiasPairs>(bias + (channel + 2) % C::out_channels);",
        ),
    ),
    Mutant(
        "the next position of a residue",
        "sm_90a/1 input_grad*gemm float16 nhwc/nhwc: 3x16x8x6 8x16x3x3 stride=2,2 padding=1,1",
        Fault(
            "hopper/implicit_gemm_nhwc/tile.cuh",
            "return C::transposed ? (residue + padding - dilation * tap) / stride - lower : "
            "dilation * tap;",
            "return C::transposed ? (residue + padding - dilation * tap) / stride - lower + "
            "(tap == 0 && residue == 1) : dilation * tap;",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward* float16 nchw/nhwc: 2x3x3x71 37x3x1x3 padding=0,1,2,1",
        Fault(
            "hopper/halo/stage.cuh",
            "static_cast<unsigned>(piece.columns);",
            "static_cast<unsigned>(piece.columns + 1);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward* float16 nhwc/nhwc: 2x16x5x6 16x16x3x3 padding=1,1",
        Fault(
            "device/tensor/load.cuh",
            "static_cast<unsigned>(C::in_width);\n        copy_async<16>",
            "static_cast<unsigned>(C::in_width + (place.y + 1 < C::in_height));\n        "
            "copy_async<16>",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 input_grad* tf32 nchw/nhwc: 2x9x5x6 16x9x3x3 padding=1,1 stride=2,2",
        Fault(
            "device/tensor/input.cuh",
            "static_cast<unsigned>(x + columns_on) < static_cast<unsigned>(C::in_width) && exists;",
            "static_cast<unsigned>(x + columns_on) < static_cast<unsigned>(C::in_width + (y + "
            "rows_on + 1 < C::in_height)) && exists;",
        ),
    ),
    Mutant(
        "the next channel's bias",
        "sm_90a/1 forward* bfloat16 nhwc/nhwc: 2x24x5x6 16x12x3x3 padding=1,1 groups=2",
        Fault(
            "device/tensor/target.cuh",
            "DepthToSpaceChannel(channel).channel]);",
            "(DepthToSpaceChannel(channel).channel + 1) % kOutGroup]);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_80/1 forward* float16 nhwc/nhwc: 2x16x5x6 16x16x3x3 padding=1,1",
        Fault(
            "device/tensor/load.cuh",
            "static_cast<unsigned>(C::in_width);\n        copy_async<16>",
            "static_cast<unsigned>(C::in_width + (place.y + 1 < C::in_height));\n        "
            "copy_async<16>",
        ),
    ),
    Mutant(
        "weights of channels that do not exist",
        "sm_86/1 forward* tf32 nchw/nhwc: 2x5x5x6 9x5x3x3 padding=1,1",
        Fault(
            "device/tensor/weights.cuh",
            "const bool valid = exists && first + j < C::group_in;",
            "const bool valid = exists && (first + j < C::group_in || out + 1 < C::group_out);",
        ),
    ),
    Mutant(
        "the residual of the pixel before",
        "sm_80/1 forward* float32 nchw/nchw: 2x8x5x6 16x8x3x3 padding=1,1",
        Fault(
            "ampere/halo/store.cuh",
            "epilogue.residual_of<C::store_vector>(target.place(channel, line, column),",
            "epilogue.residual_of<C::store_vector>(target.place(channel, line, column - "
            "(column > target.column ? C::store_vector : 0)),",
        ),
        Epilogue("relu", 0.0, True),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_89/1 weight_grad* bfloat16 nhwc/nchw: 2x8x5x6 8x8x3x3 padding=1,1",
        Fault(
            "ampere/wgrad_halo/load.cuh",
            "is_below(x, C::in_width);",
            "is_below(x, C::in_width + (y + 1 < C::in_height));",
        ),
    ),
    Mutant(
        "the residual of the next pixel",
        "sm_90a/1 forward float32 nchw/nchw: 2x4x8x8 4x1x3x3 padding=1,1 groups=4",
        Fault(
            "device/epilogue.cuh",
            "narrow<Scalar>(activated(accs[i], residual.element[i]));",
            "narrow<Scalar>(activated(accs[i], residual.element[(i + 1) % kCount]));",
        ),
        Epilogue("relu", 0.0, True),
    ),
    Mutant(
        "the residual of the next pixel",
        "sm_90a/1 forward*gemm float16 nhwc/nhwc: 2x8x5x6 16x8x1x1",
        Fault(
            "hopper/implicit_gemm_nhwc/store.cuh",
            "const long long element = valid ? 1LL * pixel *",
            "const long long element = valid ? 1LL * (pixel + (pixel + 1 < rows)) *",
        ),
        Epilogue("silu", 0.0, True),
    ),
    Mutant(
        "a pixel too far: the next channel's",
        "sm_90a/1 weight_grad*gemm tf32 nchw/nchw bias: 2x2x6x9 8x2x1x3 stride=2,1 padding=0,1",
        Fault(
            "direct/bias_grad.cuh",
            "channel, i % kPixels)]",
            "channel, i % kPixels + ((i + 1) % kPixels == 0 && channel + 1 < C::channels))]",
        ),
    ),
    Mutant(
        "the next pixel's channels",
        "sm_90a/1 forward*copies tf32 nchw/nchw: 2x16x3x7 24x16x1x1",
        Fault(
            "hopper/relayout/tile.cuh",
            "return y < rows ? *element : 0;",
            "return y < rows ? element[y + 1 < rows] : 0;",
        ),
    ),
    Mutant(
        "a filter too far: the next volume's",
        "sm_90a/1 input_grad* bfloat16 nchw/nchw: 2x1x2x4x32 17x1x2x4x4 stride=2,4,4",
        Fault(
            "hopper/patches/kernel.cuh",
            "const bool valid = exists && filter < C::filters;",
            "const bool valid = exists && filter < C::filters + (volume == 0);",
        ),
    ),
    Mutant(
        "a box's columns of the next row",
        "sm_90a/1 forward* bfloat16 nchw/nchw: 2x32x8x120 64x32x3x3 padding=1,1",
        Fault(
            "hopper/halo/stage.cuh",
            "static_cast<unsigned>(piece.columns);",
            "static_cast<unsigned>(piece.columns + (C::box_loads && piece.columns > 0));",
        ),
    ),
    Mutant(
        "a channel's next pixel, copied",
        "sm_90a/4 forward*half tf32 nchw/nchw: 2x16x5x6x7 24x16x3x3x3 padding=1,1,1",
        Fault(
            "device/tensor/copy.cuh",
            "load_or_zero(source + 1LL * i * kSourcePixels,",
            "load_or_zero(source + 1LL * i * kSourcePixels + (i == 7 && at + 1 < kImagePixels),",
        ),
    ),
    Mutant(
        "the plane before instead of zeros",
        "sm_90a/1 input_grad* float32 nhwc/nhwc: 1x7x2x1x7 5x7x1x1x3 stride=2,2,2",
        Fault(
            "device/tensor/clear_planes.cuh",
            "plane[x] = C::Scalar{};",
            "plane[x] = at > 0 ? plane[x - C::plane] : C::Scalar{};",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 forward bfloat16 nhwc/nhwc: 2x32x6x7 32x8x3x3 padding=1,1 groups=4",
        Fault(
            "grouped/tile.cuh",
            "static_cast<unsigned>(x + column) < kWidth;",
            "x + column >= 0 && x + column < kWidth + (y + row + 1 < kHeight);",
        ),
    ),
    Mutant(
        "the neighbour's bias",
        "sm_90a/1 forward float16 nhwc/nhwc: 2x32x6x7 32x4x3x3 padding=1,1 groups=8",
        Fault("grouped/convolve/kernel.cuh", "widen(bias[channel])", "widen(bias[channel ^ 1])"),
    ),
    Mutant(
        "a number of the next image and of the next filter",
        "sm_90a/1 forward float32 nchw/nchw: 3x9x1x1 4x9x1x1",
        Fault(
            "dense/kernel.cuh",
            "at < size && k < ks;",
            "at < size && k < ks + (kAlongK && at + 1 < size);",
        ),
    ),
    Mutant(
        "the next octet of channels",
        "sm_90a/1 weight_grad bfloat16 nhwc/nhwc: 2x32x12x14 32x16x3x3 padding=1,1 groups=2",
        Fault("grouped/wgrad/kernel.cuh", "piece % 2 * 16", "(1 - piece % 2) * 16"),
    ),
]

# CI has no time for these.
MORE = [
    Mutant(
        "a column too far: the next row's",
        "sm_75/1 weight_grad float16 nchw/nchw: 2x3x5x6 4x3x3x3 padding=1,1",
        Fault(
            "direct/wgrad/kernel.cuh",
            "c < end_channel && y >= 0 && y < kHeight && x >= 0 && x < kWidth;",
            "c < end_channel && y >= 0 && y < kHeight && x >= 0 && x < kWidth + (y + 1 < kHeight);",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/2 weight_grad bfloat16 nhwc/nchw: 1x2x4x76 66x2x1x4 stride=1,2 padding=3,2,1,2",
        Fault(
            "hopper/wgrad_few_inputs/kernel.cuh",
            "at >= 0 && at < C::in_width;",
            "at >= 0 && at < C::in_width + (row + 1 < C::in_height);",
        ),
    ),
    Mutant(
        "a row too far: the next channel's",
        "sm_90a/1 weight_grad* bfloat16 nchw/nchw: 2x3x6x9 8x3x3x3 padding=1,1",
        Fault(
            "hopper/wgrad_halo/load.cuh",
            "is_below(y + below, C::in_height);",
            "is_below(y + below, C::in_height + (left > 1));",
        ),
    ),
    Mutant(
        "a column too far: the next row's",
        "sm_90a/1 input_grad*gemm tf32 nchw/nchw: 2x8x6x8 8x8x3x3 padding=1,1",
        Fault(
            "hopper/implicit_gemm_nchw/multiply.cuh",
            "x < 0 || x >= C::in_width) return -1;",
            "x < 0 || x >= C::in_width + (y + 1 < C::in_height)) return -1;",
        ),
    ),
    Mutant(
        "the first group's bias",
        "sm_90a/1 forward*gemm tf32 nchw/nchw: 2x16x6x8 16x8x3x3 padding=1,1 groups=2",
        Fault(
            "hopper/implicit_gemm_nchw/store.cuh",
            "load_or_zero(bias + first_channel + channel + column,",
            "load_or_zero(bias + channel + column,",
        ),
    ),
    Mutant(
        "a row too far: the next channel's",
        "sm_80/1 weight_grad* float32 nchw/nchw bias: 2x3x5x6 8x3x3x3 padding=1,1",
        Fault(
            "ampere/wgrad_halo/load.cuh",
            "is_below(y, C::in_height) && is_below(x",
            "is_below(y, C::in_height + (channel + 1 < channels_left)) && is_below(x",
        ),
    ),
    Mutant(
        "the next pixel's channels",
        "sm_90a/1 forward*copies tf32 nchw/nchw: 2x16x3x7 24x16x1x1",
        Fault(
            "hopper/relayout/tile.cuh",
            "return y < rows ? *element : 0;",
            "return y < rows ? element[y + 1 < rows] : 0;",
        ),
    ),
    Mutant(
        "the residual of the pixel before",
        "sm_90a/1 forward float16 nchw/nchw: 2x12x6x12 2x12x3x3 padding=1,1",
        Fault(
            "hopper/few_outputs/kernel.cuh",
            "target[x] = epilogue(output_at(x + lane, channel) + bias, target + x);",
            "target[x] = epilogue(output_at(x + lane, channel) + bias, x + lane > 0 ? target + "
            "x - 1 : target + x);",
        ),
        Epilogue("leaky_relu", 0.3, True),
    ),
]


def _kernel(mutant: Mutant) -> str:
    """The source of the kernel that a mutant is one of."""
    kernels = (launch.kernel for launch in mutant.faulty.plan.launches)
    return next(kernel.source for kernel in kernels if isinstance(kernel, Faulty))


# In CI, the first one of each kernel.
RUN = [*MUTANTS, *MORE] if ALL else [*{_kernel(one): one for one in MUTANTS[::-1]}.values()][::-1]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [case for mutant in RUN for case in (mutant.case, mutant.faulty)]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("mutant", RUN, ids=str)
def test_mutants_are_found(mutant: Mutant) -> None:
    isolated.check(mutant.case)
    with pytest.raises(AssertionError, match="results that read") as found:
        isolated.check(mutant.faulty)
    assert not isinstance(found.value, driver.EmulatorError)


def test_every_kernel_has_a_mutant() -> None:
    assert {_kernel(mutant) for mutant in RUN} == set(planner.ANATOMIES)
