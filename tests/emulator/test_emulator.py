"""The emulator runs sound kernels correctly, and says what is wrong with the others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastconv.kernels.family import FOLDER, Kernel, Launch

from . import EmulatorError, precompile, run, run_both_orders
from .driver import HOST

THREADS = 64


@dataclass(frozen=True)
class Snippet(Kernel):
    """A kernel whose ``source`` is the body of its function."""

    @property
    def text(self) -> str:
        return f"""#include "device/scalar.cuh"
#include "device/wgmma.cuh"
using namespace fastconv;
extern "C" __global__ void __launch_bounds__(1024) {self.entry}(
    const float* in, float* out, int n) {{
  float* tile = reinterpret_cast<float*>(shared_memory());
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  {self.source}
}}
"""


def launch(name: str, body: str, blocks: int = 1, shared_bytes: int = 4 * THREADS) -> Launch:
    arguments = ("in", "out", blocks * THREADS)
    return Launch(Snippet(body, name, ()), (blocks, 1, 1), THREADS, shared_bytes, arguments)


def tensors(blocks: int = 1) -> dict[str, Tensor]:
    values = torch.arange(1.0, 1.0 + blocks * THREADS)
    return {"in": values, "out": torch.full_like(values, torch.inf)}


VALUES = tensors()["in"]
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

# What is wrong, and what the message has to say.
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

# On sm_90a: a product of 64 by 24 sums, over 64 bytes of each row, by one warpgroup.
COLUMNS = 24
SCALARS = {"Tf32": torch.float32, "Float16": torch.float16, "Bfloat16": torch.bfloat16}

PRODUCT = """
  const int kBytes = 64 * (64 + 24);
  Barrier* const loaded = reinterpret_cast<Barrier*>(tile + 2048);
  const int row = i / 32 * 16 + i % 32 / 4, column = i % 4 * 2;
  float sums[12];
  if (i == 0) barrier_init(loaded, 1);
  barrier_init_fence();
  __syncthreads();
  if (i == 0) barrier_arrive_expect(loaded, kBytes);
  if (i == 0) bulk_load(tile, in, kBytes, loaded);
  barrier_wait(loaded, 0);
  const Matrix left = matrix(tile, 128, 512), right = matrix(tile + 1024, 128, 512);
  wgmma_fence();
  wgmma<24>(Tf32(), sums, left, right, false);
  wgmma<24>(Tf32(), sums, left + 256 / 16, right + 256 / 16, true);
  wgmma_commit();
  wgmma_wait<0>();
  __syncthreads();  // the sums overwrite the matrices
  for (int j = 0; j < 12; ++j) {
    tile[(row + j / 2 % 2 * 8) * 24 + j / 4 * 8 + column + j % 2] = sums[j];
  }
  fence_async_shared();
  __syncthreads();
  if (i == 0) bulk_store(out, tile, 64 * 24 * 4);
  if (i == 0) bulk_store_commit();
  if (i == 0) bulk_store_wait_read<0>();
"""

RING = """
  Barrier* const full = reinterpret_cast<Barrier*>(tile + 2048);
  Barrier* const empty = full + 1;
  if (i == 0) { barrier_init(full, 1); barrier_init(empty, 128); }
  __syncthreads();
  for (int step = 0; step < 4; ++step) {
    if (i == 0) barrier_wait(empty, (step + 1) % 2);
    if (i == 0) barrier_arrive_expect(full, 128);
    if (i == 0) bulk_load(tile, in + 32 * step, 128, full);
    barrier_wait(full, step % 2);
    if (i / 32 == step) out[i] = tile[i % 32];
    barrier_arrive(empty);
  }
"""

# Half of the tile by a bulk copy of the elected lane, half by copies of all lanes.
BOTH_COPIES = """
  Barrier* const full = reinterpret_cast<Barrier*>(tile + 2048);
  if (i == 0) barrier_init(full, 32);
  __syncthreads();
  if (i < 32) {
    if (is_elected()) { bulk_load(tile, in, 256, full); barrier_expect(full, 256); }
    copy_async<8>(tile + 64 + 2 * i, in + 64 + 2 * i, true);
    __syncwarp();
    barrier_arrive_after_copies(full);
  }
  barrier_wait(full, 0);
  out[i] = tile[i];
"""

# A quarter of the tile by copies of all lanes, the next by writes of theirs.
COPIES_AND_WRITES = """
  Barrier* const full = reinterpret_cast<Barrier*>(tile + 2048);
  if (i == 0) barrier_init(full, 32);
  __syncthreads();
  if (i < 32) {
    copy_async<4>(tile + i, in + i, true);
    tile[32 + i] = in[32 + i];
    barrier_expect_copies(full);
    barrier_arrive(full);
  }
  barrier_wait(full, 0);
  out[i] = tile[i % 64];
"""

# Each warp's four matrices of 8 rows of 16 bytes, through shared memory.
STORED_ROWS = """
  const int lane = i % 32;
  const auto* const words = reinterpret_cast<const unsigned*>(in) + i / 32 * 128;
  const unsigned rows[4] = {words[lane], words[32 + lane], words[64 + lane], words[96 + lane]};
  store_rows(tile + 4 * i, rows);
  __syncthreads();
  for (int j = 0; j < 4; ++j) out[4 * i + j] = tile[4 * i + j];
"""

# What is done to it, and what the message has to say.
FAULTY_ROWS = {
    "row_misaligned": (("tile + 4 * i, rows", "tile + 4 * i + 2, rows"), "not a multiple of 16"),
    "row_outside": (("tile + 4 * i, rows", "tile + 2052, rows"), "a row of 16 bytes at byte 8208"),
    "row_by_some_lanes": (
        ("store_rows(tile", "if (lane) store_rows(tile"),
        r"threads 0 to 0: waits in __syncthreads, .*\n +threads 1 to 31: waits in store_rows",
    ),
}

# In a launch that may begin early: what is done before a thread waits, and what the message has to
# say. The others follow.
EARLY = "wait_for_earlier_launch(); allow_later_launch(); out[i] = in[i] + 1;"
FAULTY_EARLY = {
    "early_read": (
        "tile[i] = in[i]; wait_for_earlier_launch(); out[i] = tile[i];",
        r"thread 0\nin an early launch, before wait_for_earlier_launch\nat byte 0 of in, ",
    ),
    "early_write": (
        "out[i] = 1; wait_for_earlier_launch();",
        r"before wait_for_earlier_launch\nat byte 0 of out, ",
    ),
    "early_copy": (
        "copy_async<4>(tile + i, in + i, true); copy_async_wait<0>(); wait_for_earlier_launch();",
        r"before wait_for_earlier_launch\nat byte 0 of in, ",
    ),
    "early_bulk_load": (
        """
  Barrier* const loaded = reinterpret_cast<Barrier*>(tile + 32);
  if (i == 0) barrier_init(loaded, 1);
  __syncthreads();
  if (i == 0) barrier_arrive_expect(loaded, 128);
  if (i == 0) bulk_load(tile, in, 128, loaded);
  wait_for_earlier_launch();
  barrier_wait(loaded, 0);
""",
        r"thread 0\nin an early launch, before wait_for_earlier_launch\nat byte 0 of in, ",
    ),
    "early_for_another_thread": (
        "if (i == 7) wait_for_earlier_launch(); __syncthreads(); if (i > 6) out[i] = 1;",
        r"thread 8\nin an early launch, before wait_for_earlier_launch\nat byte 32 of out, ",
    ),
    "early_without_a_wait": ("tile[i] = 1;", "no thread of the block calls wait_for_earlier_la"),
}

# Two blocks of a cluster, each of which reads what the other has written.
CLUSTER = """
  const int thread = static_cast<int>(threadIdx.x), at = 63 - thread, other = 1 - cluster_rank();
  tile[thread] = in[i];
  cluster_sync();  // the first
  const float4 four = load_from_block(reinterpret_cast<float4*>(tile + at / 4 * 4), other);
  out[i] = (&four.x)[at % 4];
  cluster_sync();  // the last
"""
SOUND_CLUSTERS = {
    "cluster": ("", ""),
    "cluster_without_exited_threads": (
        "cluster_sync();  // the last",
        "if (thread == 5 || i == n - 1) cluster_sync();",
    ),
}
# What is done to it, and what the message has to say.
FAULTY_CLUSTERS = {
    "cluster_read_of_a_block_that_may_not_have_begun": (
        ("cluster_sync();  // the first", "__syncthreads();"),
        r"load_from_block: block 1 of the cluster may not have begun\nin block \(0, 0, 0\)",
    ),
    "cluster_read_of_a_block_that_has_ended": (
        ("cluster_sync();  // the last", ""),
        r"load_from_block: block 0 of the cluster has ended\nin block \(1, 0, 0\)",
    ),
    "cluster_barrier_that_a_thread_misses": (
        ("cluster_sync();  // the last", "if (i == 70) __syncthreads(); else cluster_sync();"),
        r"threads 0 to 63 of block 0: waits in cluster_sync, .*\n +threads 0 to 5 of block 1: "
        r"waits in cluster_sync, .*\n +threads 6 to 6 of block 1: waits in __syncthreads",
    ),
    "cluster_read_of_no_block": (
        ("at / 4 * 4), other", "at / 4 * 4), 2"),
        "load_from_block: block 2 of a cluster of 2",
    ),
    "cluster_read_of_global_memory": (
        ("float4*>(tile + at / 4 * 4)", "const float4*>(in)"),
        "load_from_block: .* does not lie in shared memory",
    ),
    "cluster_read_misaligned": (
        ("tile + at / 4 * 4", "tile + thread"),
        r"thread 1\n.*misaligned address",
    ),
}
ORDERED_CLUSTERS = {
    "cluster_barrier_missing_before_overwrite": (
        "cluster_sync();  // the last",
        "tile[thread] = 0; cluster_sync();",
    ),
}

# What is done to PRODUCT, and what the message has to say.
FAULTY_PRODUCTS = {
    "barrier_uninitialised": (("barrier_init(loaded, 1)", "0"), "byte 8192.* is not initialised"),
    "barrier_initialised_twice": (("(i == 0) barrier_init", "(true) barrier_init"), "twice"),
    "barrier_misaligned": (("tile + 2048", "tile + 2049"), "misaligned barrier"),
    "barrier_overwritten": (("wgmma_fence();", "tile[2048] = 0;"), r"at byte 8192 of shared"),
    "arrival_missing": (
        ("barrier_arrive_expect(loaded, kBytes)", "0"),
        r"threads 0 to 127: waits in barrier_wait, .*\n.*phase 0 lacks 1 of 1 arrivals",
    ),
    "arrival_too_many": (("if (i == 0) barrier_arrive", "barrier_arrive"), "barrier's 1 arrivals"),
    "bytes_too_many": (("(loaded, kBytes)", "(loaded, 16)"), "5632 bytes, .* expects only 16"),
    "bytes_missing": (
        ("(loaded, kBytes)", "(loaded, kBytes + 16)"),
        r"deadlock.*\n.*barrier_wait, .*\n.*0 of 1 arrivals and 16 bytes",
    ),
    "parity_wrong": (("barrier_wait(loaded, 0)", "barrier_wait(loaded, 2)"), "2 is no parity"),
    "load_not_awaited": (("barrier_wait(loaded, 0);", ""), r"without waiting for bulk_load, .*:\d"),
    "load_awaited_late": (
        ("barrier_wait(loaded, 0);", "if (i) barrier_wait(loaded, 0);"),
        r"changed under a wgmma, .*:\d+\n.*thread 0\n",
    ),
    "load_target_written": (
        ("barrier_wait(loaded, 0)", "tile[7] = 0; barrier_wait(loaded, 0)"),
        "shared memory was written under a bulk_load",
    ),
    "load_source_written": (
        ("barrier_wait(loaded, 0)", "const_cast<float*>(in)[7] = 0; barrier_wait(loaded, 0)"),
        "global memory changed under a bulk_load",
    ),
    "load_to_misaligned": (("(tile, in", "(tile + 2, in"), "bulk_load: misaligned .* shared"),
    "load_from_misaligned": (("(tile, in", "(tile, in + 1"), "bulk_load: misaligned .* global"),
    "load_of_odd_size": (("in, kBytes", "in, kBytes - 4"), "5628 bytes, not a multiple"),
    "load_past_the_end": (("(tile, in", "(tile, in + 4"), "at byte 5632 of in"),
    "load_past_shared_memory": (("(tile, in", "(tile + 1024, in"), "at byte 8192 of shared"),
    "load_from_shared_memory": (("(tile, in", "(tile, tile"), "does not lie in a tensor"),
    "load_to_global_memory": (("(tile, in", "(out, in"), "does not lie in shared memory"),
    "product_without_fence": (("wgmma_fence();", ""), "wgmma without a wgmma_fence"),
    "product_not_committed": (("wgmma_commit();", ""), "without waiting for its products"),
    "product_not_awaited": (("wgmma_wait<0>", "wgmma_wait<1>"), "without waiting for its products"),
    "product_misses_a_warp": (
        ("wgmma_fence();", "if (i / 32 == 2) return; wgmma_fence();"),
        r"threads 0 to 63: waits in __syncthreads, .*\n +threads 64 to 95: exited",
    ),
    "product_by_some_threads": (
        ("wgmma<24>(Tf32(), sums, left +", "if (i != 77) wgmma<24>(Tf32(), sums, left +"),
        "threads 0 and 77 of a warpgroup executed different wgmma",
    ),
    "matrix_outside_shared_memory": (
        ("tile, 128, 512", "tile, 128, 1280"),
        r"64 rows from byte 0 to byte 9216 of shared memory, which has 8208\n.*thread 0\n",
    ),
    "matrix_misaligned": (("matrix(tile, ", "matrix(tile + 1, "), "no matrix starts at byte 4 "),
    "matrix_overwritten": (
        ("__syncthreads();  // the sums", "// the sums"),
        r"shared memory changed under a wgmma, .*:\d+\n.*thread 32\n",
    ),
    "matrix_refilled": (
        (
            "wgmma_wait<0>();",
            "if (i == 127) barrier_arrive_expect(loaded, 16);"
            "if (i == 127) bulk_load(tile, in, 16, loaded);"
            "wgmma_wait<0>(); barrier_wait(loaded, 1);",
        ),
        r"shared memory changed under a wgmma, .*:\d+\n.*thread 0\n",
    ),
    "sums_written_under_way": (
        ("wgmma_wait<0>", "sums[3] = 0; wgmma_wait<0>"),
        "sums were written under a wgmma",
    ),
    "store_not_awaited": (
        ("if (i == 0) bulk_store_wait_read<0>();", ""),
        "without waiting for its bulk stores",
    ),
    "store_not_committed": (
        ("if (i == 0) bulk_store_commit();", ""),
        "without waiting for its bulk stores",
    ),
    "store_source_overwritten": (
        ("if (i == 0) bulk_store_wait_read<0>();", "bulk_store_wait_read<0>(); tile[i] = 0;"),
        r"shared memory changed under a bulk_store, .*:\d+\n.*thread 0\n",
    ),
    "store_past_the_end": (("(out, tile", "(out + 4, tile"), "at byte 6144 of out"),
    "store_to_misaligned": (("(out, tile", "(out + 2, tile"), "bulk_store: misaligned .* global"),
}

UNAWAITED_LOAD = """
  Barrier* const loaded = reinterpret_cast<Barrier*>(tile + 2048);
  if (i == 0) { barrier_init(loaded, 1); barrier_arrive_expect(loaded, 512); }
  if (i == 0) bulk_load(tile, in, 512, loaded);
  __syncthreads();
  out[i] = tile[i];
  barrier_wait(loaded, 0);
"""


def change(body: str, old: str, new: str) -> str:
    assert old in body
    return body.replace(old, new, 1)


PRODUCT_FROM_REGISTERS = change(
    change(
        PRODUCT,
        "wgmma_fence();",
        """
  unsigned rows[2][4];
  for (int j = 0; j < 8; ++j) {
    const int of = row + j % 2 * 8;
    rows[j / 4][j % 4] =
        reinterpret_cast<unsigned*>(tile)[of / 8 * 128 + j / 2 * 32 + of % 8 * 4 + i % 4];
  }
  wgmma_fence();
""",
    ).replace("sums, left, right", "sums, rows[0], right"),
    "sums, left + 256 / 16,",
    "sums, rows[1],",
)
CHANGED_REGISTERS = change(
    PRODUCT_FROM_REGISTERS, "wgmma_commit();", "wgmma_commit(); ++rows[1][3];"
)
UNAWAITED_SUMS = change(
    PRODUCT,
    "wgmma_wait<0>();",
    """
  float more[12];
  wgmma<24>(Tf32(), more, left, right, false);
  wgmma_commit();
  wgmma_wait<1>();
  sums[0] = more[0];
  wgmma_wait<0>();
""",
)
COPIES_NOT_AWAITED = change(
    change(BOTH_COPIES, "barrier_wait(full, 0);", ""),
    "bulk_load(tile, in, 256, full); barrier_expect(full, 256);",
    "",
)
COPIES_NOT_EXPECTED = change(COPIES_AND_WRITES, "barrier_expect_copies(full);", "")
UNAWAITED_ROUND = change(RING, "if (i == 0) barrier_wait(empty, (step + 1) % 2);", "")


def sm90_launch(name: str, body: str) -> Launch:
    return Launch(Snippet(body, name, ()), (1, 1, 1), 128, 4 * 2048 + 16, ("in", "out", 0))


def in_cores(matrix: Tensor) -> Tensor:
    """Rows of 64 bytes, as wgmma reads them: cores of 8 rows by 16 bytes, row by row."""
    return matrix.view(len(matrix) // 8, 8, 4, -1).transpose(1, 2).flatten()


def product_tensors(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """The memory before :data:`PRODUCT`, and the product."""
    generator = torch.Generator().manual_seed(0)
    length = 64 // dtype.itemsize
    left, right = (
        torch.randn(rows, length, generator=generator).to(dtype) for rows in (64, COLUMNS)
    )
    memory = {
        "in": torch.cat([in_cores(left), in_cores(right)]),
        "out": torch.full((64, COLUMNS), torch.inf),
    }
    if dtype == torch.float32:  # the tensor cores see 10 bits of the mantissa
        left, right = ((matrix.view(torch.int32) & ~0x1FFF).view(dtype) for matrix in (left, right))
    return memory, (left.double() @ right.double().T).float()


SM90 = {
    launch.kernel.entry: launch
    for launch in (
        *(sm90_launch(f"product_{scalar}", PRODUCT.replace("Tf32", scalar)) for scalar in SCALARS),
        *(
            sm90_launch(f"registers_{scalar}", PRODUCT_FROM_REGISTERS.replace("Tf32", scalar))
            for scalar in SCALARS
        ),
        sm90_launch("changed_registers", CHANGED_REGISTERS),
        *(
            sm90_launch(name, change(PRODUCT, *fault))
            for name, (fault, _) in FAULTY_PRODUCTS.items()
        ),
        sm90_launch("stored_rows", STORED_ROWS),
        *(
            sm90_launch(name, change(STORED_ROWS, *fault))
            for name, (fault, _) in FAULTY_ROWS.items()
        ),
        sm90_launch("ring", RING),
        sm90_launch("both_copies", BOTH_COPIES),
        sm90_launch("copies_not_awaited", COPIES_NOT_AWAITED),
        sm90_launch("copies_and_writes", COPIES_AND_WRITES),
        sm90_launch("copies_not_expected", COPIES_NOT_EXPECTED),
        sm90_launch("unawaited_load", UNAWAITED_LOAD),
        sm90_launch("unawaited_sums", UNAWAITED_SUMS),
        sm90_launch("unawaited_round", UNAWAITED_ROUND),
    )
}
CLUSTER_LAUNCHES = {
    name: replace(one, kernel=replace(one.kernel, constants=(("cluster", 2),)))
    for name, change_ in {
        **SOUND_CLUSTERS,
        **{name: fault for name, (fault, _) in FAULTY_CLUSTERS.items()},
        **ORDERED_CLUSTERS,
    }.items()
    for one in [launch(name, change(CLUSTER, *change_), blocks=4)]
}
EARLY_LAUNCHES = {
    name: replace(launch(name, body), early=True)
    for name, (body, _) in {"early": (EARLY, ""), **FAULTY_EARLY}.items()
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
    launches += [*SM90.values(), *EARLY_LAUNCHES.values(), *CLUSTER_LAUNCHES.values()]
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


@pytest.mark.parametrize("left", ["product", "registers"])
@pytest.mark.parametrize("scalar", SCALARS)
def test_product(scalar: str, left: str) -> None:
    memory, expected = product_tensors(SCALARS[scalar])
    run_both_orders([SM90[f"{left}_{scalar}"]], memory)
    assert_close(memory["out"], expected, rtol=1e-6, atol=1e-6)


def test_registers_that_change_under_a_product() -> None:
    with pytest.raises(EmulatorError, match=r"registers changed under a wgmma, .*:\d+\n"):
        run([SM90["changed_registers"]], product_tensors()[0])


@pytest.mark.parametrize("name", FAULTY_PRODUCTS)
def test_faulty_product(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_PRODUCTS[name][1]):
        run([SM90[name]], product_tensors()[0])


def test_rows_of_matrices() -> None:
    memory, _ = product_tensors()
    run_both_orders([SM90["stored_rows"]], memory)
    assert_close(memory["out"].flatten()[:512], memory["in"][:512], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAULTY_ROWS)
def test_faulty_rows_of_matrices(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_ROWS[name][1]):
        run([SM90[name]], product_tensors()[0])


def test_early_launch() -> None:
    """It waits, which costs nothing where the launch is not early."""
    early = EARLY_LAUNCHES["early"]
    for one in (early, replace(early, early=False)):
        memory = tensors()
        run_both_orders([one], memory)
        assert_close(memory["out"], VALUES + 1, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAULTY_EARLY)
def test_faulty_early_launch(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_EARLY[name][1]):
        run([EARLY_LAUNCHES[name]], tensors())


@pytest.mark.parametrize("name", SOUND_CLUSTERS)
def test_clusters(name: str) -> None:
    memory = tensors(blocks=4)
    run_both_orders([CLUSTER_LAUNCHES[name]], memory)
    expected = memory["in"].view(2, 2 * THREADS).flip(1).flatten()
    assert_close(memory["out"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAULTY_CLUSTERS)
def test_faulty_cluster(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_CLUSTERS[name][1]):
        run([CLUSTER_LAUNCHES[name]], tensors(blocks=4))


@pytest.mark.parametrize("name", ORDERED_CLUSTERS)
def test_cluster_that_depends_on_order(name: str) -> None:
    with pytest.raises(EmulatorError, match=f"{name}.*: out depends on the order"):
        run_both_orders([CLUSTER_LAUNCHES[name]], tensors(blocks=4))


@pytest.mark.parametrize(("blocks", "cluster"), [(3, 2), (16, 16), (1, 0)])
def test_impossible_clusters(blocks: int, cluster: int) -> None:
    one = launch("add", SOUND["add"][0], blocks)
    one = replace(one, kernel=replace(one.kernel, constants=(("cluster", cluster),)))
    with pytest.raises(EmulatorError, match=f"clusters of {cluster} blocks in a grid of {blocks}"):
        run([one], tensors(blocks))


def test_loads_through_a_ring() -> None:
    memory, _ = product_tensors()
    run_both_orders([SM90["ring"]], memory)
    assert_close(memory["out"].flatten()[:128], memory["in"][:128], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match="out depends on the order"):
        run_both_orders([SM90["unawaited_round"]], memory)


def test_barrier_for_both_kinds_of_copies() -> None:
    memory, _ = product_tensors()
    run_both_orders([SM90["both_copies"]], memory)
    assert_close(memory["out"].flatten()[:128], memory["in"][:128], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match=r"before the copies of barrier_arrive_after_copies, "):
        run([SM90["copies_not_awaited"]], memory)


def test_barrier_for_copies_and_writes() -> None:
    memory, _ = product_tensors()
    run_both_orders([SM90["copies_and_writes"]], memory)
    assert_close(memory["out"].flatten()[:64], memory["in"][:64], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match="exits without waiting for its copies"):
        run([SM90["copies_not_expected"]], memory)


def test_load_that_is_not_awaited() -> None:
    memory, _ = product_tensors()
    run_both_orders([SM90["unawaited_load"]], memory)
    assert memory["out"].flatten()[:128].isnan().all()


def test_sums_that_are_not_awaited() -> None:
    memory, expected = product_tensors()
    run_both_orders([SM90["unawaited_sums"]], memory)
    expected.view(4, 2, 8, COLUMNS)[:, 0, :, 0:8:2] = torch.nan  # every thread's sums[0]
    assert_close(memory["out"], expected, rtol=1e-6, atol=1e-6, equal_nan=True)


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
    halves = torch.arange(65536).to(torch.int16).view(torch.float16)
    out = torch.empty(65536)
    run([HALF_TO_FLOAT], {"in": halves, "out": out})
    assert_close(out, halves.float(), rtol=0, atol=0, equal_nan=True)


def test_float_to_half() -> None:
    """At all halves and all midpoints between two, and next to these: rounding is monotonous."""
    halves = torch.arange(65536).to(torch.int16).view(torch.float16).double()
    halves[0x7C00] = 65536  # what would come after the largest half
    halves[0xFC00] = -65536
    middles = ((halves + halves.roll(-1)) / 2).float()
    around = [torch.nextafter(middles, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    floats = torch.cat([halves.float(), middles, *around])
    out = torch.empty(len(floats), dtype=torch.float16)
    run([FLOAT_TO_HALF], {"in": floats, "out": out})
    assert_close(out, floats.half(), rtol=0, atol=0, equal_nan=True)


def _mapped(launch: Launch, numbers: list[float]) -> Tensor:
    memory = {"in": torch.zeros(2 * THREADS), "out": torch.empty(2 * THREADS)}
    memory["in"][: len(numbers)] = torch.tensor(numbers)
    run([launch], memory)
    return memory["out"][: len(numbers)]


def test_round_to_tf32() -> None:
    """To nearest, ties to even; what is infinite or NaN stays so."""
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
    """Keeps signs, even those of what is infinite; NaN becomes the limit."""
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
