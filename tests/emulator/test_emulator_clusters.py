"""Emulated thread-block clusters and programmatic dependent launch: sound kernels, and faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.testing import assert_close

from emulator import EmulatorError, precompile, run, run_both_orders
from emulator.snippets import THREADS, VALUES, change, launch, tensors

# EARLY is sound in a programmatic dependent launch. FAULTY_EARLY has bodies that are not, with a
# pattern of the error message.
EARLY = "wait_for_earlier_launch(); allow_later_launch(); out[i] = in[i] + 1;"
BESIDE = "go_beside_earlier_launch(); out[i] = in[i] + 1; wait_for_earlier_launch();"
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
    "beside_without_a_wait": (
        "go_beside_earlier_launch(); out[i] = in[i];",
        "no block waits for the launch before",
    ),
}

# Each of the two blocks of a cluster reads what the other has written.
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
# Pairs of a change to CLUSTER and a pattern of the error message.
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
    for name, (body, _) in {"early": (EARLY, ""), "beside": (BESIDE, ""), **FAULTY_EARLY}.items()
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile(launch.kernel for launch in (*EARLY_LAUNCHES.values(), *CLUSTER_LAUNCHES.values()))


@pytest.mark.parametrize("name", ["early", "beside"])
def test_early_launch(name: str) -> None:
    """The wait returns at once in a launch that is not early."""
    early = EARLY_LAUNCHES[name]
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
    one = launch("add", "if (i < n) out[i] = in[i] + 1;", blocks)
    one = replace(one, kernel=replace(one.kernel, constants=(("cluster", cluster),)))
    with pytest.raises(EmulatorError, match=f"clusters of {cluster} blocks in a grid of {blocks}"):
        run([one], tensors(blocks))
