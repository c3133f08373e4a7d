"""Planners that choose a given kernel and tile, which small problems would not get otherwise."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from emulator.pass_cases import Planner
from fastconv.kernels import gpus, planner
from fastconv.kernels.ampere import block
from fastconv.kernels.ampere.halo import plan as ampere_halo
from fastconv.kernels.ampere.halo.layer import Layer
from fastconv.kernels.ampere.wgrad_halo import plan as ampere_wgrad_halo
from fastconv.kernels.arithmetic import round_up
from fastconv.kernels.family import Declined, Gpu, Kernel, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as hopper_halo
from fastconv.kernels.hopper.implicit_gemm_nchw import plan as implicit_gemm_nchw
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.layers import forward_ways as hopper_forward_ways
from fastconv.kernels.hopper.layers import input_grad_ways as hopper_input_grad_ways
from fastconv.kernels.hopper.layers import relaid_ways
from fastconv.kernels.hopper.relayout import plan as relayout
from fastconv.kernels.hopper.wgrad_halo import plan as hopper_wgrad_halo
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.kernels.planning import limits, slabs
from fastconv.kernels.planning.layers import forward_ways, input_grad_ways
from fastconv.problem import Problem

FORCED = "*"
GEMM = "gemm"
SCALED = "scaled"
MIRRORED = "mirrored"
BOXES = "boxes"
MIRRORED_BOXES = "turned"
BOX_COPIES = "packed"
COPIES = "copies"
HALO_COPIES = "halo"
HALF_COPIES = "half"
MOST_TILES = 1000


@dataclass(frozen=True)
class Forced:
    """Plans a pass with the kernel that large problems get, even where another one is faster.

    Float32 is multiplied as scaled fp16, except in weight gradients (see :class:`ScaledFp16`).
    Weight gradients always use tensor cores. ``tile`` is the tile of a larger problem, as values of
    its kernel's ``TILE_CONSTANTS``; without it, the kernel's rules choose the tile.
    """

    direction: str
    tile: tuple[int, ...] = ()

    scaled_fp16 = False  # whether a weight gradient multiplies float32 as scaled fp16

    @property
    def __name__(self) -> str:
        return self.direction

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{','.join(map(str, self.tile))}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        if gpus.number(gpu) != gpus.number(H200):
            return self._by_ampere(problem, operands, gpu)
        if self.direction == "weight_grad":
            return hopper_wgrad_halo.plan(self._tile(problem, operands, gpu), gpu)
        with _free_scaled_fp16():
            hopper = planner.Switch("hopper")
            made: Plan = getattr(planner, self.direction)(problem, operands, gpu, hopper)
            return made

    def _by_ampere(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        block.check(gpu)
        if self.direction == "weight_grad":
            return ampere_wgrad_halo.plan(self._ampere_tile(problem, operands, gpu), gpu)
        problem = problem.without_idle_dilation
        limits.check_reach(problem, operands)
        layer = Layer.of(problem, operands)
        if self.direction == "forward":
            ways = forward_ways(layer)
        else:
            ways = input_grad_ways(layer, problem, most_together=1)
        scaled = [way for way in ways if way[0].scaled_fp16]
        with suppress(Declined):
            return ampere_halo.plan(scaled or ways, gpu, self._ampere_tiles)
        return ampere_halo.plan(ways, gpu, self._ampere_tiles)

    def _ampere_tile(self, problem: Problem, operands: Operands, gpu: Gpu) -> Any:
        if not self.tile:
            return ampere_wgrad_halo.choose_tile(problem, operands, gpu)
        *sizes, rolling = self.tile
        tile = ampere_wgrad_halo.Tile(problem, operands, *sizes, bool(rolling))
        height, width = problem.kernel_size
        if (
            not tile.fits(gpu)
            or tile.tile_rows > height
            or tile.tile_columns > width
            or tile.tile_channels > round_up(tile.group_in, 8)
            or tile.strip_columns > round_up(problem.output_size[1], 8)
            or tile.step_rows > tile.walk_rows
        ):
            raise Declined("a tile that does not fit")
        return tile

    def _ampere_tiles(self, layer: Any, gpu: Gpu) -> tuple[Any, ...]:
        found = ampere_halo.fitting_tiles(layer, gpu)
        if not self.tile:
            return found
        of_choice = operator.attrgetter(
            "team.warps", "team.loaders", "team.register_tile_m", "team.channel_groups",
            "team.pixels", "patch.rows", "patch.columns",
        )  # fmt: skip
        chosen = tuple(tile for tile in found if of_choice(tile) == self.tile)
        if not chosen:
            raise Declined("a tile that does not fit")
        return chosen

    def _tile(self, problem: Problem, operands: Operands, gpu: Gpu) -> Any:
        if not self.tile:
            return hopper_wgrad_halo.choose_tile(
                problem, operands, gpu, scaled_fp16=self.scaled_fp16
            )
        *sizes, plane_classes = self.tile if len(self.tile) > 8 else (*self.tile, 1)
        layer = hopper_wgrad_halo.Layer(problem, operands, self.scaled_fp16)
        if plane_classes > 1:
            layer = hopper_wgrad_halo.in_plane_classes(layer)
            if layer is None or layer.plane_classes != plane_classes:
                raise Declined("planes that no TMA box brings together")
        tile = hopper_wgrad_halo.Tile(layer, *sizes)
        fitted = tile.fitted(gpu.shared_bytes_per_block)
        boxes = plane_classes == 1 or tile.grad_boxes
        if fitted is None or tile.stage_columns > layer.row_columns or not boxes:
            raise Declined("a tile that does not fit")
        return fitted


@dataclass(frozen=True)
class ScaledFp16(Forced):
    """Plans a weight gradient that multiplies float32 as scaled fp16."""

    scaled_fp16 = True

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{SCALED}{','.join(map(str, self.tile))}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        if not hopper_wgrad_halo.takes_scaled_fp16(problem, operands):
            raise Declined("tensors other than contiguous float32")
        return super().__call__(problem, operands, gpu)


@dataclass(frozen=True)
class Gemm(Forced):
    """Plans a pass with an implicit GEMM kernel, which small images seldom get."""

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{GEMM}{','.join(map(str, self.tile))}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        if self.direction == "weight_grad":
            return self._weight_grad(problem, operands, gpu)
        planes = operands.scalar == "float" and not operands.input_channels_last
        gemm: Any = implicit_gemm_nchw if planes else implicit_gemm_nhwc
        transposed = self.direction == "input_grad"
        layer = gemm.layer_of(problem.without_idle_dilation, operands, gpu, transposed)
        plans: list[Plan] = gemm.plans(layer, gpu, most=MOST_TILES if self.tile else 1)
        for plan in plans:
            if self.tile in ((), tile_of(plan.launches[-1].kernel)):
                return plan
        raise Declined("a tile that does not fit")

    layer_of = staticmethod(wgrad_implicit_gemm.layer_of)  # for weight gradients

    def _weight_grad(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        layer = self.layer_of(problem.without_idle_dilation, operands, gpu)
        for tile in wgrad_implicit_gemm.tiles_of(layer, gpu):
            plan = wgrad_implicit_gemm.plan(tile, gpu)
            if self.tile in ((), tile_of(main_kernel(plan))):
                return plan
        raise Declined("a tile that does not fit")


@dataclass(frozen=True)
class Mirrored(Gemm):
    """Plans a weight gradient as an implicit GEMM whose rows are input channels."""

    layer_of = staticmethod(wgrad_implicit_gemm.mirrored_layer_of)

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{MIRRORED}{','.join(map(str, self.tile))}"


@dataclass(frozen=True)
class Boxes(Gemm):
    """Plans a weight gradient whose taps share TMA boxes."""

    layer_of = staticmethod(wgrad_implicit_gemm.boxed_layer_of)

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{BOXES}{','.join(map(str, self.tile))}"


def _mirrored_boxes(problem: Problem, operands: Operands, gpu: Gpu) -> wgrad_implicit_gemm.Layer:
    boxed = wgrad_implicit_gemm.boxed_layer_of
    return wgrad_implicit_gemm.mirrored_layer_of(problem, operands, gpu, boxed)


@dataclass(frozen=True)
class MirroredBoxes(Gemm):
    """Plans such a weight gradient whose rows are input channels."""

    layer_of = staticmethod(_mirrored_boxes)

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{MIRRORED_BOXES}{','.join(map(str, self.tile))}"


@dataclass(frozen=True)
class BoxCopies(Forced):
    """Plans a weight gradient whose taps share TMA boxes of channels-last copies."""

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{BOX_COPIES}{','.join(map(str, self.tile))}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        if self.direction != "weight_grad" or operands.scalar_bytes != 2:
            raise Declined("boxes of other passes than weight gradients in 16 bits")
        last = relayout.channels_last(operands)
        plan = Boxes(self.direction, self.tile)(problem, last, gpu)
        return relayout.weight_gradient(plan, problem, operands)


@dataclass(frozen=True)
class Copies(Forced):
    """Plans a pass on channels-last copies, which only layers of many channels get."""

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{COPIES}{','.join(map(str, self.tile))}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        last = relayout.channels_last(operands)
        if self.direction == "weight_grad" and operands.scalar_bytes != 2:
            raise Declined("weight gradients of elements that do not have 16 bits")
        plan = Gemm(self.direction, self.tile)(problem, last, gpu)
        if self.direction == "weight_grad":
            return relayout.weight_gradient(plan, problem, operands)
        return relayout.convolution(plan, problem, last, self.direction == "input_grad")


@dataclass(frozen=True)
class HaloCopies(Forced):
    """Plans a pass with halo tiles on channels-last copies.

    Copies of volumes are whole, however large, unless they are ``limited``.
    """

    limited = False

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{HALO_COPIES}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        last = relayout.channels_last(operands)
        if self.direction == "weight_grad":
            limits.check_reach(problem, operands)
            tile = hopper_wgrad_halo.choose_tile(problem, last, gpu)
            return relayout.weight_gradient(hopper_wgrad_halo.plan(tile, gpu), problem, operands)
        if problem.depth is not None:
            last = replace(last, output_channels_last=False)
            with _sizes_of_copies(self.limited):
                ways = relaid_ways(_hopper_ways(self.direction, problem, last))
            if not ways:
                raise Declined("volumes that are not computed in slabs")
            return hopper_halo.plan(ways, gpu)
        plan = hopper_halo.plan(_hopper_ways(self.direction, problem, last), gpu)
        problem = problem.without_idle_dilation
        return relayout.convolution(plan, problem, last, self.direction == "input_grad")


@dataclass(frozen=True)
class HalfCopies(Forced):
    """Plans a pass of scaled fp16 on a float16 copy, which only large layers get.

    Copies of volumes are whole, however large, unless they are ``limited``.
    """

    limited = False

    @property
    def word(self) -> str:
        return f"{self.direction}{FORCED}{HALF_COPIES}"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        with _sizes_of_copies(self.limited):
            ways = _hopper_ways(self.direction, problem, operands)
        copied = [way for way in ways if way[0].half_copy]
        if not copied:
            raise Declined("layers whose input scaled fp16 does not copy")
        return hopper_halo.plan(copied, gpu)


@contextmanager
def _sizes_of_copies(limited: bool) -> Iterator[None]:
    """Lets planners copy volumes of any size as a whole, unless copies are ``limited``."""
    if limited:
        yield
        return
    with mock.patch.object(slabs, "most_copied", return_value=2**62):
        yield


def _hopper_ways(direction: str, problem: Problem, operands: Operands) -> Any:
    """The ways of Hopper's halo kernel to compute a forward pass or an input gradient."""
    limits.check_reach(problem, operands)
    ways_of = hopper_input_grad_ways if direction == "input_grad" else hopper_forward_ways
    return ways_of(problem.without_idle_dilation, operands)


def main_kernel(plan: Plan) -> Kernel:
    """The kernel of a plan that its tile belongs to."""
    kernels = [launch.kernel for launch in plan.launches]
    return next((kernel for kernel in kernels if kernel.source in TILE_CONSTANTS), kernels[0])


def tile_of(kernel: Kernel) -> tuple[int, ...]:
    constants: dict[str, Any] = dict(kernel.constants)
    if "loaders" in constants:
        constants["loaders"] //= 32
    return tuple(int(constants[name]) for name in TILE_CONSTANTS[kernel.source])


@contextmanager
def _free_scaled_fp16() -> Iterator[None]:
    """Makes Hopper's planners prefer scaled fp16 for float32, at no cost."""
    free = dict.fromkeys(hopper_halo.SCALED_FP16_COST, -1.0)
    with mock.patch.multiple(hopper_halo, SCALED_FP16_CYCLES=0.0, SCALED_FP16_COST=free):
        yield


def planner_of(word: str) -> Planner:
    """The planner of a word such as "forward", "forward*", "weight_grad*2,3,9,1,1,1,16,4"."""
    direction, forced, tile = word.partition(FORCED)
    if not forced:
        chosen: Planner = getattr(planner, direction)
        return chosen
    kinds = {
        GEMM: Gemm,
        SCALED: ScaledFp16,
        MIRRORED: Mirrored,
        COPIES: Copies,
        BOXES: Boxes,
        MIRRORED_BOXES: MirroredBoxes,
        BOX_COPIES: BoxCopies,
        HALO_COPIES: HaloCopies,
        HALF_COPIES: HalfCopies,
    }
    name = next((name for name in kinds if tile.startswith(name)), "")
    sizes = tile.removeprefix(name)
    kind = kinds.get(name, Forced)
    return kind(direction, tuple(map(int, sizes.split(","))) if sizes else ())


def word_of(chosen: Planner) -> str:
    """The word of a planner: the inverse of :func:`planner_of`."""
    return chosen.word if isinstance(chosen, Forced) else chosen.__name__


# The constants of each kernel that identify its tile.
TILE_CONSTANTS = {
    "hopper/wgrad_halo/kernel.cuh": (
        "channel_groups", "kernel_rows", "mma_taps", "mma_octets", "segments",
        "interleaved_images", "stage_columns", "strip_stages", "plane_classes",
    ),
    "ampere/wgrad_halo/kernel.cuh": (
        "row_tiles", "warps_out", "warps_units", "warps_pixels", "tile_channels", "tile_rows",
        "tile_columns", "strip_columns", "step_rows", "slice_mmas", "rolling",
    ),
    "ampere/halo/kernel.cuh": (
        "warps", "loaders", "register_tile_m", "channel_groups", "pixels", "block_rows",
        "tile_columns",
    ),
    implicit_gemm_nhwc.SOURCE: ("consumers", "tile_columns", "blocks"),
    implicit_gemm_nchw.SOURCE: ("row_tiles", "columns", "tile_pixels", "flat", "whole", "piece"),
    wgrad_implicit_gemm.SOURCE: (
        "row_groups", "column_groups", "mma_columns", "depth", "blocks", "whole", "cluster",
        "teams", "team_warps",
    ),
    wgrad_implicit_gemm.HALO_SOURCE: (
        "row_groups", "column_groups", "mma_columns", "halo_channels", "halo_planes", "halo_rows",
        "halo_chunks", "patch_rows", "patch_columns", "whole",
    ),
}  # fmt: skip
GEMMS = (implicit_gemm_nhwc.SOURCE, implicit_gemm_nchw.SOURCE, wgrad_implicit_gemm.SOURCE)


def kind_of(plan: Plan) -> type[Forced]:
    kernel = main_kernel(plan)
    if any(launch.kernel.entry == "copy" for launch in plan.launches):
        return HalfCopies
    if kernel.source == wgrad_implicit_gemm.HALO_SOURCE:
        if plan.regions:
            return BoxCopies
        return MirroredBoxes if _is_mirrored(kernel) else Boxes
    if plan.regions:
        return Copies if kernel.source in GEMMS else HaloCopies
    if kernel.source in GEMMS:
        # Only mirrored weight gradients store taps in reverse.
        mirrored = kernel.source == wgrad_implicit_gemm.SOURCE and _is_mirrored(kernel)
        return Mirrored if mirrored else Gemm
    is_weight_grad = kernel.source == "hopper/wgrad_halo/kernel.cuh"
    return ScaledFp16 if is_weight_grad and dict(kernel.constants)["scaled_fp16"] else Forced


def _is_mirrored(kernel: Kernel) -> bool:
    constants: dict[str, Any] = dict(kernel.constants)
    return bool(constants["weight_stride_width"] < 0)
