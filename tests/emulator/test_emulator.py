"""The emulator runs sound kernels correctly, and reports the faults of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emulator import EmulatorError, precompile, run, run_both_orders
from emulator.driver import HOST
from emulator.snippets import THREADS, VALUES, launch, tensors
from fastconv.kernels.family import FOLDER, Kernel, Launch

WARPS = VALUES.view(-1, 32)
LANES = torch.arange(32)

SOUND = {
    "add": ("if (i < n) out[i] = in[i] + 1;", VALUES + 1),
    "reversal": ("tile[i] = in[i]; __syncthreads(); out[i] = tile[n - 1 - i];", VALUES.flip(0)),
    "shuffle": ("out[i] = __shfl_sync(~0u, in[i], 3);", WARPS[:, 3:4].expand(2, 32)),
    "shuffle_segments": (
        "out[i] = static_cast<float>(__shfl_sync(~0u, static_cast<double>(in[i]), 9, 8));",
        WARPS[:, LANES // 8 * 8 + 1],
    ),
    "shuffle_up": ("out[i] = __shfl_up_sync(~0u, in[i], 2);", WARPS[:, [0, 1, *range(30)]]),
    "shuffle_down": (
        "out[i] = __shfl_down_sync(~0u, in[i], 2);",
        WARPS[:, [*range(2, 32), 30, 31]],
    ),
    "shuffle_xor": ("out[i] = __shfl_xor_sync(~0u, in[i], 5);", WARPS[:, LANES ^ 5]),
    "shuffle_in_part_of_a_warp": (
        "out[i] = in[i]; if (i % 32 < 8) out[i] = __shfl_xor_sync(0xffu, in[i], 1);",
        WARPS[:, torch.where(LANES < 8, LANES ^ 1, LANES)],
    ),
    "shuffle_from_outside_the_mask_is_nan": (
        "out[i] = 0; if (i % 32 < 8) out[i] = __shfl_sync(0xffu, in[i], 8);",
        torch.where(LANES < 8, torch.nan, 0.0).expand(2, 32),
    ),
    "votes": (
        "out[i] = __ballot_sync(~0u, i % 32 == 4) + __any_sync(~0u, i == 3)"
        " + 2 * __all_sync(~0u, i < 32);",
        torch.tensor([[19.0], [16.0]]).expand(2, 32),
    ),
    "warp_barrier": (
        "tile[i] = in[i]; __syncwarp(); out[i] = tile[i ^ 31];",
        WARPS.flip(1),
    ),
    "copies": (
        "copy_async<4>(tile + i, in + i, i != 5); copy_async_commit(); copy_async_wait<0>();"
        "__syncthreads(); out[i] = tile[n - 1 - i];",
        torch.where(VALUES == 6, 0.0, VALUES).flip(0),
    ),
    "copies_land_by_group": (
        "copy_async<4>(tile + i, in + i, true); copy_async_commit();"
        "copy_async<4>(tile + i, out + i, true); copy_async_commit();"
        "copy_async_wait<1>(); out[i] = tile[i]; copy_async_wait<0>();",
        VALUES,
    ),
    "copies_without_a_wait_are_nan": (
        "copy_async<4>(tile + i, in + i, true); copy_async_commit(); __syncthreads();"
        "out[i] = tile[i]; copy_async_wait<0>();",
        torch.full((THREADS,), torch.nan),
    ),
    "shared_memory_starts_as_nan": ("out[i] = tile[i];", torch.full((THREADS,), torch.nan)),
    "math": (
        "out[i] = min(in[i], __uint_as_float(0x7fc00000u)) + max(i, 2u) - fma(2.0f, in[i], 1.0f)"
        " + make_float4(1, 2, 3, 4).w;",
        VALUES + (VALUES - 1).clamp(min=2) - (2 * VALUES + 1) + 4,
    ),
}

# Faulty bodies, with a pattern of the error message.
FAULTY = {
    "read_past_the_end": ("out[i] = in[i + 1];", r"thread 63\nat byte 256 of in, which has 256"),
    "write_past_the_end": ("out[i + 1] = 0;", r"thread 63\nat byte 256 of out, which has 256"),
    "read_before_the_start": ("out[i] = in[i - 1];", r"thread 0\nat byte -4 of in"),
    "read_far_away": ("out[i] = in[i + 9999];", r"thread 0\nat byte 39996 of in"),
    "shared_memory_overflow": ("tile[i + 1] = 0;", r"at byte 256 of shared memory, which has 256"),
    "local_array_overflow": (
        "float local[4] = {}; __syncthreads(); out[i] = local[i % 5];",
        r"thread 4\n.*index 4 out of bounds",
    ),
    "null_pointer": ("const float* absent = nullptr; out[i] = absent[i];", "null pointer"),
    "misaligned_vector": (
        "out[i] = reinterpret_cast<const float4*>(in + i)->x;",
        r"thread 1\n.*misaligned address",
    ),
    "signed_overflow": ("out[i] = 0x7fffffff + n;", "thread 0\n.*signed integer overflow"),
    "exit_before_a_barrier": (
        "if (i < 40) __syncthreads();",
        r"threads 0 to 39: waits in __syncthreads, .*\n +threads 40 to 63: exited\nin block \(0",
    ),
    "two_barriers": (
        "if (i < 40) __syncthreads();\nelse __syncthreads();",
        r"barrier divergence: other threads wait in __syncthreads.*\n.*thread 40\n",
    ),
    "shuffle_without_a_lane": (
        "if (i != 7) out[i] = __shfl_sync(~0u, in[i], 0);",
        r"threads 0 to 6: waits in __shfl_sync, .*\n +threads 7 to 7: exited",
    ),
    "shuffle_meets_vote": (
        "out[i] = i < 7 ? __shfl_sync(~0u, in[i], 0) : __any_sync(~0u, i);",
        r"threads 0 to 6: waits in __shfl_sync, .*\n +threads 7 to 31: waits in __any_sync",
    ),
    "shuffle_outside_its_mask": ("out[i] = __shfl_sync(1u, in[i], 0);", "thread 1\n"),
    "copy_from_misaligned": ("copy_async<8>(tile, in + 1, true);", "from a misaligned address"),
    "copy_to_misaligned": ("copy_async<8>(tile + 1, in, true);", "to a misaligned address"),
    "copy_past_the_end": ("copy_async<4>(tile, in + n, true);", "at byte 256 of in"),
    "copy_to_global_memory": ("copy_async<4>(out, in, true);", "does not lie in shared memory"),
    "copy_without_a_wait": ("copy_async<4>(tile + i, in, true);", "without waiting for its copies"),
    "static_shared_memory": ("__shared__ float more[4];", "error: .*__shared__"),
}

ORDERED = {
    "barrier_missing": "tile[i] = in[i]; out[i] = tile[n - 1 - i];",
    "barrier_missing_before_overwrite": (
        "tile[i] = in[i]; __syncthreads(); out[i] = tile[n - 1 - i]; tile[i] = 0;"
    ),
    "barrier_missing_after_another": (
        "tile[i] = 0; __syncthreads(); __syncthreads(); tile[i] = in[i];out[i] = tile[n - 1 - i];"
    ),
    "warp_barrier_missing": "tile[i] = in[i]; out[i] = tile[i ^ 1];",
    "barrier_missing_after_copies": (
        "copy_async<4>(tile + i, in + i, true); copy_async_commit(); copy_async_wait<0>();"
        "out[i] = tile[n - 1 - i];"
    ),
    "blocks_share_output": "out[i % 64] = in[i];",
}
ROUND_TO_TF32 = launch("round", "out[i] = round_to_even_tf32(in[i]);", blocks=2)
LIMITED = launch("limited", "out[i] = limited(in[i], 2.5f);", blocks=2)

HALF_TO_FLOAT = launch(
    "half_to_float_all",
    "out[i] = half_to_float(reinterpret_cast<const unsigned short*>(in)[i]);",
    blocks=65536 // THREADS,
)
FLOAT_TO_HALF = launch(
    "float_to_half_all",
    "reinterpret_cast<unsigned short*>(out)[i] = float_to_half(in[i]);",
    blocks=4 * 65536 // THREADS,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    bodies = {name: body for name, (body, _) in (SOUND | FAULTY).items()} | ORDERED
    del bodies["static_shared_memory"]
    launches = [launch(name, body) for name, body in bodies.items()]
    launches += [HALF_TO_FLOAT, FLOAT_TO_HALF, ROUND_TO_TF32, LIMITED]
    precompile(launch.kernel for launch in launches)


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel(name: str) -> None:
    body, expected = SOUND[name]
    memory = tensors()
    run_both_orders([launch(name, body)], memory)
    assert_close(memory["out"].view_as(expected), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_kernel(name: str) -> None:
    body, message = FAULTY[name]
    with pytest.raises(EmulatorError, match=message) as error:
        run([launch(name, body)], tensors())
    assert name in str(error.value)


@pytest.mark.parametrize("name", ORDERED)
def test_kernel_that_depends_on_order(name: str) -> None:
    blocks = 2 if name == "blocks_share_output" else 1
    with pytest.raises(EmulatorError, match=f"{name}.*: out depends on the order"):
        run_both_orders([launch(name, ORDERED[name], blocks)], tensors(blocks))


def test_constants_grid_and_absent_tensors(tmp_path: Path) -> None:
    source = tmp_path / "where.cuh"
    source.write_text("""
      extern "C" __global__ void where(const Config::Element* absent, Config::Element* out) {
        if (absent || gridDim.z != 4 || Config::kFlag) return;
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        out[block] = fastconv::narrow<Config::Element>(Config::kBase + block);
      }""")
    constants = (("Element", "fastconv::float16"), ("kBase", 100), ("kFlag", False))
    out = torch.zeros(24, dtype=torch.float16)
    kernel = Kernel(str(source), "where", constants)
    run([Launch(kernel, (2, 3, 4), 1, 0, ("absent", "out"))], {"out": out})
    assert out.tolist() == list(range(100, 124))
    with pytest.raises(EmulatorError, match=r"where\(Element=fastconv::float16, kBase=100"):
        run([Launch(kernel, (3, 3, 4), 1, 0, ("absent", "out"))], {"out": out})


def test_launches_follow_each_other() -> None:
    memory = tensors()
    add = launch("add", SOUND["add"][0])
    back = Launch(add.kernel, add.grid, add.block, 0, ("out", "in", THREADS))
    run_both_orders([add, back], memory)
    assert_close(memory["in"], VALUES + 2)


def test_arguments_must_fit_the_parameters() -> None:
    kernel = launch("add", SOUND["add"][0]).kernel
    for arguments in [("in", "out"), ("in", 1, 1), ("in", "out", "in")]:
        with pytest.raises(EmulatorError, match=r"2 arguments for 3|passed for"):
            run([Launch(kernel, (1, 1, 1), 1, 0, arguments)], tensors())


def test_impossible_launch() -> None:
    kernel = launch("add", SOUND["add"][0]).kernel
    with pytest.raises(EmulatorError, match="refuses"):
        run([Launch(kernel, (1, 1, 1), 2048, 0, ("in", "out", THREADS))], tensors())


def test_views_keep_their_strides_and_alignment() -> None:
    base = torch.zeros(3 * THREADS)
    out = base[1::2][:THREADS]
    load = launch("add", SOUND["add"][0])
    run([Launch(load.kernel, (1, 1, 1), THREADS, 0, ("in", "out", 2))], {"in": VALUES, "out": out})
    assert base[:4].tolist() == [0, 2, 3, 0]
    vectors = launch("vector_load", "if (i == 0) out[i] = reinterpret_cast<const int4*>(in)->y;")
    run([vectors], tensors())
    with pytest.raises(EmulatorError, match="misaligned address"):
        run([vectors], {"in": VALUES[1:], "out": VALUES.clone()})


def test_half_to_float() -> None:
    every_half = torch.arange(65536).to(torch.int16).view(torch.float16)
    out = torch.empty(65536)
    run([HALF_TO_FLOAT], {"in": every_half, "out": out})
    assert_close(out, every_half.float(), rtol=0, atol=0, equal_nan=True)


def test_float_to_half() -> None:
    """Rounding is monotonic, so all float16 values, all midpoints and their neighbours suffice."""
    every_half = torch.arange(65536).to(torch.int16).view(torch.float16).double()
    every_half[0x7C00] = 65536  # the value that would follow the largest float16
    every_half[0xFC00] = -65536
    middles = ((every_half + every_half.roll(-1)) / 2).float()
    around = [torch.nextafter(middles, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    floats = torch.cat([every_half.float(), middles, *around])
    out = torch.empty(len(floats), dtype=torch.float16)
    run([FLOAT_TO_HALF], {"in": floats, "out": out})
    assert_close(out, floats.half(), rtol=0, atol=0, equal_nan=True)


def _mapped(launch: Launch, numbers: list[float]) -> Tensor:
    memory = {"in": torch.zeros(2 * THREADS), "out": torch.empty(2 * THREADS)}
    memory["in"][: len(numbers)] = torch.tensor(numbers)
    run([launch], memory)
    return memory["out"][: len(numbers)]


def test_round_to_tf32() -> None:
    """Rounds to nearest, ties to even; infinities and NaNs stay as they are."""
    kept = [0.0, -0.0, 1.0, -1.5, 2.0**-126, torch.inf, -torch.inf, torch.nan]
    ulp = 2.0**-10
    rounded = {
        1 + ulp / 2: 1.0,
        -1 - ulp / 2: -1.0,
        1 + ulp / 2 - 2.0**-23: 1.0,
        1 + 1.5 * ulp: 1 + 2 * ulp,
        2 - ulp / 4: 2.0,
    }
    inputs, expected = ([*kept, *values] for values in (rounded, rounded.values()))
    out = _mapped(ROUND_TO_TF32, inputs)
    assert_close(out, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_limited() -> None:
    """Keeps signs, those of infinities too; NaN becomes the limit."""
    expected = {
        **{number: number for number in (0.0, 1.0, -2.25, 2.5)},
        **{2.75: 2.5, -3e38: -2.5, torch.inf: 2.5, -torch.inf: -2.5, torch.nan: 2.5},
    }
    assert _mapped(LIMITED, [*expected]).tolist() == [*expected.values()]


@pytest.mark.parametrize("header", ["ptx", "sm90", "wgmma"])
def test_every_instruction_has_a_twin(header: str) -> None:
    def functions(folder: Path) -> set[str]:
        text = (folder / f"device/{header}.cuh").read_text()
        return set(re.findall(r"(?:inline|__forceinline__|__device__) [\w ]+\*? ?\b(\w+)\(", text))

    assert functions(FOLDER)
    assert functions(FOLDER) <= functions(HOST), (
        f"add the new functions to host/device/{header}.cuh"
    )
