"""Hopper's halo kernel on the CPU: every mode, layout and branch, on small odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    check,
    in_batch,
    run,
    some,
)
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.layers import forward_ways, input_grad_ways
from fastconv.problem import Problem

# Few SMs, so that a block takes several work items.
FEW = replace(H200, sm_count=4)
ONE = replace(H200, sm_count=1)
# Little shared memory: accumulators leave in several passes, and weights do not stay resident.
SMALL = Gpu("sm_90a", 4, 90000, 91024)

MODES = {
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
    "float16": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
}


WAYS = {"forward": forward_ways, "input_grad": input_grad_ways}
Choice = Callable[[list[Plan]], Plan]


def planner_of(
    direction: str,
    choose: Choice | None = None,
    scaled_fp16: bool = False,
    depth_to_space: bool = False,
    half_copy: bool = False,
) -> Planner:
    """A planner for the halo kernel, even where the family has a faster one."""

    def planner(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        kind = (scaled_fp16, depth_to_space, half_copy)
        ways = [
            way
            for way in WAYS[direction](problem, operands)
            if (way[0].scaled_fp16, way[0].depth_to_space, way[0].half_copy) == kind
        ]
        if choose is None:
            return halo.plan(ways, gpu)
        return choose(halo.alternatives(ways, gpu, 1000))

    planner.__name__ = direction
    return planner


forward, input_grad = planner_of("forward"), planner_of("input_grad")


def _case(planner: Planner, conv: Conv, mode: str, **options: Any) -> PassCase:
    dtype, precision = MODES[mode]
    options.setdefault("gpu", FEW)
    return PassCase(conv, planner, dtype=dtype, precision=precision, **options)


def _forward(conv: Conv, mode: str, **options: Any) -> PassCase:
    return _case(forward, conv, mode, **options)


def _input_grad(conv: Conv, mode: str, **options: Any) -> PassCase:
    return _case(input_grad, conv, mode, **options)


def _chosen(case: PassCase, choose: Choice) -> PassCase:
    """The test case with the plan that ``choose`` takes from all, of which the rules' is first."""
    return replace(case, planner=planner_of(case.direction, choose))


def named(words: str) -> Choice:
    """Chooses the first plan with these words in its name."""
    return lambda plans: next(plan for plan in plans if words in plan.choice)


def _staged(case: PassCase, slots: int = 2) -> PassCase:
    """The test case with lines that bulk copies load."""
    return _chosen(case, named(f" {slots} staged"))


def _boxed(case: PassCase, slots: int) -> PassCase:
    """The test case with lines that TMA boxes load."""
    return _chosen(case, named(f" {slots} boxed"))


def _copied(case: PassCase) -> PassCase:
    """The test case with lines that lanes copy."""
    return _chosen(case, named(" 2 copied"))


# This one runs in every mode and layout.
EVERYWHERE = Conv(
    "everywhere", (2, 24, 9, 21), (120, 24, 3, 5), padding=(1, 1, 2, 2), dilation=(2, 1)
)
ROLLING = Conv("rolling", (1, 16, 9, 135), (32, 16, 5, 2), padding=(2, 0, 1, 0))
WIDE = Conv("wide", (2, 20, 5, 101), (64, 20, 3, 3), padding=(1, 1, 1, 1))
STRIPS = Conv("strips", (1, 40, 3, 301), (64, 40, 2, 3))
NARROW = Conv("narrow", (2, 40, 13, 7), (64, 40, 3, 3), padding=(1, 1, 1, 1))
STRIDED = Conv("strided", (2, 72, 11, 16), (24, 72, 3, 3), (2, 2), (1, 1, 1, 1))
POINTWISE = Conv("strided pointwise", (2, 72, 8, 16), (20, 72, 1, 1), (2, 2))
DEEP = Conv("many channels", (1, 150, 6, 10), (140, 150, 3, 3), padding=(1, 1, 1, 1))

CASES = [
    # One tap and output rows far apart: they must not be planned as two adjacent rows.
    _input_grad(Conv("one row of a stride", (1, 4, 1, 4), (9, 4, 2, 1), (3, 1), (1, 0, 0, 0)),
                "float16"),
    *(_forward(EVERYWHERE, mode, channels_last=last, other_format=other)
      for mode, last, other in product(MODES, (False, True), (False, True))
      if not other or mode == ("tf32" if last else "bfloat16")),
    # Blocks walk down the image with all channels of a row, in one strip or several.
    *(_forward(ROLLING, mode, channels_last=mode in ("ieee", "bfloat16")) for mode in MODES),
    _forward(ROLLING, "tf32", gpu=SMALL),
    _forward(ROLLING, "float16", channels_last=True, gpu=ONE),
    _forward(Conv("rolling far", (3, 16, 21, 130), (60, 16, 3, 3)), "tf32", gpu=ONE),
    _forward(Conv("rolling, dilated", (2, 16, 11, 140), (64, 16, 3, 4), dilation=(2, 5)),
             "bfloat16"),
    _forward(Conv("rolling strips", (1, 12, 5, 321), (70, 12, 3, 3), padding=(1, 0, 1, 1)),
             "tf32"),
    _forward(Conv("rolling strips", (1, 12, 5, 321), (70, 12, 3, 3), padding=(1, 0, 1, 1)),
             "float16", gpu=ONE),
    _forward(Conv("rolling, unaligned", (1, 10, 6, 150), (20, 10, 2, 3)), "float16",
             aligned=False),
    _forward(Conv("rolling, grouped", (3, 20, 6, 141), (40, 10, 3, 3), groups=2), "tf32",
             gpu=ONE),
    # Several output rows are stacked in one MMA.
    _forward(Conv("stack 2", (1, 24, 7, 20), (32, 24, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    _forward(Conv("stack 4", (1, 24, 10, 20), (15, 24, 4, 3)), "tf32"),
    _forward(Conv("stack 8", (1, 16, 20, 20), (8, 16, 4, 3), padding=(0, 0, 1, 1)), "bfloat16"),
    _forward(Conv("stack 8, rolling", (1, 16, 40, 129), (7, 16, 3, 3)), "tf32"),
    _forward(Conv("stack 8, dilated", (1, 16, 23, 12), (8, 16, 5, 3), dilation=(3, 2)), "tf32"),
    # A line of pixels has several rows.
    *(_forward(NARROW, mode, channels_last=last)
      for mode, last in (("tf32", False), ("bfloat16", True))),
    _forward(Conv("aligned alike", (2, 24, 16, 14), (130, 24, 3, 3), padding=(1, 1, 2, 2)),
             "tf32"),
    _forward(Conv("aligned alike", (2, 40, 17, 8), (72, 40, 3, 3), padding=(1, 1, 1, 1)),
             "float16", gpu=ONE),
    _forward(Conv("unaligned rows", (2, 24, 16, 14), (130, 24, 3, 3)), "ieee", aligned=False),
    _forward(Conv("one column", (2, 16, 50, 1), (64, 16, 5, 1), padding=(2, 2, 0, 0)), "tf32"),
    _forward(Conv("one row", (2, 16, 1, 50), (64, 16, 1, 5), padding=(0, 0, 2, 2)), "float16"),
    # Bulk copies load lines: aligned or not, up to the tensor's end, and beyond its edges.
    *(_staged(_forward(WIDE, mode, gpu=ONE)) for mode in MODES),
    _staged(_forward(WIDE, "float16", other_format=True), slots=1),
    *(_staged(_forward(Conv("wide, all", (1, 13, 3, 77), (60, 13, 1, 3)), mode))
      for mode in ("tf32", "float16")),
    _staged(_forward(Conv("wide, rolling", (1, 12, 7, 144), (64, 12, 2, 2), padding=(0, 0, 2, 2)),
                     "tf32"), slots=1),
    _staged(_forward(Conv("wide, rolling", (1, 12, 7, 88), (64, 12, 3, 3), padding=(1, 1, 3, 3),
                          dilation=(1, 3)), "ieee", gpu=ONE)),
    _staged(_forward(Conv("wide, residues of rows", (1, 24, 11, 30), (64, 24, 3, 3), (2, 1),
                          (2, 1, 0, 1)), "tf32")),
    _staged(_input_grad(Conv("wide, padding beyond the kernel", (1, 64, 8, 58), (18, 64, 3, 3),
                             padding=(3, 3, 4, 4)), "bfloat16")),
    # TMA boxes: lines that begin anywhere, padding, strides, channels of two groups in a box, lines
    # that continue into the next row.
    *(_boxed(_forward(Conv("boxes", (2, 21, 6, 52), (64, 21, 3, 3), padding=(1, 1, 3, 2)), mode,
                      gpu=ONE), slots)
      for mode, slots in (("tf32", 1), ("bfloat16", 2), ("ieee", 1), ("float16", 1))),
    _boxed(_input_grad(Conv("boxes, grouped", (2, 40, 4, 41), (36, 20, 1, 3), (1, 2), groups=2),
                       "bfloat16"), 1),
    _boxed(_forward(Conv("boxes, strided", (1, 20, 7, 56), (24, 20, 2, 3), (2, 2), (1, 0, 2, 1),
                         (2, 3)), "tf32"), 2),
    _boxed(_forward(Conv("boxes, rolling", (1, 8, 6, 342), (40, 8, 3, 3)), "tf32", gpu=ONE), 2),
    # Two producers load, whose pieces have the channels of one vector.
    *(_chosen(_forward(WIDE, mode), named(f" {kind} by 7"))
      for mode, kind in (("tf32", "1 staged"), ("float16", "2 staged"), ("bfloat16", "2 copied"))),
    _chosen(_forward(STRIPS, "tf32", gpu=ONE), named(" 2 staged by 7")),
    _chosen(_forward(Conv("wide, rolling", (1, 12, 7, 144), (64, 12, 2, 2), padding=(0, 0, 2, 2)),
                     "tf32"), named("staged by 7")),
    _chosen(_forward(Conv("wide, stride 3 and dilation 4", (1, 13, 3, 200), (60, 13, 1, 3), (1, 3),
                          dilation=(1, 4)), "bfloat16"), named("staged by 7")),
    _chosen(_input_grad(Conv("wide, grouped", (2, 40, 3, 121), (36, 20, 1, 3), (1, 2),
                             groups=2), "tf32"), named("staged by 7")),
    # A line has the columns of all residues of a stride, or some that no tap reads.
    *(_staged(_forward(Conv("wide, stride 2", (2, 20, 5, 121), (64, 20, 3, 3), (1, 2),
                            (1, 1, 1, 1)), mode, gpu=ONE), slots) for mode, slots in
      (("tf32", 2), ("ieee", 1), ("float16", 2), ("bfloat16", 1))),
    _staged(_forward(Conv("wide, stride 3 and dilation 4", (1, 13, 3, 200), (60, 13, 1, 3), (1, 3),
                          dilation=(1, 4)), "tf32")),
    _staged(_forward(Conv("wide, stride 4 and dilation 6", (1, 20, 9, 130), (64, 20, 3, 5), (2, 4),
                          (2, 1, 5, 3), (1, 6)), "bfloat16", gpu=ONE)),
    _staged(_forward(Conv("wide, few taps of a stride", (1, 32, 6, 150), (64, 32, 2, 2), (3, 5)),
                     "ieee")),
    _staged(_forward(Conv("wide, one residue", (2, 24, 4, 90), (64, 24, 1, 3), (1, 2), (0, 0, 3, 2),
                          (1, 2)), "float16")),
    _copied(_forward(Conv("copied, stride 2", (1, 12, 7, 88), (64, 12, 3, 3), (1, 2),
                          (1, 1, 3, 3)), "tf32", gpu=ONE)),
    _copied(_forward(Conv("copied, pointwise of stride 2", (2, 48, 9, 64), (64, 48, 1, 1), (2, 2)),
                     "bfloat16")),
    # Lanes copy such lines, and whole rows that are aligned.
    *(_copied(_forward(WIDE, mode, gpu=ONE)) for mode in MODES),
    *(_copied(_forward(Conv("copied, all", (1, 13, 3, 77), (60, 13, 1, 3)), mode))
      for mode in ("tf32", "float16")),
    _copied(_forward(Conv("copied, aligned", (2, 40, 9, 16), (72, 40, 3, 3), padding=(2, 2, 2, 2),
                          dilation=(2, 2)), "bfloat16", gpu=ONE)),
    _copied(_forward(Conv("copied, rolling", (1, 12, 7, 88), (64, 12, 3, 3), padding=(1, 1, 3, 3),
                          dilation=(1, 3)), "ieee", gpu=ONE)),
    _copied(_input_grad(Conv("copied, padding beyond the kernel", (1, 64, 8, 24), (18, 64, 3, 3),
                             padding=(3, 3, 4, 4)), "tf32")),
    # Tiles run past the end of a row, into one of another tile: with dilation, and in a stack.
    _staged(_forward(Conv("going on", (1, 16, 9, 300), (64, 16, 3, 3), dilation=(2, 3)), "bfloat16",
                     gpu=ONE)),
    _chosen(_forward(Conv("going on", (1, 16, 8, 299), (32, 16, 3, 2), padding=(2, 1, 1, 2)),
                     "tf32", gpu=ONE), named("+8 pixels")),
    _staged(_input_grad(Conv("going on, padded on one side", (1, 64, 5, 299), (16, 64, 3, 3),
                             padding=(1, 1, 4, 0)), "tf32", gpu=ONE)),
    *(_forward(Conv("going on", (1, 16, 9, 300), (64, 16, 3, 3)), mode, channels_last=True,
               other_format=True, gpu=ONE) for mode in ("tf32", "bfloat16")),
    # Consumer warps store a pixel's channels together.
    *(_forward(Conv("joint", (2, 16, 5, 37), (128, 16, 1, 1)), mode, channels_last=True)
      for mode in ("tf32", "bfloat16")),
    _forward(Conv("joint, single channels", (1, 16, 6, 9), (125, 16, 1, 1)), "float16",
             channels_last=True),
    # Sums are so long that their accumulation is compensated.
    _forward(Conv("long sums", (1, 280, 5, 7), (64, 280, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    # Strides: residues of rows and columns are planes of their own, or channels (space-to-depth).
    _forward(Conv("space-to-depth", (2, 3, 23, 26), (64, 3, 7, 6), (2, 2), (3, 3, 3, 3)), "tf32"),
    _forward(Conv("space-to-depth", (1, 3, 24, 21), (48, 3, 5, 4), (4, 3), (1, 0, 2, 1)),
             "bfloat16", channels_last=True, gpu=ONE),
    _forward(Conv("space-to-depth rows", (1, 12, 19, 30), (64, 12, 4, 3), (3, 2), dilation=(1, 2)),
             "ieee"),
    _forward(Conv("stride 2", (1, 16, 13, 17), (64, 16, 3, 3), (2, 2), (1, 1, 1, 1)), "tf32"),
    _forward(Conv("stride 1, 4", (1, 16, 7, 70), (70, 16, 3, 5), (1, 4), (1, 1, 2, 2)), "tf32",
             channels_last=True),
    _forward(Conv("stride 4, 1", (1, 16, 27, 11), (64, 16, 6, 3), (4, 1)), "float16",
             other_format=True),
    _forward(Conv("stride and dilation", (1, 16, 23, 27), (48, 16, 3, 3), (4, 2), (3, 0, 1, 2),
                  (2, 4)), "ieee"),
    _forward(Conv("stride and dilation", (2, 16, 19, 29), (48, 16, 3, 4), (2, 6), (3, 0, 1, 2),
                  (6, 4)), "tf32", aligned=False, gpu=ONE),
    _forward(Conv("kernel below stride", (1, 32, 14, 16), (64, 32, 2, 1), (4, 3)), "tf32"),
    _forward(Conv("strided pointwise", (2, 48, 9, 11), (64, 48, 1, 1), (2, 3)), "bfloat16",
             channels_last=True),
    # Channels: in groups, many, and odd numbers.
    _forward(Conv("groups of 8", (1, 24, 6, 20), (36, 8, 3, 3), padding=(1, 1, 1, 1), groups=3),
             "float16"),
    _forward(Conv("groups", (2, 40, 6, 9), (144, 20, 3, 2), groups=2), "tf32",
             channels_last=True, gpu=ONE),
    _forward(DEEP, "tf32", gpu=SMALL),
    _forward(DEEP, "ieee", channels_last=True, gpu=SMALL),
    _forward(Conv("odd channels", (1, 13, 7, 24), (60, 13, 2, 3)), "ieee", channels_last=True),
    _forward(Conv("few channels", (1, 3, 9, 40), (64, 3, 7, 7), padding=(3, 3, 3, 3)), "bfloat16",
             bias=False),
    # Pointwise: planned as one line, as two, or as an image.
    _forward(Conv("pointwise", (2, 40, 9, 20), (40, 40, 1, 1)), "tf32"),
    _forward(Conv("pointwise", (1, 72, 7, 9), (128, 72, 1, 1)), "ieee"),
    _forward(Conv("padded pointwise", (1, 16, 5, 6), (64, 16, 1, 1), padding=(1, 0, 2, 3)),
             "float16", other_format=True),
    # The smallest problems, and strips that do not end at a memory sector.
    _forward(Conv("one pixel", (3, 16, 3, 3), (64, 16, 3, 3)), "tf32", bias=False),
    _forward(Conv("one of one", (1, 8, 1, 1), (64, 8, 1, 1)), "ieee", channels_last=True),
    _forward(STRIPS, "tf32"),
    _forward(STRIPS, "tf32", gpu=SMALL),
    _forward(STRIPS, "float16", channels_last=True, other_format=True, gpu=SMALL),
    _forward(STRIPS, "bfloat16", channels_last=True, gpu=SMALL),
    _forward(Conv("whole strips", (1, 24, 3, 320), (64, 24, 1, 1), padding=(1, 0, 0, 0)), "tf32"),
    _input_grad(Conv("asymmetric", (1, 64, 9, 20), (24, 64, 3, 5), padding=(1, 1, 2, 2)), "tf32"),
    _input_grad(Conv("padding beyond the kernel", (1, 64, 6, 9), (16, 64, 2, 3),
                     padding=(4, 3, 5, 4)), "float16"),
    _input_grad(Conv("padding beyond the kernel", (1, 60, 6, 90), (16, 60, 2, 3),
                     padding=(4, 3, 5, 4)), "ieee"),
    _input_grad(Conv("groups", (2, 72, 9, 11), (48, 24, 3, 4), padding=(1, 0, 2, 2), groups=3),
                "bfloat16"),
    _input_grad(Conv("dilated", (1, 40, 15, 16), (72, 40, 3, 4), padding=(2, 1, 4, 3),
                     dilation=(2, 3)), "tf32", channels_last=True),
    _input_grad(Conv("rolling", (1, 64, 6, 150), (16, 64, 3, 3), padding=(1, 1, 1, 1)), "tf32",
                other_format=True),
    _input_grad(Conv("pointwise", (2, 64, 5, 7), (24, 64, 1, 1)), "bfloat16", aligned=False),
    # Input gradients of strides, by residues: each alone, or two residues of columns in one MMA.
    *(_input_grad(STRIDED, mode) for mode in MODES),
    *(_input_grad(STRIDED, mode, channels_last=True) for mode in ("ieee", "bfloat16")),
    *(_input_grad(STRIDED, "tf32", channels_last=last, other_format=True)
      for last in (False, True)),
    _input_grad(STRIDED, "tf32", aligned=False, gpu=ONE),
    _input_grad(Conv("stride 2, deep", (1, 40, 7, 10), (150, 40, 3, 3), (2, 2), (1, 1, 1, 1)),
                "tf32", gpu=SMALL),
    _input_grad(Conv("stride 1, 2", (1, 70, 4, 331), (16, 70, 2, 5), (1, 2), (0, 0, 3, 1)),
                "tf32", gpu=SMALL),
    _input_grad(Conv("stride 1, 2, rolling", (1, 70, 6, 290), (16, 70, 3, 3), (1, 2),
                     (1, 1, 1, 1)), "float16", gpu=ONE),
    _input_grad(Conv("stride 2, 1", (1, 64, 8, 301), (40, 64, 3, 2), (2, 1), (1, 1, 0, 1)),
                "tf32"),
    _input_grad(Conv("stride 2, 1", (2, 64, 9, 16), (40, 64, 2, 3), (2, 1), (0, 0, 1, 1)),
                "float16", gpu=ONE),
    _input_grad(Conv("stride 2, 3", (1, 48, 10, 17), (24, 48, 3, 4), (2, 3), (1, 2, 0, 3)),
                "bfloat16"),
    _input_grad(Conv("stride 2, stacked", (1, 12, 21, 26), (40, 12, 7, 4), (2, 2), (2, 0, 1, 1)),
                "tf32"),
    _input_grad(Conv("stride 2, stacked", (1, 8, 13, 22), (24, 8, 5, 3), (2, 1), (2, 2, 1, 1)),
                "ieee", channels_last=True),
    _input_grad(Conv("stride 2, groups", (2, 72, 9, 12), (48, 24, 3, 4), (2, 2), (1, 0, 2, 2),
                     groups=3), "tf32", gpu=ONE),
    _input_grad(Conv("stride 2, padding beyond the kernel", (1, 64, 6, 9), (16, 64, 2, 3), (2, 2),
                     (5, 4, 6, 3)), "float16"),
    # Residues that no tap reaches, and rows and columns that no window covers.
    *(_input_grad(POINTWISE, mode, channels_last=mode in ("float16", "ieee")) for mode in MODES),
    _input_grad(Conv("strided pointwise, odd", (1, 72, 7, 15), (20, 72, 1, 1), (2, 2),
                     (1, 0, 1, 0)), "ieee"),
    _input_grad(Conv("strided pointwise, odd", (1, 60, 7, 15), (20, 60, 1, 1), (3, 2)),
                "bfloat16", aligned=False),
    _input_grad(Conv("kernel below stride", (1, 64, 15, 17), (24, 64, 2, 1), (4, 3), (1, 0, 2, 0)),
                "tf32"),
    _input_grad(Conv("kernel below stride", (1, 64, 12, 13), (24, 64, 1, 2), (2, 4)), "bfloat16",
                channels_last=True),
    *(_input_grad(Conv("no tap in rows", (1, 64, 9, 16), (24, 64, 1, 3), (2, 1)), "tf32",
                  aligned=aligned) for aligned in (True, False)),
    _input_grad(Conv("no tap in columns", (1, 64, 9, 16), (24, 64, 3, 1), (2, 2)), "float16"),
    _input_grad(Conv("no window at the end", (1, 64, 13, 14), (24, 64, 2, 2), (3, 3)), "ieee",
                channels_last=True),
    _input_grad(Conv("no window at the end", (1, 64, 8, 19), (24, 64, 3, 2), (2, 2), (0, 0, 0, 1)),
                "tf32"),
    _input_grad(Conv("nothing but zeros", (1, 64, 1, 1), (16, 64, 2, 2), (4, 4), (3, 0, 3, 0)),
                "tf32"),
    # Strides of so many rows and columns that a loop clears them, or larger than the image.
    *(_input_grad(Conv("far steps", (1, 64, 13, 31), (16, 64, 1, 1), (9, 10), (0, 0, 3, 0)), mode,
                  channels_last=last) for mode, last in (("tf32", False), ("bfloat16", True))),
    _input_grad(Conv("far steps of rows", (1, 64, 75, 16), (16, 64, 1, 1), (70, 2)), "float16"),
    _input_grad(Conv("steps beyond the image", (1, 64, 3, 5), (16, 64, 1, 1), (1000, 3000)),
                "tf32"),
    # Strides and dilations with a common divisor, and without.
    _input_grad(Conv("stride and dilation", (1, 64, 23, 27), (16, 64, 3, 3), (4, 2), (3, 0, 1, 2),
                     (2, 4)), "ieee"),
    _input_grad(Conv("stride and dilation", (2, 48, 25, 29), (16, 48, 3, 4), (2, 6), (3, 0, 1, 2),
                     (6, 4)), "tf32", channels_last=True, gpu=ONE),
    _input_grad(Conv("stride and dilation", (1, 64, 12, 24), (16, 64, 3, 4), (3, 2), (3, 0, 1, 2),
                     (2, 3)), "bfloat16"),
]  # fmt: skip

RUN = some(CASES, one_in=15)

# Images alone and in a batch, which has other tiles.
ALONE = [
    _forward(Conv("alone", (1, 16, 9, 140), (72, 16, 3, 3), padding=(1, 1, 1, 1)), "tf32"),
    _forward(Conv("alone", (1, 40, 12, 9), (64, 40, 3, 3)), "ieee", channels_last=True),
    _forward(Conv("alone", (1, 72, 7, 9), (130, 72, 1, 1)), "float16"),
    _input_grad(Conv("alone", (1, 72, 12, 16), (24, 72, 3, 3), (2, 2), (1, 1, 1, 1)), "tf32"),
    _input_grad(Conv("alone", (1, 72, 9, 10), (24, 72, 3, 3), (2, 1)), "ieee", channels_last=True),
]
# Convolutions that run with several tiles.
TILES = [
    _forward(Conv("tiles", (1, 16, 11, 139), (72, 16, 3, 2), padding=(1, 1, 1, 1)), "tf32"),
    _forward(Conv("tiles", (1, 40, 12, 24), (64, 40, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    _forward(Conv("tiles", (2, 24, 9, 30), (72, 24, 3, 5)), "bfloat16", channels_last=True),
    _input_grad(Conv("tiles", (2, 72, 12, 36), (24, 72, 3, 3), (2, 1), (1, 1, 1, 1)), "tf32"),
]


def _with_other_tiles(case: PassCase) -> list[PassCase]:
    """The test case with three other tiles, up to the last in the order of the rules."""

    def choice(number: int) -> Callable[[list[Plan]], Plan]:
        return lambda plans: plans[number * (len(plans) - 1) // 3]

    return [_chosen(case, choice(number)) for number in (1, 2, 3)]


OTHER_TILES = [_with_other_tiles(case) for case in TILES]


# Pointwise layers round ties to even in TF32, others away from zero, as cuDNN does.
TIES = {
    True: _forward(Conv("ties", (1, 24, 6, 7), (64, 24, 1, 1)), "tf32"),
    False: _forward(Conv("ties", (1, 24, 6, 7), (64, 24, 3, 3)), "tf32"),
}


def _all_constants(case: PassCase) -> list[dict[str, Any]]:
    """The constants of each halo kernel of the plan, one for each residue."""
    kernels = (launch.kernel for launch in case.plan.launches)
    return [dict(kernel.constants) for kernel in kernels if kernel.entry == "convolve"]


def constants_of(case: PassCase) -> dict[str, Any]:
    """The constants of the plan's last halo kernel."""
    return _all_constants(case)[-1]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [
        *RUN,
        *ALONE,
        *map(in_batch, ALONE),
        *TILES,
        *(other for others in OTHER_TILES for other in others),
        *TIES.values(),
    ]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_cases_cover_all_branches() -> None:
    everything = [constants for case in CASES for constants in _all_constants(case)]

    def values(name: str) -> set[Any]:
        return {constants[name] for constants in everything}

    for name in (
        *("in_channels_last", "out_channels_last", "vector_loads", "staged", "bulk_loads"),
        *("vector_stores", "bulk_stores", "joint_stores", "wraps", "turns"),
        *("rolling", "resident", "transposed", "box_loads"),
        *("low_low_mma", "compensated"),
    ):
        assert values(name) == {False, True}, name
    assert values("channel_groups") == values("parts") == {1, 2}
    assert values("stack") == {1, 2, 4, 8}
    assert values("raw_slots") == {0, 1, 2}
    assert values("loader_warps") == {3, 7}
    for name in ("lead", "plane_padding"):
        assert min(values(name)) == 0 < max(values(name)), name
    for name in (
        *("tile_rows", "k_steps", "stage_taps", "segment_tiles", "groups", "buffers"),
        *("s2d_height", "s2d_width", "stride_height", "stride_width"),
    ):
        assert min(values(name)) == 1 < max(values(name)), name
    assert values("stacked_columns") == values("interleave") == {1, 2}
    assert values("out_step_height") >= {1, 2, 3, 4, 70}
    assert values("out_step_width") >= {1, 2, 3, 4, 6, 10}
    # Kernels clear rows, columns or both beside an output, in every way of storing.
    cleared = {
        (
            constants["out_channels_last"],
            constants["bulk_stores"],
            constants["row_end"] - constants["row_begin"] > 1,
            constants["column_end"] - constants["column_begin"] > constants["stacked_columns"],
        )
        for constants in everything
    }
    assert cleared == {
        (last, bulk, rows, columns)
        for last, bulk, rows, columns in product((False, True), repeat=4)
        if not (last and bulk)
    }
    for axis in ("row", "column"):
        sides = {(c[f"{axis}_at"] > c[f"{axis}_begin"], c[f"{axis}_at"] + 1 < c[f"{axis}_end"])
                 for c in everything}  # fmt: skip
        assert sides >= {(False, False), (True, False), (False, True)}, axis
    assert max(c["stack"] for c in everything if c["stacked_columns"] == 2) > 1
    # Tiles of several rows, several passes or both, in every way of storing.
    stored = {
        (
            constants["out_channels_last"],
            constants["bulk_stores"],
            constants["tile_rows"] > 1,
            constants["pass_pixels"] < constants["pixels"],
        )
        for constants in everything
    }
    assert stored >= {
        (last, bulk, several, False)
        for last, bulk, several in product((False, True), repeat=3)
        if not (last and bulk)
    }
    assert {(last, passes) for last, _, _, passes in stored} == {*product((False, True), repeat=2)}


def _items(case: PassCase) -> int:
    """The number of work items that blocks divide among themselves."""
    of = constants_of(case)
    step = of["dilation_height"] // gcd(of["stride_height"], of["dilation_height"])
    rows = of["tile_rows"] * of["stack"] * 2 // of["channel_groups"]
    tiles = ceil_div(ceil_div(of["out_height"], step), rows)
    outputs = ceil_div(of["group_out"], of["channel_groups"] * 64 // of["stack"])
    strips = ceil_div(of["out_width"] + max(of["lead"] - 1, 0), of["tile_columns"])
    columns = outputs * strips * step * of["groups"] * case.conv.input[0]
    return columns * ceil_div(tiles, of["segment_tiles"])


def test_blocks_take_several_items() -> None:
    """Pipeline stages wrap around, and a work item does not disturb the next one."""
    taken = {
        (constants_of(case)["rolling"], constants_of(case)["resident"])
        for case in CASES
        if _items(case) > 2 * case.plan.launches[-1].grid[0]
    }
    assert taken == {*product((False, True), repeat=2)}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize(("case", "others"), [*zip(TILES, OTHER_TILES, strict=True)])
def test_all_tiles_give_the_same_bits(case: PassCase, others: list[PassCase]) -> None:
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    assert_correct(case, tensors, expected)
    for other in others:
        assert run(other, tensors).equal(expected)


@pytest.mark.parametrize("mode", ["tf32", "bfloat16"])
def test_padding_far_beyond_the_image(mode: str) -> None:
    """The offsets of rows that far in the padding would exceed 32 bits."""
    near = Conv("a row", (1, 64, 1, 1024), (8, 64, 1, 2), (1, 8))
    far = replace(near, stride=(2**15, 8), padding=(2**16, 0, 0, 0))
    assert far.padding[0] * 1024 * 64 > 2**31
    case = _forward(far, mode, channels_last=True)
    tensors = Tensors.random(case)
    actual = run(case, tensors)
    assert actual.shape[2] == 3
    assert_correct(replace(case, conv=near), tensors, actual[:, :, 2:])
    bias = tensors.bias[:, None, None].expand(actual[0, :, :2].shape)
    assert actual[0, :, :2].equal(bias)


@pytest.mark.parametrize("to_even", [False, True], ids=["away from zero", "to even"])
def test_rounds_ties_as_cudnn(to_even: bool) -> None:
    case = TIES[to_even]
    assert case.ties_to_even == to_even
    tensors = Tensors.random(case)
    for tensor in (tensors.input, tensors.weight):  # keeps one mantissa bit more than TF32 has
        tensor.view(torch.int32).bitwise_and_(~0xFFF)
    assert_correct(case, tensors, run(case, tensors))
