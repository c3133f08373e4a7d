"""Loading and launching kernels, with a driver that only records its calls."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import sys
import threading
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch

from effort import PATIENCE_S
from fastconv import jit
from fastconv.jit import cache, compile, launch, loading, maps, pool
from fastconv.jit import driver as cuda_driver
from fastconv.kernels.family import AnyMap, Im2colMap, Kernel, Launch, TensorMap
from recorded_driver import Attribute, CaptureMode, Driver, Status
from test_jit import in_threads, needs_nvrtc, scale


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A stand-in for an H200's driver and for PyTorch, as far as launching needs them."""
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "bindings", lambda: driver)
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(pool, "build", lambda kernel, arch: f"cubin for {arch}".encode())
    monkeypatch.setattr(pool, "cached_cubin", lambda kernel, arch: None)
    monkeypatch.setattr(cuda_driver, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    stream = lambda index: 0x57 + index  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    cuda_driver.context.cache_clear()
    return driver


CUDA = torch.device("cuda", 0)
LAUNCH = Launch(scale(), (5, 6, 7), 128, 0, ("x", "y", -1))


class TestLaunch:
    @pytest.mark.parametrize(
        ("capability", "arch"),
        [
            ((7, 0), "sm_70"),
            ((8, 6), "sm_86"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100a"),
            ((10, 3), "sm_103a"),
            ((12, 0), "sm_120a"),
            ((12, 1), "sm_121a"),
            ((8, 7), "sm_87"),
        ],
    )
    def test_architecture(
        self, capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert jit.architecture(CUDA) == arch

    def test_old_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce GTX 1080")
        with pytest.raises(jit.GpuUnavailable, match=r"GTX 1080 .* 6\.1; .* 7\.0"):
            jit.architecture(CUDA)

    def test_not_a_gpu(self) -> None:
        with pytest.raises(ValueError, match="cannot run on cpu"):
            jit.load_launches([LAUNCH], torch.device("cpu"))

    def test_configuration_stream_and_arguments(self, driver: Driver) -> None:
        jit.load_launches([LAUNCH], CUDA).run(0x7FFF_FFFF_FFF0, 0)
        assert driver.launched == [(0xF, 5, 6, 7, 128, 1, 1, 0, 0x57, 0x7FFF_FFFF_FFF0, 0, -1, 0)]

    def test_early(self, driver: Driver) -> None:
        """The launch has the driver's attribute, and is like others in all else."""
        early = dataclasses.replace(LAUNCH, early=True)
        prepared = jit.load_launches([LAUNCH, early, LAUNCH], CUDA)
        for _ in range(2):
            prepared.run(1, 2)
        assert driver.early == [False, True, False] * 2
        assert driver.launched == [(0xF, 5, 6, 7, 128, 1, 1, 0, 0x57, 1, 2, -1, 0)] * 6

    def test_early_in_threads_with_streams_of_their_own(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared = jit.load_launches([dataclasses.replace(LAUNCH, early=True)], CUDA)
        here = threading.local()
        monkeypatch.setattr(prepared, "_raw_stream", lambda index: here.stream)

        def work(number: int) -> None:
            here.stream = number
            for _ in range(300):
                prepared.run(number, number)

        in_threads(work, 8)
        assert len(driver.launched) == 8 * 300
        assert all(call[8] == call[9] for call in driver.launched)

    @needs_nvrtc
    def test_early_as_the_driver_reads_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The configuration is read back from the memory of the bindings' types."""
        bindings = compile.binding("driver")
        monkeypatch.setattr(cuda_driver, "bindings", lambda: bindings)
        config = launch._dependent_launch_config(LAUNCH)
        config.hStream = bindings.CUstream(0x57)
        numbers = (ctypes.c_uint32 * 14).from_address(config.getPtr())
        (_, attributes, _) = (ctypes.c_uint64 * 3).from_address(config.getPtr() + 32)
        assert numbers[:7] == [5, 6, 7, 128, 1, 1, 0]
        assert (numbers[8], numbers[12]) == (0x57, 1)
        assert (ctypes.c_uint32 * 3).from_address(attributes)[:] == [6, 0, 1]

    def test_sequence_shares_addresses(self, driver: Driver) -> None:
        second = Launch(scale(), (1, 1, 1), 32, 0, ("z", "x", 2**31 - 1))
        prepared = jit.load_launches([LAUNCH, second], CUDA)
        assert prepared.names == ("x", "y", "z")
        prepared.run(1, 2, 3)
        prepared.run(4, 5, 6)
        arguments = [call[-4:-1] for call in driver.launched]
        assert arguments == [(1, 2, -1), (3, 1, 2**31 - 1), (4, 5, -1), (6, 4, 2**31 - 1)]
        assert len(driver.called("cuModuleLoadData")) == 1

    def test_order_of_names(self, driver: Driver) -> None:
        prepared = jit.load_launches([LAUNCH], CUDA, ("bias", "y", "x"))
        prepared.run(1, 2, 3)
        assert driver.launched[0][-4:-1] == (3, 2, -1)
        with pytest.raises(ValueError, match=r"\['x'\]"):
            jit.load_launches([LAUNCH], CUDA, ("y", "bias"))

    def test_integer_that_does_not_fit(self, driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match="32-bit integers, but got 2147483648"):
            jit.load_launches([Launch(scale(), (1, 1, 1), 32, 0, ("x", "y", 2**31))], CUDA)

    @pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 2**16, 1), (1, 1, 2**16)], ids=str)
    def test_grid_too_large(self, grid: tuple[int, int, int], driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match=re.escape(f"65535) blocks, not {grid}")):
            jit.load_launches([Launch(scale(), grid, 32, 0, ("x", "y", 1))], CUDA)

    def test_wrong_number_of_addresses(self, driver: Driver) -> None:
        with pytest.raises(Exception, match="2"):
            jit.load_launches([LAUNCH], CUDA).run(1)
        assert driver.launched == []

    def test_kernels_are_loaded_once_per_device(self, driver: Driver) -> None:
        for index in (0, 1, 0, 1):
            jit.load_launches([LAUNCH], torch.device("cuda", index))
        assert driver.called("cuModuleLoadData") == [(b"cubin for sm_90a",)] * 2
        assert driver.called("cuModuleGetFunction") == [("cuModuleLoadData", b"scale")] * 2
        assert driver.called("cuDeviceGet") == [(0,), (1,)]

    def test_loading_is_allowed_during_capture(self, driver: Driver) -> None:
        jit.load_launches([LAUNCH], CUDA)
        order = [call[0] for call in driver.calls]
        modes = driver.called("cuThreadExchangeStreamCaptureMode")
        assert modes == [(CaptureMode(2),), (CaptureMode(0),)]
        first, last = (i for i, name in enumerate(order) if name.startswith("cuThread"))
        assert first < order.index("cuModuleLoadData") < last
        assert (order[first - 1], order[last + 1]) == ("cuCtxPushCurrent", "cuCtxPopCurrent")

    def test_other_device_is_made_current(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered = []

        class Guard:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                entered.append((self.index, len(driver.launched)))

            def __exit__(self, *_: object) -> None:
                entered.append((self.index, len(driver.launched)))

        monkeypatch.setattr(torch.cuda, "device", Guard)
        jit.load_launches([LAUNCH], torch.device("cuda", 1)).run(1, 2)
        assert entered == [(1, 0), (1, 1)]
        assert driver.launched[0][8] == 0x58

    @pytest.mark.parametrize(
        ("shared", "told"), [(0, None), (47 * 1024, None), (47 * 1024 + 1, 47 * 1024 + 1)]
    )
    def test_shared_memory(self, driver: Driver, shared: int, told: int | None) -> None:
        """The kernel has 1 KiB of static shared memory; beyond 48 KiB, an attribute is set."""
        prepared = jit.load_launches([Launch(scale(), (1, 1, 1), 32, shared, ("x", "y", 0))], CUDA)
        attribute = Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        expected = [] if told is None else [(0xF, attribute, told)]
        assert driver.called("cuFuncSetAttribute") == expected
        prepared.run(1, 2)
        assert driver.launched[0][7] == shared

    def test_shared_memory_limit_never_falls(self, driver: Driver) -> None:
        for kilobytes in (64, 100, 64, 0):
            launch = Launch(scale(), (1, 1, 1), 32, kilobytes * 1024, ("x", "y", 0))
            jit.load_launches([launch], CUDA)
        limits = [call[2] for call in driver.called("cuFuncSetAttribute")]
        assert limits == [64 * 1024, 100 * 1024]

    def test_too_much_shared_memory(self, driver: Driver) -> None:
        driver.statuses["cuFuncSetAttribute"] = [1]
        with pytest.raises(jit.LaunchError, match=r"giving 999999 bytes .*kFactor=3.* on cuda:0"):
            jit.load_launches([Launch(scale(), (1, 1, 1), 32, 999_999, ("x", "y", 0))], CUDA)

    def test_too_many_threads(self, driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match="1024 threads in a block at most, not with 1056"):
            jit.load_launches([Launch(scale(), (1, 1, 1), 1056, 0, ("x", "y", 0))], CUDA)

    @pytest.mark.parametrize(
        ("code", "hint"), [(1, ""), (700, "launched earlier"), (900, "once before capturing")]
    )
    def test_launch_error(self, driver: Driver, code: int, hint: str) -> None:
        driver.statuses["cuLaunchKernel"] = [code]
        prepared = jit.load_launches([LAUNCH], CUDA)
        with pytest.raises(jit.LaunchError) as caught:
            prepared.run(1, 2)
        expected = ("scale of scale.cuh (kFactor=3)", "cuda:0", "grid (5, 6, 7)", "in words")
        for part in (*expected, Status(code).name, hint):
            assert part in str(caught.value)
        prepared.run(1, 2)

    def test_thread_without_a_context_gets_one(self, driver: Driver) -> None:
        driver.statuses["cuLaunchKernel"] = [201]
        jit.load_launches([LAUNCH], CUDA).run(1, 2)
        assert driver.called("cuCtxSetCurrent") == [("cuDevicePrimaryCtxRetain",)]
        assert [call[-4:-1] for call in driver.launched] == [(1, 2, -1)] * 2

    @pytest.mark.parametrize(
        ("code", "error", "hint"),
        [(209, jit.GpuUnavailable, "update the driver"), (900, jit.LaunchError, "capturing")],
    )
    def test_loading_error(
        self, driver: Driver, code: int, error: type[Exception], hint: str
    ) -> None:
        driver.statuses["cuModuleLoadData"] = [code]
        with pytest.raises(error, match=rf"loading scale .*{Status(code).name}.*{hint}"):
            jit.load_launches([LAUNCH], CUDA)
        assert driver.calls[-1][0] == "cuCtxPopCurrent"
        jit.load_launches([LAUNCH], CUDA).run(1, 2)

    def test_driver_older_than_the_compiler(self, driver: Driver) -> None:
        driver.version = 12080
        with pytest.raises(jit.GpuUnavailable, match=r"CUDA 12\.8.* NVRTC 13\.0: update"):
            jit.load_launches([LAUNCH], CUDA)

    def test_threads_do_not_mix_up_arguments(self, driver: Driver) -> None:
        prepared = jit.load_launches([LAUNCH], CUDA)

        def work(number: int) -> None:
            for i in range(300):
                prepared.run(1000 * number + i, 1000 * number + i)

        in_threads(work, 8)
        pairs = [call[-4:-2] for call in driver.launched]
        assert all(x == y for x, y in pairs)
        assert {x for x, _ in pairs} == {1000 * n + i for n in range(1, 9) for i in range(300)}

    def test_threads_prepare_the_same_kernel_once(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        together, built = threading.Barrier(4), []

        def build(kernel: Kernel, arch: str) -> bytes:
            built.append(kernel)
            return b"cubin"

        def work() -> None:
            together.wait()
            jit.load_launches([LAUNCH], CUDA)

        monkeypatch.setattr(pool, "build", build)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert built == [LAUNCH.kernel]

    def test_kernels_are_compiled_at_the_same_time(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = threading.Barrier(2, timeout=PATIENCE_S)

        def build(kernel: Kernel, arch: str) -> bytes:
            both.wait()
            return b"cubin"

        monkeypatch.setattr(pool, "build", build)
        monkeypatch.setenv(pool.JOBS_VARIABLE, "2")
        kernels = [scale(1), scale(2)]
        jit.load_launches([Launch(k, (1, 1, 1), 32, 0, ("x", "y", 0)) for k in kernels], CUDA)

    def test_what_is_loaded_is_not_begun_again(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[Any] = []
        monkeypatch.setattr(pool, "run_ahead", lambda key, work: begun.append(key))
        jit.load_launches([LAUNCH], CUDA)
        other = scale(7)
        for index in (0, 1):
            loading.compile_ahead([LAUNCH.kernel, other, other], "sm_90a", index)
        here, there = (other.text, "sm_90a"), (LAUNCH.kernel.text, "sm_90a")
        assert begun == [here, there, here]

    def test_one_program_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does not matter which of its kernels are needed."""
        built = []

        def build(kernel: Kernel, arch: str) -> bytes:
            built.append(kernel.text)
            return kernel.text.encode()

        monkeypatch.setattr(pool, "build", build)
        monkeypatch.setattr(pool, "cached_cubin", lambda kernel, arch: None)
        one, two = scale(1), scale(2)
        kernels = [one, two, dataclasses.replace(one, entry="other"), two]
        assert jit.build_all(kernels, "sm_80") == [kernel.text.encode() for kernel in kernels]
        assert sorted(built) == [one.text, two.text]

    def test_threads_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If a machine's limit of threads is reached, kernels compile one by one."""

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(pool, "build", lambda kernel, arch: kernel.text.encode())
        monkeypatch.setattr(pool, "cached_cubin", lambda kernel, arch: None)
        monkeypatch.setattr(threading.Thread, "start", start)
        kernels = [scale(1), scale(2)]
        assert jit.build_all(kernels, "sm_80") == [kernel.text.encode() for kernel in kernels]

    def test_trouble_of_another_launcher(self, driver: Driver) -> None:
        """A missing context is entered once; other errors have the messages of our launcher."""
        second = Launch(scale(), (1, 1, 1), 32, 64, ("z", "x", 2))
        prepared = jit.load_launches([LAUNCH, second], CUDA)
        prepared.trouble(1, -1, 0, 201, False)
        assert driver.called("cuCtxSetCurrent") == [("cuDevicePrimaryCtxRetain",)]
        for status, again in ((201, True), (700, False), (700, True)):
            with pytest.raises(jit.LaunchError) as caught:
                prepared.trouble(1, -1, 0, status, again)
            for part in ("scale of scale.cuh", "grid (1, 1, 1)", "64 bytes", Status(status).name):
                assert part in str(caught.value)
        assert len(driver.called("cuCtxSetCurrent")) == 1
        driver.statuses["cuLaunchKernel"] = [700]
        with pytest.raises(jit.LaunchError) as ours:
            prepared.run(1, 2, 3)
        with pytest.raises(jit.LaunchError) as theirs:
            prepared.trouble(0, -1, 0, 700, False)
        assert str(ours.value) == str(theirs.value)

    def test_context_that_cannot_be_entered(self, driver: Driver) -> None:
        prepared = jit.load_launches([LAUNCH], CUDA)
        driver.statuses["cuCtxSetCurrent"] = [700]
        with pytest.raises(jit.LaunchError, match=r"entering the CUDA context.*ILLEGAL_ADDRESS"):
            prepared.trouble(0, -1, 0, 201, False)

    def test_description(self, driver: Driver) -> None:
        second = Launch(scale(), (1, 1, 1), 32, 64, ("z", "x", 2))
        prepared = jit.load_launches([LAUNCH, dataclasses.replace(second, early=True)], CUDA)
        first = (("tensor", 0), ("tensor", 1), ("int", -1))
        assert prepared.description == [
            (0xF, (5, 6, 7), 128, 0, False, first),
            (0xF, (1, 1, 1), 32, 64, True, (("tensor", 2), ("tensor", 0), ("int", 2))),
        ]

    @needs_nvrtc
    def test_several_kernels_are_compiled_and_loaded(
        self, driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "build", jit.build)
        kernels = [scale(factor) for factor in range(4)]
        jit.load_launches([Launch(k, (1, 1, 1), 32, 0, ("x", "y", 0)) for k in kernels], CUDA)
        loaded = [cubin for (cubin,) in driver.called("cuModuleLoadData")]
        assert loaded == [jit.build(kernel, "sm_90a") for kernel in kernels]
        assert len(set(loaded)) == cache.size().entries == 4

    def test_overhead(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, record_property: Any
    ) -> None:
        """Records the host time of a launch, without the driver's part."""
        status = (Status.CUDA_SUCCESS,)
        monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: status)
        prepared = jit.load_launches([LAUNCH], CUDA)
        seconds = min(timeit.repeat(lambda: prepared.run(1, 2), number=1000, repeat=5)) / 1000
        record_property("microseconds", seconds * 1e6)


TILED = TensorMap("x", "fastconv::bfloat16", (40, 30), (80,), (32, 7), (1, 2), 64, 256)
PIXELS = Im2colMap(
    "y", "float", (8, 7, 6, 5), (32, 224, 1344), (-1, -2), (1, 2), 8, 100, (1, 3, 4, 1), 32, 128
)


def mapped_launch(*arguments: AnyMap | str | int) -> Launch:
    return Launch(scale(), (1, 1, 1), 32, 0, arguments)


class TestMaps:
    def test_encoded_once(self, driver: Driver) -> None:
        driver.signature = "mm"
        launch = mapped_launch(TILED, PIXELS)
        prepared = jit.load_launches([launch, launch], CUDA)
        for _ in range(2):
            prepared.run(0x1000, 0x2000)
        placeholder = maps._PLACEHOLDER
        tiled = (9, 2, placeholder, [40, 30], [80], [32, 7], [1, 2], 0, 2, 3, 0)
        corners = ([-1, -2], [1, 2])
        sizes = ([8, 7, 6, 5], [32, 224, 1344])
        im2col = (7, 4, placeholder, *sizes, *corners, 8, 100, [1, 3, 4, 1], 0, 1, 2, 0)
        assert driver.encoded == [("Tiled", *tiled), ("Im2col", *im2col)]

    def test_addresses_are_replaced_in_every_run(self, driver: Driver) -> None:
        driver.signature = "mpmi"
        prepared = jit.load_launches([mapped_launch(PIXELS, "x", TILED, 7)], CUDA)
        assert prepared.names == ("y", "x")
        prepared.run(0x1000, 0x2000)
        prepared.run(0x3000, 0x4000)
        assert [call[-5:-1] for call in driver.launched] == [
            ((0x1000, 1, 0xC0DE), 0x2000, (0x2000, 2, 0xC0DE), 7),
            ((0x3000, 1, 0xC0DE), 0x4000, (0x4000, 2, 0xC0DE), 7),
        ]

    def test_description(self, driver: Driver) -> None:
        prepared = jit.load_launches([mapped_launch("z", TILED, 3)], CUDA)
        (_, *_, arguments) = prepared.description[0]
        (_, template, _) = arguments[1]
        assert arguments == (("tensor", 0), ("map", template, 1), ("int", 3))
        assert len(template) == 128
        assert template.startswith(maps._PLACEHOLDER.to_bytes(8, sys.byteorder))

    def test_threads_have_maps_of_their_own(self, driver: Driver) -> None:
        driver.signature = "mp"
        prepared = jit.load_launches([mapped_launch(TILED, "x")], CUDA)

        def work(number: int) -> None:
            for i in range(200):
                prepared.run(1000 * number + i)

        in_threads(work, 4)
        pairs = [(map[0], address) for *_, map, address, _ in driver.launched]
        assert all(x == y for x, y in pairs)
        assert {x for x, _ in pairs} == {1000 * n + i for n in range(1, 5) for i in range(200)}

    def test_memory_is_aligned(self) -> None:
        for count in range(1, 20):
            memory = maps.Memory(count)
            last = bytes(range(128))
            memory[count - 1] = last
            assert memory[count - 1] == last
            assert all(memory.address(number) % 128 == 0 for number in range(count))
            assert ctypes.string_at(memory.address(count - 1), 128) == last

    def test_refused_map(self, driver: Driver) -> None:
        driver.statuses["cuTensorMapEncodeTiled"] = [1]
        with pytest.raises(jit.LaunchError) as caught:
            jit.load_launches([mapped_launch(TILED)], CUDA)
        for part in ("describing x to scale of scale.cuh", "box=(32, 7)", "INVALID_VALUE"):
            assert part in str(caught.value)
        assert driver.calls[-1][0] == "cuGetErrorString"
        assert ("cuCtxPopCurrent",) in driver.calls

    def test_refused_address(self, driver: Driver) -> None:
        driver.signature = "m"
        driver.statuses["cuTensorMapReplaceAddress"] = [1]
        prepared = jit.load_launches([mapped_launch(TILED)], CUDA)
        with pytest.raises(jit.LaunchError) as caught:
            prepared.run(0x1008)
        for part in ("mapping x at address 0x1008 for scale", "box=(32, 7)", "INVALID_VALUE"):
            assert part in str(caught.value)
        prepared.run(0x1010)
        assert driver.launched[0][-2][0] == 0x1010

    def test_trouble_of_another_launcher(self, driver: Driver) -> None:
        driver.signature = "m"
        driver.statuses["cuTensorMapReplaceAddress"] = [1]
        prepared = jit.load_launches([mapped_launch(TILED)], CUDA)
        with pytest.raises(jit.LaunchError) as ours:
            prepared.run(0x1008)
        with pytest.raises(jit.LaunchError) as theirs:
            prepared.trouble(0, 0, 0x1008, 1, False)
        assert str(ours.value) == str(theirs.value)
        prepared.trouble(0, 0, 0x1008, 201, False)
        assert len(driver.called("cuCtxSetCurrent")) == 1
        with pytest.raises(jit.LaunchError, match=r"mapping x at address 0x1008.*INVALID_CONTEXT"):
            prepared.trouble(0, 0, 0x1008, 201, True)

    def test_thread_without_a_context_gets_one(self, driver: Driver) -> None:
        driver.signature = "m"
        driver.statuses["cuTensorMapReplaceAddress"] = [201]
        jit.load_launches([mapped_launch(TILED)], CUDA).run(0x1010)
        assert driver.called("cuCtxSetCurrent") == [("cuDevicePrimaryCtxRetain",)]
        assert driver.launched[0][-2][0] == 0x1010

    def test_driver_without_tensor_maps(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver, "cuGetProcAddress", lambda *_: (Status(0), 0, Status(0)))
        with pytest.raises(jit.GpuUnavailable, match=r"EncodeTiled: .* update the driver"):
            jit.load_launches([mapped_launch(TILED)], CUDA)

    def test_numbers_are_the_drivers(self) -> None:
        real = pytest.importorskip("cuda.bindings.driver")
        for name in (
            "CUtensorMapDataType",
            "CUtensorMapInterleave",
            "CUtensorMapSwizzle",
            "CUtensorMapL2promotion",
            "CUtensorMapFloatOOBfill",
        ):
            for member in getattr(Driver, name):
                assert int(getattr(getattr(real, name), member.name)) == member, member
