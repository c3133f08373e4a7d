"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from effort import ALL
from fastconv import native, timing
from fastconv.backends import cpu, cuda
from fastconv.backends.batchnorm import launches
from fastconv.bench import limits, row_timing, verify
from fastconv.jit import launch, loading
from fastconv.kernels import plans
from fastconv.kernels.family import Kernel, Launch
from fastconv.kernels.gpus import H200
from fastconv.network import lookahead, preparation
from fastconv.ops import hooks

with suppress(ImportError):  # PyTorch's own tests need packages that may be missing.
    import torch.testing._internal.common_utils  # loads a profile of its own, which ours replaces

# No test fails because a machine is slow.
settings.register_profile(
    "local", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(1)  # Tensors are tiny: several threads would only wait for one another.

# All cases take longer than a run of all tests may. Of a test with several parameters, every value
# of each parameter runs, and one combination in COMBINATIONS_ONE_IN. Of a test with one parameter,
# all values run, but in these files, and of these tests, one in VALUES_ONE_IN, and the first.
SAMPLED = (
    *("api/test_export", "api/test_causal", "api/test_graph_lifetimes"),
    *("bench/test_verify_layers", "emulator/test_causal", "kernels/test_causal_kernels"),
    *("emulator/test_batchnorm", "kernels/test_batchnorm_kernels", "api/test_batchnorm"),
    *("native/test_native_transposed", "network/test_optimize_kinds", "native/test_cpu_kernels"),
    *("api/test_volumes", "emulator/test_volumes", "ops/test_operators", "native/test_native_norm"),
    *("emulator/test_hopper_implicit_gemm_nhwc", "emulator/test_hopper_implicit_gemm_nchw"),
    "kernels/test_estimates.py::test_depthwise_plans_are_near_what_memory_takes",
    "emulator/test_epilogues.py::test_isolation",
    *("emulator/test_depthwise.py::test_toeplitz", "emulator/test_depthwise.py::test_random"),
)
COMBINATIONS_ONE_IN = 9
VALUES_ONE_IN = 6


class Sample:
    """Chooses cases of parametrized tests: by their names alone, so that each run has the same."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)

    def has(self, item: pytest.Item) -> bool | None:
        """Whether a case runs; None if all cases of its test do."""
        test, _, case = item.nodeid.partition("[")
        if not case or item.get_closest_marker("gpu"):
            return None
        names = item.callspec._idlist  # type: ignore[attr-defined]
        seen, by_hash = self._seen[test], zlib.crc32(item.nodeid.encode())
        new = set(enumerate(names)) - seen
        if _has_combinations(item):
            chosen = bool(new) or by_hash % COMBINATIONS_ONE_IN == 0
        elif any(file in test for file in SAMPLED):
            chosen = not seen or by_hash % VALUES_ONE_IN == 0
        else:
            return None
        if chosen:
            seen |= new
        return chosen


def _has_combinations(item: pytest.Item) -> bool:
    return len(item.callspec._idlist) > 1  # type: ignore[attr-defined]


def _turn(item: pytest.Item) -> int:
    """When a case is looked at: combinations by their hashes, so that few have all values."""
    has_combinations = hasattr(item, "callspec") and _has_combinations(item)
    return zlib.crc32(item.nodeid.encode()) if has_combinations else 0


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of tests that are sampled, and leaves some out."""
    sample = Sample()
    choices = {item: sample.has(item) for item in sorted(items, key=_turn)}
    kept, left_out = [], []
    for item in items:
        chosen = choices[item]
        if chosen is not None:
            item.add_marker(pytest.mark.sampled)
        is_left_out = chosen is False and not ALL and not _is_named(config, item)
        (left_out if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _is_named(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether somebody asks for this very test, or case."""
    return any("::" in word and item.nodeid.startswith(word) for word in config.args)


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES, scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def _native_library() -> Callable[..., Any]:
    native.make()
    return native.load()


@pytest.fixture(autouse=True, scope="session")
def _operators_by_python() -> None:
    """Python serves operators wherever a test does not choose: many tests force what it plans."""
    native.serve_operators(False)


@pytest.fixture(autouse=True, scope="session")
def _no_library_but_a_chosen_one() -> Iterator[None]:
    """Calls on a CPU do not begin to use the native library in the midst of other tests."""
    with mock.patch.object(cpu, "before_cpu_pass"), mock.patch.object(verify, "decide"):
        yield


@pytest.fixture(params=["python", "native"], scope="module")
def host_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests with the Python host path, and again with the native one."""
    by_native = request.param == "native"
    chosen = request.getfixturevalue("_native_library") if by_native else None
    for_processes = {"FASTCONV_NATIVE": str(int(by_native))}
    native.serve_operators(by_native)
    names = ("conv2d", "batch_norm_act", "conv_bn_act")
    functions = dict.fromkeys(names)
    if by_native:
        blocks = {name: getattr(native._module, name) for name in names[1:]}
        functions = {"conv2d": chosen, **blocks}
    with mock.patch.multiple(native, **functions), mock.patch.dict(os.environ, for_processes):
        yield request.param
    native.serve_operators(False)


@pytest.fixture
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures ceilings with tiny matrices and copies: their values do not matter in tests."""
    monkeypatch.setitem(limits.MATRIX_SIDE, "cpu", 32)
    monkeypatch.setitem(limits.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(limits, "RATE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "HASHED_BYTES", 1 << 12)
    monkeypatch.setattr(row_timing, "CPU_CACHE_BYTES", 1 << 10)
    monkeypatch.setattr(timing, "WARM_UP_MS", 0.0)


@pytest.fixture(autouse=True, scope="session")
def _no_plan_but_its_own() -> Iterator[None]:
    """Tests change what plans are made by: none is taken from the disk, or made for later."""
    make = lambda plan, *asked: plan(*asked)  # noqa: E731
    with (
        mock.patch.object(plans, "find_or_make", make),
        mock.patch.object(lookahead, "compile_gradients"),
        mock.patch.object(hooks, "layer_prepared"),
        mock.patch.object(cuda, "before_layer", None),
    ):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def _poisoned_memory() -> Iterator[None]:
    """Fills uninitialised tensors with NaN, or the largest integer, so that reading one shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


class Loads(list[Kernel]):
    """Stands in for the compiler and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[Kernel] = set()

    def compile_ahead(self, kernels: Iterable[Kernel], arch: str, index: int) -> None:
        assert arch == H200.architecture
        self.begun.update(kernels)

    def load(self, kernels: Iterable[Kernel], index: int, show: Any = None) -> int:
        new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self]
        self.extend(new)
        for done in range(len(new)):
            if show is not None:
                show(done + 1, len(new))
        return len(new)

    def load_launches(self, launches: list[Launch], device: Any, names: Any) -> None:
        assert all(launch.kernel in self for launch in launches), "compiled one after the other"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterable[Loads]:
    found = Loads()
    monkeypatch.setattr(loading, "load", found.load)
    monkeypatch.setattr(loading, "compile_ahead", found.compile_ahead)
    monkeypatch.setattr(launch, "load_launches", found.load_launches)
    monkeypatch.setattr(preparation, "_GPU", "cpu")
    monkeypatch.setattr(cuda, "gpu", lambda index: H200)
    monkeypatch.setattr(native, "start_build", lambda: None)
    caches = (cuda._ready, launches.ready)
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()
