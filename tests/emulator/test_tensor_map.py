"""TMA copies of boxes in the emulator, compared with indexing of the tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tensor_maps
from fastconv.kernels.family import Im2colMap, Launch, TensorMap
from tensor_maps import Case

from . import EmulatorError, precompile, run, run_both_orders
from .faults import Changed

SEEDS = range(4)
CASES = {seed: tensor_maps.cases(seed) for seed in SEEDS}
STORES = {seed: tensor_maps.stores(seed) for seed in SEEDS}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    launches = [case.launch for case in CASES[0].values()]
    launches += [case.storing_launch for case in STORES[0].values()]
    launches += [faulty(*fault) for _, *fault, _ in FAULTY.values()]
    precompile(launch.kernel for launch in launches)


def memory(case: Case) -> dict[str, Tensor]:
    boxes = torch.full(case.boxes_shape, -1, dtype=torch.int32)
    return {"tensor": case.memory, "coordinates": case.coordinates, "boxes": boxes}


@pytest.mark.parametrize("name", CASES[0])
def test_load(name: str) -> None:
    inside = 0
    for cases in CASES.values():
        tensors = memory(cases[name])
        run_both_orders([cases[name].launch], tensors)
        expected = cases[name].loaded()
        assert torch.equal(tensors["boxes"], expected), cases[name].map
        inside += int(expected.count_nonzero())
    assert inside > 0


@pytest.mark.parametrize("name", STORES[0])
def test_store(name: str) -> None:
    for cases in STORES.values():
        case = cases[name]
        boxes = torch.randn(case.boxes_shape).view(torch.int32)
        tensors = memory(case) | {"tensor": case.memory.clone(), "boxes": boxes}
        run_both_orders([case.storing_launch], tensors)
        written = tensors["tensor"].view(torch.int16)
        assert not torch.equal(written, case.memory.view(torch.int16))
        assert torch.equal(written, case.stored(boxes).view(torch.int16)), case.map


TILED = TensorMap("tensor", "float", (40, 30), (160,), (32, 4), swizzle=128)
PIXELS = Im2colMap("tensor", "float", (8, 5, 5, 2), (32, 160, 800), (-1, 0), (0, 0), 8, 7)
SAME = ("tile", "tile")


def faulty(of: TensorMap | Im2colMap, change: tuple[str, str], entry: str = "load_boxes") -> Launch:
    sound = tensor_maps.kernel(entry, of)
    kernel = Changed(sound.source, entry, sound.constants, *change)
    arguments = (of, "coordinates", "boxes", of.box_bytes)
    return Launch(kernel, (1, 1, 1), 128, 4096 + 8, arguments)


# Coordinates, the map, the change to the kernel (and its entry), a pattern of the error message.
FAULTY = {
    "address": ([0], TILED, ("box(tile,", "box(tile + 512,"), r"tensor_load: .* multiple of 1024"),
    "address_without_swizzle": (
        [0],
        replace(TILED, swizzle=0),
        ("box(tile,", "box(tile + 64,"),
        "not a multiple of 128",
    ),
    "shared_memory": (
        [0],
        replace(TILED, swizzle=0, box=(32, 32)),
        ("box(tile,", "box(tile + 128,"),
        "of shared memory, which has",
    ),
    "too_few_bytes": (
        [0],
        TILED,
        ("loaded, bytes)", "loaded, bytes - 16)"),
        "512 bytes, .* only 496",
    ),
    "too_many_bytes": (
        [0],
        TILED,
        ("loaded, bytes)", "loaded, bytes + 16)"),
        "arrivals and 16 byt",
    ),
    "not_awaited": (
        [0],
        TILED,
        ("fastconv::barrier_wait(", "(void)("),
        "waiting for tensor_load, ",
    ),
    "rank": ([0], TILED, ("Config::rank == 2", "false"), "rank 5, by a tiled map of rank 2"),
    "kind": ([0], PIXELS, ("Config::im2col", "false"), "rank 4, by an im2col map of rank 4"),
    "narrow": ([0], replace(TILED, box=(16, 4)), SAME, "rows of 64 bytes in spans of 128"),
    "larger_than_the_tensor": (
        [0, 29],
        replace(TILED, sizes=(40, 31)),
        SAME,
        "at byte 4800 of tensor, which has 4800",
    ),
    "innermost": ([6], TILED, SAME, "coordinate 0 is 6, not a multiple of 4"),
    "first_pixel": ([0, -2], PIXELS, SAME, "coordinate 1 is -2, outside .* from -1 to 4"),
    "offset": ([0, 0, 0, 0, 0, 256], PIXELS, SAME, "offset 1 is 256, not from 0 to 255"),
    "store_address": (
        [0],
        TILED,
        (", tile)", ", tile + 16)"),
        "store_boxes",
        "tensor_store: .* multiple of 1024",
    ),
    "store_element_strides": (
        [0],
        replace(TILED, element_strides=(1, 2)),
        SAME,
        "store_boxes",
        "element strides",
    ),
    "store_before_the_first": (
        [0, -1],
        TILED,
        SAME,
        "store_boxes",
        "coordinate 1 is -1: illegal instruction",
    ),
    "store_to_rows_that_end_within_16_bytes": (
        [0],
        replace(TILED, sizes=(39, 30)),
        SAME,
        "store_boxes",
        "to rows of 156 bytes",
    ),
    "store_not_awaited": (
        [0],
        TILED,
        ("fastconv::bulk_store_wait()", "0"),
        "store_boxes",
        "without waiting for its bulk stores",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_copy(name: str) -> None:
    coordinates, *fault, message = FAULTY[name]
    numbers = coordinates + [0] * (tensor_maps.NUMBERS - len(coordinates))
    tensors = {
        "tensor": torch.ones(30 * 40),
        "coordinates": torch.tensor(numbers, dtype=torch.int32),
        "boxes": torch.ones(1024, dtype=torch.int32),
    }
    with pytest.raises(EmulatorError, match=message):
        run([faulty(*fault)], tensors)


def test_tensor_must_be_there_and_aligned() -> None:
    case = CASES[0]["2d swizzle 0"]
    tensors = memory(case)
    aligned = tensors.pop("tensor")
    with pytest.raises(EmulatorError, match="the tensor is absent"):
        run([case.launch], tensors)
    moved = torch.cat([aligned[:1], aligned])[1:]
    with pytest.raises(EmulatorError, match="misaligned tensor"):
        run([case.launch], tensors | {"tensor": moved})


def test_arguments_must_fit_the_parameters() -> None:
    case = CASES[0]["2d swizzle 0"]
    mapped, *others = case.launch.arguments
    for arguments in [("tensor", *others), (mapped, mapped, *others[1:])]:
        with pytest.raises(EmulatorError, match=r"tensor passed for map|map passed for tensor"):
            run([replace(case.launch, arguments=arguments)], memory(case))
