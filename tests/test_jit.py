"""The GPU runtime: compiler and disk cache for real, launching with a driver that only notes."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nvrtc as other_nvrtc
from effort import PATIENCE_S
from fastconv import jit
from fastconv.jit import cache, compile, launch, maps
from fastconv.kernels.family import FOLDER, AnyMap, Im2colMap, Kernel, Launch, TensorMap

try:
    NVRTC = jit.nvrtc_version()
except jit.GpuUnavailable:
    NVRTC = (0, 0)
needs_nvrtc = pytest.mark.skipif(
    NVRTC < (13, 0), reason="needs NVRTC 13: pip install cuda-bindings 'nvidia-cuda-nvrtc==13.0.*'"
)

BODY = """#include "device/scalar.cuh"
struct Config { using Element = fastconv::bfloat16; static constexpr int kFactor = FACTOR; };
extern "C" __global__ void scale(const Config::Element* x, Config::Element* y, int n) {
  __shared__ float tile[32];
  fastconv::copy_async<4>(&tile[threadIdx.x], x + 2 * n, true);
  fastconv::copy_async_commit();
  fastconv::copy_async_wait<0>();
  y[threadIdx.x] = fastconv::narrow<Config::Element>(tile[threadIdx.x] * Config::kFactor);
}
"""


@dataclass(frozen=True)
class Scale(Kernel):
    """A kernel with its text at hand instead of in a file."""

    body: str

    @property
    def text(self) -> str:
        return self.body.replace("FACTOR", str(dict(self.constants)["kFactor"]))


def scale(factor: int = 3, body: str = BODY) -> Kernel:
    return Scale("scale.cuh", "scale", (("kFactor", factor),), body)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, in which nothing has gone wrong yet."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_told", set())
    monkeypatch.setattr(cache, "_stores", itertools.count())
    compile._contents.cache_clear()
    yield tmp_path / "cache"
    compile._contents.cache_clear()


class TestCompile:
    @needs_nvrtc
    @pytest.mark.parametrize(
        "arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
    )
    def test_architectures(self, arch: str) -> None:
        compiled = jit.compile_kernel(scale(), arch)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert b"scale" in compiled.cubin
        assert compiled.registers in range(4, 64)
        assert compiled.stack_bytes == compiled.spill_bytes == 0

    @pytest.mark.parametrize("major", [11, 12])
    def test_volta_with_older_compilers(self, major: int) -> None:
        path = other_nvrtc.find(major)
        if path is None:
            pytest.skip(f"needs NVRTC {major}: pip install nvidia-cuda-nvrtc-cu{major}")
        older = other_nvrtc.Nvrtc(path)
        assert older.version[0] == major
        text = scale().text
        cubin, log = older.compile(text, compile.included(text), compile._options("sm_70"))
        assert cubin.startswith(b"\x7fELF")
        assert jit.Compiled("scale", cubin, log).registers in range(4, 64)

    @needs_nvrtc
    def test_error_names_kernel_constants_architecture_and_shows_the_log(self) -> None:
        kernel = scale(7, BODY.replace("tile[threadIdx.x] *", "pile[threadIdx.x] *"))
        with pytest.raises(jit.CompilationError) as caught:
            jit.compile_kernel(kernel, "sm_80")
        for part in ("scale of scale.cuh (kFactor=7)", "sm_80", 'identifier "pile" is undefined'):
            assert part in str(caught.value)

    @needs_nvrtc
    def test_error_in_a_header_names_it(self) -> None:
        kernel = scale(body='#include "device/nothing.cuh"\n' + BODY)
        with pytest.raises(jit.CompilationError, match=r"device/nothing\.cuh"):
            jit.compile_kernel(kernel, "sm_80")

    @needs_nvrtc
    @pytest.mark.parametrize("arch", ["sm_70", "sm_990a"])
    def test_architecture_the_compiler_does_not_know(self, arch: str) -> None:
        with pytest.raises(jit.GpuUnavailable, match=rf"NVRTC \d+\.\d+ .* not for {arch}"):
            jit.compile_kernel(scale(), arch)

    @needs_nvrtc
    def test_files_in_the_working_directory_are_not_included(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "device").mkdir()
        (tmp_path / "device/scalar.cuh").write_text("#error the wrong file")
        monkeypatch.chdir(tmp_path)
        jit.compile_kernel(scale(), "sm_80")

    def test_spills_are_those_of_the_entry(self) -> None:
        log = """ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
ptxas         .     8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'scale' for 'sm_80'
ptxas info    : Function properties for scale
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size
"""
        compiled = jit.Compiled("scale", b"", log)
        assert (compiled.registers, compiled.stack_bytes, compiled.spill_bytes) == (40, 16, 12)
        assert jit.Compiled("scale", b"", "").registers is None

    def test_included_files_are_found_through_others(self) -> None:
        found = compile.included('#include "device/scalar.cuh"\n')
        assert found["device/ptx.cuh"] == (FOLDER / "device/ptx.cuh").read_text()
        assert list(found) == sorted(found)

    @pytest.mark.parametrize("missing", ["cuda-bindings", "NVRTC"])
    def test_says_what_to_install(self, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            raise (ImportError if missing == "cuda-bindings" else RuntimeError)("not found")

        library = SimpleNamespace(nvrtcVersion=fail)
        answer = fail if missing == "cuda-bindings" else lambda name: library
        monkeypatch.setattr("importlib.import_module", answer)
        compile._nvrtc.cache_clear()
        with pytest.raises(jit.GpuUnavailable) as caught:
            jit.nvrtc_version()
        for part in (missing, "pip install 'fastconv[cuda]'", "CPU tensors work without it"):
            assert part in str(caught.value)

    def test_importing_needs_nothing_of_cuda(self) -> None:
        code = "import sys; sys.modules['cuda'] = None; import fastconv, fastconv.jit"
        subprocess.check_call([sys.executable, "-c", code])


# Threads that compile over and over what takes a second.
THREADS = """
import sys, threading, time
from fastconv import jit
from fastconv.jit import cache, compile
from test_jit import scale

cache.load, cache.store = lambda *_: None, lambda *_: None
function = 'extern "C" __global__ void f{}(float* x) {{ *x = powf(*x, x[{}]); }}'
kernel = scale(body="\\n".join(function.format(i, i) for i in range(200)))

def work():
    while True:
        CALL

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
while not compile._compilers:
    time.sleep(0.01)
time.sleep(0.3)  # for them to be in the midst of it
"""


TOO_SOON_OVER = 9  # the status of a process that compiled in less time than it should have taken


@needs_nvrtc
class TestExit:
    """What happens to threads that compile, or are about to, when the process ends."""

    def _run(self, program: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=False,
        )

    @pytest.mark.parametrize(
        "call", ["jit.build(kernel, 'sm_80')", "jit.build_all([kernel], 'sm_80')"]
    )
    def test_daemon_threads(self, call: str) -> None:
        """The compiler would abort, beneath them, as its data is destroyed."""
        ended = self._run(THREADS.replace("CALL", call))
        assert ended.returncode == 0, ended.stderr

    def test_what_is_compiled_in_the_background(self) -> None:
        """What is under way ends, and is kept; of what is still to be done, nothing begins."""
        program = """
import time
from fastconv.jit import compile, launch
from test_jit import scale

launch.compile_threads = 3
function = 'extern "C" __global__ void f{}(float* x) {{ *x = powf(*x, x[{}]); }}'
body = "\\n".join(function.format(i, i) for i in range(40))
launch.begin([scale(n, body + "// FACTOR") for n in range(50)], "sm_80", 0)
while len(compile._compilers) < 2:
    time.sleep(0.01)
"""
        ended = self._run(program)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert cache.size().entries in range(1, 50)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
    def test_forked_process_does_not_wait_for_threads_it_does_not_have(self) -> None:
        # The child ends without the destructors: threads left their data as it was.
        fork = """
import os
if not os.fork():
    compile._exit()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
        ended = self._run(THREADS.replace("CALL", "jit.build(kernel, 'sm_80')") + fork)
        assert ended.returncode == 0, ended.stderr

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux's signals")
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, -15)])
    def test_signal_during_the_first_compilation(self, number: int, status: int) -> None:
        """Not the compiler's to handle, which would call exit() beneath its own threads.

        The signal has to come while it compiles: where that is over in half a second, the next
        program is longer.
        """
        program = f"""
import os, signal, threading, time
from fastconv import jit
from fastconv.jit import compile
from test_jit import scale

signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells' background jobs ignore
function = "__device__ int f{{}}(int x) {{{{ return x + {{}}; }}}}"
kernel = scale(body="\\n".join(function.format(i, i) for i in range(FUNCTIONS)))
thread = threading.Thread(target=jit.compile_kernel, args=(kernel, "sm_80"), daemon=True)
thread.start()
while not compile._compilers:
    time.sleep(0.01)
time.sleep(0.5)
if not compile._compilers:
    os._exit({TOO_SOON_OVER})
try:
    os.kill(os.getpid(), {number})
    thread.join()
except KeyboardInterrupt:
    os._exit(7)
"""
        for functions in (50_000, 200_000, 800_000):
            ended = self._run(program.replace("FUNCTIONS", str(functions)))
            if ended.returncode != TOO_SOON_OVER:
                break
        assert ended.returncode == status, ended.stderr

    def test_thread_that_outlives_the_main_one(self) -> None:
        program = """
import threading
from fastconv import jit
from test_jit import scale

def work():
    threading.main_thread().join()
    print(len(jit.build_all([scale(1), scale(2)], "sm_80")))

threading.Thread(target=work).start()
"""
        ended = self._run(program)
        assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


class TestKey:
    OPTIONS = ("-std=c++17", "--gpu-architecture=sm_80")

    @pytest.mark.parametrize(
        "change",
        [
            {"text": "other"},
            {"headers": {"a": "12"}},
            {"headers": {"a": "1", "b": ""}},
            {"options": ["-std=c++17", "--gpu-architecture=sm_90a"]},
            {"options": ["-std=c++17--gpu-architecture=sm_80"]},
            {"version": (12, 9)},
        ],
    )
    def test_depends_on_everything(self, change: dict[str, Any]) -> None:
        inputs = {"text": "t", "headers": {"a": "1"}, "options": self.OPTIONS, "version": (13, 0)}
        assert cache.key(**inputs) == cache.key(**inputs)  # type: ignore[arg-type]
        assert cache.key(**inputs) != cache.key(**(inputs | change))  # type: ignore[arg-type]

    @needs_nvrtc
    def test_a_changed_header_is_compiled_anew(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner = tmp_path / "inner.cuh"
        (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
        monkeypatch.setattr(compile, "FOLDER", tmp_path)
        kernel = scale(body='#include "outer.cuh"\nextern "C" __global__ void scale(int* x) VALUE')
        cubins = set()
        for value in (1, 2, 1):
            inner.write_text(f"#define VALUE {{ *x = {value}; }}")
            compile._contents.cache_clear()
            cubins.add(jit.build(kernel, "sm_80"))
        assert len(cubins) == len(list(folder.iterdir())) == 2


class TestCache:
    KEY, PAYLOAD = "c0" * 32, b"machine code" * 100

    def test_round_trip(self, folder: Path) -> None:
        assert cache.load("cubin", self.KEY) is None
        assert cache.size() == (0, 0, 0, 0)
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        assert cache.load("cubin", self.KEY) == self.PAYLOAD
        (entry,) = folder.iterdir()
        assert cache.size() == (entry.stat().st_size, 1, 0, 0)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda entry: b"",
            lambda entry: entry[:10],
            lambda entry: entry[:-1],
            lambda entry: entry + b"\0",
            lambda entry: entry[:500] + bytes([entry[500] ^ 4]) + entry[501:],
            lambda entry: b"not " + entry[4:],
        ],
        ids=["empty", "in the header", "truncated", "extended", "one bit", "wrong magic"],
    )
    def test_damaged_entry_is_removed_and_replaced(self, folder: Path, damage: Any) -> None:
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        (entry,) = folder.iterdir()
        entry.write_bytes(damage(entry.read_bytes()))
        assert cache.load("cubin", self.KEY) is None
        assert not entry.exists()
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        assert cache.load("cubin", self.KEY) == self.PAYLOAD

    def test_entry_under_another_key_is_damaged(self, folder: Path) -> None:
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        (entry,) = folder.iterdir()
        entry.rename(folder / f"{'0' * 64}.cubin")
        assert cache.load("cubin", "0" * 64) is None

    def test_folder_that_cannot_be_made_warns_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "file/cache"))
        with pytest.warns(UserWarning, match="FASTCONV_CACHE_DIR"):
            cache.store("cubin", self.KEY, self.PAYLOAD, {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.store("cubin", self.KEY, self.PAYLOAD, {})
        assert cache.load("cubin", self.KEY) is None
        assert cache.size() == (0, 0, 0, 0)

    def test_full_disk_warns_and_leaves_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(UserWarning, match="No space left"):
            cache.store("cubin", self.KEY, self.PAYLOAD, {})
        assert list(folder.iterdir()) == []

    def test_failure_after_another_process_stored_it_is_silent(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.store("cubin", self.KEY, self.PAYLOAD, {})

    def test_what_killed_processes_left_is_removed_in_time(self, folder: Path) -> None:
        """Their half-written entries, and nothing else: the folder may be used for other files."""
        folder.mkdir(0o700)
        unfinished = f"{'a1' * 32}.{'b2' * 16}.tmp"
        old, new = folder / unfinished, folder / unfinished.replace("a1", "a2")
        others = [folder / name for name in ("other.tmp", f"x{unfinished}", f"{unfinished}.txt")]
        for path in (old, new, *others):
            path.touch()
        for path in (old, *others):
            os.utime(path, (0, 0))
        cache.store("cubin", self.KEY, self.PAYLOAD, {})
        assert not old.exists()
        assert all(path.exists() for path in (new, *others))
        assert cache.load("cubin", self.KEY) == self.PAYLOAD

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux's folders")
    def test_folders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FASTCONV_CACHE_DIR")
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache.folder() == Path("/elsewhere/fastconv")
        for ignored in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert cache.folder() == Path("/home/someone/.cache/fastconv")
        monkeypatch.setenv("FASTCONV_CACHE_DIR", "~/here")
        assert cache.folder() == Path("/home/someone/here")

    def test_processes_at_once(self, folder: Path) -> None:
        """Eight find a damaged entry, or none, or another's, and store theirs, again and again."""
        program = (
            "import os, sys, types\n"
            "for name in ('fastconv', 'fastconv.jit'):\n"  # without theirs, which import torch
            "    sys.modules[name] = types.ModuleType(name)\n"
            "sys.modules[name].__path__ = sys.argv[1:]\n"
            "from fastconv.jit import cache\n"
            "os.umask(0o022)\n"  # what is damaged is to be read
            "payload = b'machine code' * 10000\n"
            "key = 'c0' * 32\n"
            "path = cache._path('cubin', key)\n"
            "for i in range(100):\n"
            "    if i % 20 == 0 and path.exists():\n"
            "        path.write_bytes(b'damaged')\n"
            "    assert cache.load('cubin', key) in (payload, None)\n"
            "    cache.store('cubin', key, payload, {})\n"
        )
        command = [sys.executable, "-W", "error", "-c", program, str(Path(cache.__file__).parent)]
        processes = [subprocess.Popen(command) for _ in range(8)]
        assert [process.wait() for process in processes] == [0] * 8
        assert [path.name for path in folder.iterdir()] == [f"{self.KEY}.cubin"]
        assert cache.load("cubin", self.KEY) == b"machine code" * 10000


# What follows runs with a driver that notes what it is told.

Status = IntEnum(
    "Status",
    {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    },
)
Attribute = IntEnum(
    "Attribute",
    {
        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 0,
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    },
)
CaptureMode = IntEnum(
    "CaptureMode", {"CU_STREAM_CAPTURE_MODE_GLOBAL": 0, "CU_STREAM_CAPTURE_MODE_RELAXED": 2}
)


# The driver's numbers for what a tensor map is made of.
MapType = IntEnum(
    "MapType",
    {
        f"CU_TENSOR_MAP_DATA_TYPE_{name}": number
        for name, number in {
            "FLOAT16": 6,
            "FLOAT32": 7,
            "FLOAT64": 8,
            "BFLOAT16": 9,
            "TFLOAT32": 11,
        }.items()
    },
)
Interleave = IntEnum("Interleave", {"CU_TENSOR_MAP_INTERLEAVE_NONE": 0})
Swizzle = IntEnum(
    "Swizzle",
    [f"CU_TENSOR_MAP_SWIZZLE_{name}" for name in ("NONE", "32B", "64B", "128B")],
    start=0,
)
Promotion = IntEnum(
    "Promotion",
    [f"CU_TENSOR_MAP_L2_PROMOTION_{name}" for name in ("NONE", "L2_64B", "L2_128B", "L2_256B")],
    start=0,
)
Fill = IntEnum("Fill", {"CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0})
LaunchAttribute = IntEnum(
    "LaunchAttribute", {"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6}
)


class Driver:
    """Stands in for cuda.bindings.driver."""

    CUresult, CUfunction_attribute, CUstreamCaptureMode = Status, Attribute, CaptureMode
    CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle = MapType, Interleave, Swizzle
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill = Promotion, Fill
    CUstream = int
    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = LaunchAttribute

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: dict[str, list[int]] = {}  # of a function's next calls
        self.version = 13000
        self.signature = "ppi"
        self.launched: list[tuple[Any, ...]] = []
        self.early: list[bool] = []  # of each launch
        self.entries: dict[bytes, Any] = {}  # functions that are called by their address
        self.encoded: list[tuple[Any, ...]] = []

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        answers = {
            "cuDriverGetVersion": self.version,
            "cuGetErrorString": b"in words",
            "cuFuncGetAttribute": 1024,
            "cuModuleGetFunction": 0xF,
            "cuThreadExchangeStreamCaptureMode": CaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
        }

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            statuses = self.statuses.get(name)
            return Status(statuses.pop(0) if statuses else 0), answers.get(name, name)

        return function

    def cuLaunchKernel(self, *args: Any) -> tuple[Any]:
        return self._launch(False, *args)

    def cuLaunchKernelEx(self, config: Any, function: int, *args: Any) -> tuple[Any]:
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        early = (
            attribute.id == LaunchAttribute.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        sizes = (
            *(config.gridDimX, config.gridDimY, config.gridDimZ),
            *(config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes),
        )
        return self._launch(early, function, *sizes, config.hStream, *args)

    def _launch(self, early: bool, *args: Any) -> tuple[Any]:
        *configuration, arguments, extra = args
        pointers = (ctypes.c_void_p * len(self.signature)).from_address(arguments)
        values = [
            self._read(kind, pointer)
            for kind, pointer in zip(self.signature, pointers, strict=True)
        ]
        self.launched.append((*configuration, *values, extra))
        self.early.append(early)
        statuses = self.statuses.get("cuLaunchKernel")
        return (Status(statuses.pop(0) if statuses else 0),)

    def _read(self, kind: str, pointer: int) -> Any:
        if kind == "m":  # an address and, after it, which map it is
            assert pointer % 128 == 0
            words = (ctypes.c_uint64 * 16).from_address(pointer)
            return words[0], *words[14:]
        return {"p": ctypes.c_uint64, "i": ctypes.c_int32}[kind].from_address(pointer).value

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        assert (version, flags) == (12000, 0)
        if name not in self.entries:
            prototype, function = {
                b"cuTensorMapEncodeTiled": (maps._ENCODE_TILED, self._encode_tiled),
                b"cuTensorMapEncodeIm2col": (maps._ENCODE_IM2COL, self._encode_im2col),
                b"cuTensorMapReplaceAddress": (maps._REPLACE_ADDRESS, self._replace_address),
            }[name]
            self.entries[name] = prototype(function)
        return Status(0), ctypes.cast(self.entries[name], ctypes.c_void_p).value, Status(0)

    def _encode(self, kind: str, map: int, *args: Any) -> int:
        assert map % 128 == 0
        self.encoded.append((kind, *args))
        words = (ctypes.c_uint64 * 16).from_address(map)
        words[0], words[14], words[15] = args[2], len(self.encoded), 0xC0DE
        statuses = self.statuses.get(f"cuTensorMapEncode{kind}")
        return statuses.pop(0) if statuses else 0

    def _encode_tiled(self, map: int, type_: int, rank: int, *args: Any) -> int:
        address, sizes, strides, box, steps, *modes = args
        values = (sizes[:rank], strides[: rank - 1], box[:rank], steps[:rank])
        return self._encode("Tiled", map, type_, rank, address, *values, *modes)

    def _encode_im2col(self, map: int, type_: int, rank: int, *args: Any) -> int:
        address, sizes, strides, lower, upper, channels, pixels, steps, *modes = args
        corners = (lower[: rank - 2], upper[: rank - 2])
        values = (sizes[:rank], strides[: rank - 1], *corners, channels, pixels, steps[:rank])
        return self._encode("Im2col", map, type_, rank, address, *values, *modes)

    def _replace_address(self, map: int, address: int | None) -> int:
        assert map % 128 == 0
        statuses = self.statuses.get("cuTensorMapReplaceAddress")
        status = statuses.pop(0) if statuses else 0
        if not status:
            ctypes.c_uint64.from_address(map).value = address or 0
        return status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """An H200's driver and PyTorch, as far as launching needs them."""
    driver = Driver()
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "build", lambda kernel, arch: f"cubin for {arch}".encode())
    monkeypatch.setattr(launch, "kept", lambda kernel, arch: None)
    monkeypatch.setattr(launch, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    stream = lambda index: 0x57 + index  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    launch._context.cache_clear()
    return driver


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Does the work in threads at once, numbered from 1, which switch as often as can be."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, count + 1)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


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
            jit.prepare([LAUNCH], torch.device("cpu"))

    def test_configuration_stream_and_arguments(self, driver: Driver) -> None:
        jit.prepare([LAUNCH], CUDA).run(0x7FFF_FFFF_FFF0, 0)
        assert driver.launched == [(0xF, 5, 6, 7, 128, 1, 1, 0, 0x57, 0x7FFF_FFFF_FFF0, 0, -1, 0)]

    def test_early(self, driver: Driver) -> None:
        """The driver is told, and all else is as in other launches."""
        early = dataclasses.replace(LAUNCH, early=True)
        prepared = jit.prepare([LAUNCH, early, LAUNCH], CUDA)
        for _ in range(2):
            prepared.run(1, 2)
        assert driver.early == [False, True, False] * 2
        assert driver.launched == [(0xF, 5, 6, 7, 128, 1, 1, 0, 0x57, 1, 2, -1, 0)] * 6

    def test_early_in_threads_with_streams_of_their_own(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared = jit.prepare([dataclasses.replace(LAUNCH, early=True)], CUDA)
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
        """By the bindings' own types."""
        bindings = compile.binding("driver")
        monkeypatch.setattr(launch, "_driver", lambda: bindings)
        config = launch._early_config(LAUNCH)
        config.hStream = bindings.CUstream(0x57)
        numbers = (ctypes.c_uint32 * 14).from_address(config.getPtr())
        (_, attributes, _) = (ctypes.c_uint64 * 3).from_address(config.getPtr() + 32)
        assert numbers[:7] == [5, 6, 7, 128, 1, 1, 0]
        assert (numbers[8], numbers[12]) == (0x57, 1)
        assert (ctypes.c_uint32 * 3).from_address(attributes)[:] == [6, 0, 1]

    def test_sequence_shares_addresses(self, driver: Driver) -> None:
        second = Launch(scale(), (1, 1, 1), 32, 0, ("z", "x", 2**31 - 1))
        prepared = jit.prepare([LAUNCH, second], CUDA)
        assert prepared.names == ("x", "y", "z")
        prepared.run(1, 2, 3)
        prepared.run(4, 5, 6)
        arguments = [call[-4:-1] for call in driver.launched]
        assert arguments == [(1, 2, -1), (3, 1, 2**31 - 1), (4, 5, -1), (6, 4, 2**31 - 1)]
        assert len(driver.called("cuModuleLoadData")) == 1

    def test_order_of_names(self, driver: Driver) -> None:
        prepared = jit.prepare([LAUNCH], CUDA, ("bias", "y", "x"))
        prepared.run(1, 2, 3)
        assert driver.launched[0][-4:-1] == (3, 2, -1)
        with pytest.raises(ValueError, match=r"\['x'\]"):
            jit.prepare([LAUNCH], CUDA, ("y", "bias"))

    def test_integer_that_does_not_fit(self, driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match="32-bit integers, but got 2147483648"):
            jit.prepare([Launch(scale(), (1, 1, 1), 32, 0, ("x", "y", 2**31))], CUDA)

    @pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 2**16, 1), (1, 1, 2**16)], ids=str)
    def test_grid_too_large(self, grid: tuple[int, int, int], driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match=re.escape(f"65535) blocks, not {grid}")):
            jit.prepare([Launch(scale(), grid, 32, 0, ("x", "y", 1))], CUDA)

    def test_wrong_number_of_addresses(self, driver: Driver) -> None:
        with pytest.raises(Exception, match="2"):
            jit.prepare([LAUNCH], CUDA).run(1)
        assert driver.launched == []

    def test_kernels_are_loaded_once_per_device(self, driver: Driver) -> None:
        for index in (0, 1, 0, 1):
            jit.prepare([LAUNCH], torch.device("cuda", index))
        assert driver.called("cuModuleLoadData") == [(b"cubin for sm_90a",)] * 2
        assert driver.called("cuModuleGetFunction") == [("cuModuleLoadData", b"scale")] * 2
        assert driver.called("cuDeviceGet") == [(0,), (1,)]

    def test_loading_is_allowed_during_capture(self, driver: Driver) -> None:
        jit.prepare([LAUNCH], CUDA)
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
        jit.prepare([LAUNCH], torch.device("cuda", 1)).run(1, 2)
        assert entered == [(1, 0), (1, 1)]
        assert driver.launched[0][8] == 0x58

    @pytest.mark.parametrize(
        ("shared", "told"), [(0, None), (47 * 1024, None), (47 * 1024 + 1, 47 * 1024 + 1)]
    )
    def test_shared_memory(self, driver: Driver, shared: int, told: int | None) -> None:
        """The kernel has 1 KiB of its own; beyond 48 KiB together, the driver must be told."""
        prepared = jit.prepare([Launch(scale(), (1, 1, 1), 32, shared, ("x", "y", 0))], CUDA)
        attribute = Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        expected = [] if told is None else [(0xF, attribute, told)]
        assert driver.called("cuFuncSetAttribute") == expected
        prepared.run(1, 2)
        assert driver.launched[0][7] == shared

    def test_shared_memory_limit_never_falls(self, driver: Driver) -> None:
        for kilobytes in (64, 100, 64, 0):
            launch = Launch(scale(), (1, 1, 1), 32, kilobytes * 1024, ("x", "y", 0))
            jit.prepare([launch], CUDA)
        limits = [call[2] for call in driver.called("cuFuncSetAttribute")]
        assert limits == [64 * 1024, 100 * 1024]

    def test_too_much_shared_memory(self, driver: Driver) -> None:
        driver.statuses["cuFuncSetAttribute"] = [1]
        with pytest.raises(jit.LaunchError, match=r"giving 999999 bytes .*kFactor=3.* on cuda:0"):
            jit.prepare([Launch(scale(), (1, 1, 1), 32, 999_999, ("x", "y", 0))], CUDA)

    def test_too_many_threads(self, driver: Driver) -> None:
        with pytest.raises(jit.LaunchError, match="1024 threads in a block at most, not with 1056"):
            jit.prepare([Launch(scale(), (1, 1, 1), 1056, 0, ("x", "y", 0))], CUDA)

    @pytest.mark.parametrize(
        ("code", "hint"), [(1, ""), (700, "launched earlier"), (900, "once before capturing")]
    )
    def test_launch_error(self, driver: Driver, code: int, hint: str) -> None:
        driver.statuses["cuLaunchKernel"] = [code]
        prepared = jit.prepare([LAUNCH], CUDA)
        with pytest.raises(jit.LaunchError) as caught:
            prepared.run(1, 2)
        expected = ("scale of scale.cuh (kFactor=3)", "cuda:0", "grid (5, 6, 7)", "in words")
        for part in (*expected, Status(code).name, hint):
            assert part in str(caught.value)
        prepared.run(1, 2)

    def test_thread_without_a_context_gets_one(self, driver: Driver) -> None:
        driver.statuses["cuLaunchKernel"] = [201]
        jit.prepare([LAUNCH], CUDA).run(1, 2)
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
            jit.prepare([LAUNCH], CUDA)
        assert driver.calls[-1][0] == "cuCtxPopCurrent"
        jit.prepare([LAUNCH], CUDA).run(1, 2)

    def test_driver_older_than_the_compiler(self, driver: Driver) -> None:
        driver.version = 12080
        with pytest.raises(jit.GpuUnavailable, match=r"CUDA 12\.8.* NVRTC 13\.0: update"):
            jit.prepare([LAUNCH], CUDA)

    def test_threads_do_not_mix_up_arguments(self, driver: Driver) -> None:
        prepared = jit.prepare([LAUNCH], CUDA)

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
            jit.prepare([LAUNCH], CUDA)

        monkeypatch.setattr(launch, "build", build)
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

        monkeypatch.setattr(launch, "build", build)
        monkeypatch.setenv(launch.JOBS_VARIABLE, "2")
        kernels = [scale(1), scale(2)]
        jit.prepare([Launch(k, (1, 1, 1), 32, 0, ("x", "y", 0)) for k in kernels], CUDA)

    def test_what_is_loaded_is_not_begun_again(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[Any] = []
        monkeypatch.setattr(launch, "begin_work", lambda key, work: begun.append(key))
        jit.prepare([LAUNCH], CUDA)
        other = scale(7)
        for index in (0, 1):
            launch.begin([LAUNCH.kernel, other, other], "sm_90a", index)
        here, there = (other.text, "sm_90a"), (LAUNCH.kernel.text, "sm_90a")
        assert begun == [here, there, here]

    def test_one_program_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever of its kernels are asked for."""
        built = []

        def build(kernel: Kernel, arch: str) -> bytes:
            built.append(kernel.text)
            return kernel.text.encode()

        monkeypatch.setattr(launch, "build", build)
        monkeypatch.setattr(launch, "kept", lambda kernel, arch: None)
        one, two = scale(1), scale(2)
        kernels = [one, two, dataclasses.replace(one, entry="other"), two]
        assert jit.build_all(kernels, "sm_80") == [kernel.text.encode() for kernel in kernels]
        assert sorted(built) == [one.text, two.text]

    def test_threads_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where a machine's limit of them is reached: kernels compile one by one."""

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(launch, "build", lambda kernel, arch: kernel.text.encode())
        monkeypatch.setattr(launch, "kept", lambda kernel, arch: None)
        monkeypatch.setattr(threading.Thread, "start", start)
        kernels = [scale(1), scale(2)]
        assert jit.build_all(kernels, "sm_80") == [kernel.text.encode() for kernel in kernels]

    def test_trouble_of_another_launcher(self, driver: Driver) -> None:
        """It is mended once, where it can be, and told in the words that ours has."""
        second = Launch(scale(), (1, 1, 1), 32, 64, ("z", "x", 2))
        prepared = jit.prepare([LAUNCH, second], CUDA)
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
        prepared = jit.prepare([LAUNCH], CUDA)
        driver.statuses["cuCtxSetCurrent"] = [700]
        with pytest.raises(jit.LaunchError, match=r"entering the CUDA context.*ILLEGAL_ADDRESS"):
            prepared.trouble(0, -1, 0, 201, False)

    def test_description(self, driver: Driver) -> None:
        second = Launch(scale(), (1, 1, 1), 32, 64, ("z", "x", 2))
        prepared = jit.prepare([LAUNCH, dataclasses.replace(second, early=True)], CUDA)
        first = (("tensor", 0), ("tensor", 1), ("int", -1))
        assert prepared.description == [
            (0xF, (5, 6, 7), 128, 0, False, first),
            (0xF, (1, 1, 1), 32, 64, True, (("tensor", 2), ("tensor", 0), ("int", 2))),
        ]

    @needs_nvrtc
    def test_several_kernels_are_compiled_and_loaded(
        self, driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "build", jit.build)
        kernels = [scale(factor) for factor in range(4)]
        jit.prepare([Launch(k, (1, 1, 1), 32, 0, ("x", "y", 0)) for k in kernels], CUDA)
        loaded = [cubin for (cubin,) in driver.called("cuModuleLoadData")]
        assert loaded == [jit.build(kernel, "sm_90a") for kernel in kernels]
        assert len(set(loaded)) == cache.size().entries == 4

    def test_overhead(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, record_property: Any
    ) -> None:
        """Host time of a launch, the driver's part aside: on record, not judged."""
        status = (Status.CUDA_SUCCESS,)
        monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: status)
        prepared = jit.prepare([LAUNCH], CUDA)
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
        prepared = jit.prepare([launch, launch], CUDA)
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
        prepared = jit.prepare([mapped_launch(PIXELS, "x", TILED, 7)], CUDA)
        assert prepared.names == ("y", "x")
        prepared.run(0x1000, 0x2000)
        prepared.run(0x3000, 0x4000)
        assert [call[-5:-1] for call in driver.launched] == [
            ((0x1000, 1, 0xC0DE), 0x2000, (0x2000, 2, 0xC0DE), 7),
            ((0x3000, 1, 0xC0DE), 0x4000, (0x4000, 2, 0xC0DE), 7),
        ]

    def test_description(self, driver: Driver) -> None:
        prepared = jit.prepare([mapped_launch("z", TILED, 3)], CUDA)
        (_, *_, arguments) = prepared.description[0]
        (_, template, _) = arguments[1]
        assert arguments == (("tensor", 0), ("map", template, 1), ("int", 3))
        assert len(template) == 128
        assert template.startswith(maps._PLACEHOLDER.to_bytes(8, sys.byteorder))

    def test_threads_have_maps_of_their_own(self, driver: Driver) -> None:
        driver.signature = "mp"
        prepared = jit.prepare([mapped_launch(TILED, "x")], CUDA)

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
            jit.prepare([mapped_launch(TILED)], CUDA)
        for part in ("describing x to scale of scale.cuh", "box=(32, 7)", "INVALID_VALUE"):
            assert part in str(caught.value)
        assert driver.calls[-1][0] == "cuGetErrorString"
        assert ("cuCtxPopCurrent",) in driver.calls

    def test_refused_address(self, driver: Driver) -> None:
        driver.signature = "m"
        driver.statuses["cuTensorMapReplaceAddress"] = [1]
        prepared = jit.prepare([mapped_launch(TILED)], CUDA)
        with pytest.raises(jit.LaunchError) as caught:
            prepared.run(0x1008)
        for part in ("mapping x at address 0x1008 for scale", "box=(32, 7)", "INVALID_VALUE"):
            assert part in str(caught.value)
        prepared.run(0x1010)
        assert driver.launched[0][-2][0] == 0x1010

    def test_trouble_of_another_launcher(self, driver: Driver) -> None:
        driver.signature = "m"
        driver.statuses["cuTensorMapReplaceAddress"] = [1]
        prepared = jit.prepare([mapped_launch(TILED)], CUDA)
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
        jit.prepare([mapped_launch(TILED)], CUDA).run(0x1010)
        assert driver.called("cuCtxSetCurrent") == [("cuDevicePrimaryCtxRetain",)]
        assert driver.launched[0][-2][0] == 0x1010

    def test_driver_without_tensor_maps(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver, "cuGetProcAddress", lambda *_: (Status(0), 0, Status(0)))
        with pytest.raises(jit.GpuUnavailable, match=r"EncodeTiled: .* update the driver"):
            jit.prepare([mapped_launch(TILED)], CUDA)

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
