"""Emulated wgmma, mbarriers and bulk copies of sm_90a: sound kernels, and faults."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emulator import EmulatorError, precompile, run, run_both_orders
from emulator.snippets import Snippet, change
from fastconv.kernels.family import Launch

# One warpgroup computes 64 rows by 24 columns, with 64 bytes of each along K.
COLUMNS = 24
SCALARS = {"Tf32": torch.float32, "Float16": torch.float16, "Bfloat16": torch.bfloat16}

WGMMA = """
  const int kBytes = 64 * (64 + 24);
  Barrier* const loaded = reinterpret_cast<Barrier*>(tile + 2048);
  const int row = i / 32 * 16 + i % 32 / 4, column = i % 4 * 2;
  float acc[12];
  if (i == 0) barrier_init(loaded, 1);
  barrier_init_fence();
  __syncthreads();
  if (i == 0) barrier_arrive_expect(loaded, kBytes);
  if (i == 0) bulk_load(tile, in, kBytes, loaded);
  barrier_wait(loaded, 0);
  const Matrix left = matrix(tile, 128, 512), right = matrix(tile + 1024, 128, 512);
  wgmma_fence();
  wgmma<24>(Tf32(), acc, left, right, false);
  wgmma<24>(Tf32(), acc, left + 256 / 16, right + 256 / 16, true);
  wgmma_commit();
  wgmma_wait<0>();
  __syncthreads();  // the accumulators overwrite the matrices
  for (int j = 0; j < 12; ++j) {
    tile[(row + j / 2 % 2 * 8) * 24 + j / 4 * 8 + column + j % 2] = acc[j];
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

# The elected lane loads half of the tile by a bulk copy, and all lanes load half by cp.async.
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

# All lanes load a quarter of the tile by cp.async, and write the next quarter themselves.
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

# Each warp stores four matrices of 8 rows of 16 bytes in shared memory by stmatrix.
STORED_ROWS = """
  const int lane = i % 32;
  const auto* const words = reinterpret_cast<const unsigned*>(in) + i / 32 * 128;
  const unsigned rows[4] = {words[lane], words[32 + lane], words[64 + lane], words[96 + lane]};
  store_rows(tile + 4 * i, rows);
  __syncthreads();
  for (int j = 0; j < 4; ++j) out[4 * i + j] = tile[4 * i + j];
"""

# Pairs of a change to STORED_ROWS and a pattern of the error message.
FAULTY_ROWS = {
    "row_misaligned": (("tile + 4 * i, rows", "tile + 4 * i + 2, rows"), "not a multiple of 16"),
    "row_outside": (("tile + 4 * i, rows", "tile + 2052, rows"), "a row of 16 bytes at byte 8208"),
    "row_by_some_lanes": (
        ("store_rows(tile", "if (lane) store_rows(tile"),
        r"threads 0 to 0: waits in __syncthreads, .*\n +threads 1 to 31: waits in store_rows",
    ),
}

# Pairs of a change to WGMMA and a pattern of the error message.
FAULTY_WGMMAS = {
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
    "parity_wrong": (("barrier_wait(loaded, 0)", "barrier_wait(loaded, 2)"), "2 is not a parity"),
    "load_not_awaited": (("barrier_wait(loaded, 0);", ""), r"without waiting for bulk_load, .*:\d"),
    "load_awaited_late": (
        ("barrier_wait(loaded, 0);", "if (i) barrier_wait(loaded, 0);"),
        r"changed during a wgmma, .*:\d+\n.*thread 0\n",
    ),
    "load_target_written": (
        ("barrier_wait(loaded, 0)", "tile[7] = 0; barrier_wait(loaded, 0)"),
        "shared memory was written during a bulk_load",
    ),
    "load_source_written": (
        ("barrier_wait(loaded, 0)", "const_cast<float*>(in)[7] = 0; barrier_wait(loaded, 0)"),
        "global memory changed during a bulk_load",
    ),
    "load_to_misaligned": (("(tile, in", "(tile + 2, in"), "bulk_load: misaligned .* shared"),
    "load_from_misaligned": (("(tile, in", "(tile, in + 1"), "bulk_load: misaligned .* global"),
    "load_of_odd_size": (("in, kBytes", "in, kBytes - 4"), "5628 bytes, not a multiple"),
    "load_past_the_end": (("(tile, in", "(tile, in + 4"), "at byte 5632 of in"),
    "load_past_shared_memory": (("(tile, in", "(tile + 1024, in"), "at byte 8192 of shared"),
    "load_from_shared_memory": (("(tile, in", "(tile, tile"), "does not lie in a tensor"),
    "load_to_global_memory": (("(tile, in", "(out, in"), "does not lie in shared memory"),
    "wgmma_without_fence": (("wgmma_fence();", ""), "wgmma without a wgmma_fence"),
    "wgmma_not_committed": (("wgmma_commit();", ""), "without waiting for its wgmma"),
    "wgmma_not_awaited": (("wgmma_wait<0>", "wgmma_wait<1>"), "without waiting for its wgmma"),
    "wgmma_misses_a_warp": (
        ("wgmma_fence();", "if (i / 32 == 2) return; wgmma_fence();"),
        r"threads 0 to 63: waits in __syncthreads, .*\n +threads 64 to 95: exited",
    ),
    "wgmma_by_some_threads": (
        (
            "wgmma<24>(Tf32(), acc, left +",
            "if (i != 77) wgmma<24>(Tf32(), acc, left +",
        ),
        "threads 0 and 77 of a warpgroup executed different wgmma",
    ),
    "matrix_outside_shared_memory": (
        ("tile, 128, 512", "tile, 128, 1280"),
        r"64 rows from byte 0 to byte 9216 of shared memory, which has 8208\n.*thread 0\n",
    ),
    "matrix_misaligned": (
        ("matrix(tile, ", "matrix(tile + 1, "),
        "a matrix cannot start at byte 4 ",
    ),
    "matrix_overwritten": (
        ("__syncthreads();  // the accumulators", "// the accumulators"),
        r"shared memory changed during a wgmma, .*:\d+\n.*thread 32\n",
    ),
    "matrix_refilled": (
        (
            "wgmma_wait<0>();",
            "if (i == 127) barrier_arrive_expect(loaded, 16);"
            "if (i == 127) bulk_load(tile, in, 16, loaded);"
            "wgmma_wait<0>(); barrier_wait(loaded, 1);",
        ),
        r"shared memory changed during a wgmma, .*:\d+\n.*thread 0\n",
    ),
    "accumulators_written_in_flight": (
        ("wgmma_wait<0>", "acc[3] = 0; wgmma_wait<0>"),
        "accumulators were written during a wgmma",
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
        r"shared memory changed during a bulk_store, .*:\d+\n.*thread 0\n",
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


WGMMA_FROM_REGISTERS = change(
    change(
        WGMMA,
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
    ).replace("acc, left, right", "acc, rows[0], right"),
    "acc, left + 256 / 16,",
    "acc, rows[1],",
)
CHANGED_REGISTERS = change(WGMMA_FROM_REGISTERS, "wgmma_commit();", "wgmma_commit(); ++rows[1][3];")
UNAWAITED_ACCUMULATORS = change(
    WGMMA,
    "wgmma_wait<0>();",
    """
  float more[12];
  wgmma<24>(Tf32(), more, left, right, false);
  wgmma_commit();
  wgmma_wait<1>();
  acc[0] = more[0];
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
    """Rearranges rows of 64 bytes into wgmma's core matrices of 8 rows by 16 bytes, row by row."""
    return matrix.view(len(matrix) // 8, 8, 4, -1).transpose(1, 2).flatten()


def wgmma_tensors(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """The memory that :data:`WGMMA` starts with, and the product of the matrices."""
    generator = torch.Generator().manual_seed(0)
    length = 64 // dtype.itemsize
    left, right = (
        torch.randn(rows, length, generator=generator).to(dtype) for rows in (64, COLUMNS)
    )
    memory = {
        "in": torch.cat([in_cores(left), in_cores(right)]),
        "out": torch.full((64, COLUMNS), torch.inf),
    }
    if dtype == torch.float32:  # tensor cores read only 10 bits of the mantissa
        left, right = ((matrix.view(torch.int32) & ~0x1FFF).view(dtype) for matrix in (left, right))
    return memory, (left.double() @ right.double().T).float()


SM90 = {
    launch.kernel.entry: launch
    for launch in (
        *(sm90_launch(f"shared_{scalar}", WGMMA.replace("Tf32", scalar)) for scalar in SCALARS),
        *(
            sm90_launch(f"registers_{scalar}", WGMMA_FROM_REGISTERS.replace("Tf32", scalar))
            for scalar in SCALARS
        ),
        sm90_launch("changed_registers", CHANGED_REGISTERS),
        *(sm90_launch(name, change(WGMMA, *fault)) for name, (fault, _) in FAULTY_WGMMAS.items()),
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
        sm90_launch("unawaited_accumulators", UNAWAITED_ACCUMULATORS),
        sm90_launch("unawaited_round", UNAWAITED_ROUND),
    )
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile(launch.kernel for launch in SM90.values())


@pytest.mark.parametrize("left", ["shared", "registers"])
@pytest.mark.parametrize("scalar", SCALARS)
def test_wgmma(scalar: str, left: str) -> None:
    memory, expected = wgmma_tensors(SCALARS[scalar])
    run_both_orders([SM90[f"{left}_{scalar}"]], memory)
    assert_close(memory["out"], expected, rtol=1e-6, atol=1e-6)


def test_registers_that_change_during_a_wgmma() -> None:
    with pytest.raises(EmulatorError, match=r"registers changed during a wgmma, .*:\d+\n"):
        run([SM90["changed_registers"]], wgmma_tensors()[0])


@pytest.mark.parametrize("name", FAULTY_WGMMAS)
def test_faulty_wgmma(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_WGMMAS[name][1]):
        run([SM90[name]], wgmma_tensors()[0])


def test_rows_of_matrices() -> None:
    memory, _ = wgmma_tensors()
    run_both_orders([SM90["stored_rows"]], memory)
    assert_close(memory["out"].flatten()[:512], memory["in"][:512], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAULTY_ROWS)
def test_faulty_rows_of_matrices(name: str) -> None:
    with pytest.raises(EmulatorError, match=FAULTY_ROWS[name][1]):
        run([SM90[name]], wgmma_tensors()[0])


def test_loads_through_a_ring() -> None:
    memory, _ = wgmma_tensors()
    run_both_orders([SM90["ring"]], memory)
    assert_close(memory["out"].flatten()[:128], memory["in"][:128], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match="out depends on the order"):
        run_both_orders([SM90["unawaited_round"]], memory)


def test_barrier_for_both_kinds_of_copies() -> None:
    memory, _ = wgmma_tensors()
    run_both_orders([SM90["both_copies"]], memory)
    assert_close(memory["out"].flatten()[:128], memory["in"][:128], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match=r"before the copies of barrier_arrive_after_copies, "):
        run([SM90["copies_not_awaited"]], memory)


def test_barrier_for_copies_and_writes() -> None:
    memory, _ = wgmma_tensors()
    run_both_orders([SM90["copies_and_writes"]], memory)
    assert_close(memory["out"].flatten()[:64], memory["in"][:64], rtol=0, atol=0)
    with pytest.raises(EmulatorError, match="exits without waiting for its copies"):
        run([SM90["copies_not_expected"]], memory)


def test_load_that_is_not_awaited() -> None:
    memory, _ = wgmma_tensors()
    run_both_orders([SM90["unawaited_load"]], memory)
    assert memory["out"].flatten()[:128].isnan().all()


def test_accumulators_that_are_not_awaited() -> None:
    memory, expected = wgmma_tensors()
    run_both_orders([SM90["unawaited_accumulators"]], memory)
    expected.view(4, 2, 8, COLUMNS)[:, 0, :, 0:8:2] = torch.nan  # every thread's acc[0]
    assert_close(memory["out"], expected, rtol=1e-6, atol=1e-6, equal_nan=True)
