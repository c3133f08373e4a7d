"""Compiling kernels with NVRTC, and the disk cache."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nvrtc as other_nvrtc
from effort import PATIENCE_S
from fastconv import jit
from fastconv.jit import cache, compile
from fastconv.kernels.family import FOLDER, Kernel

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
    """A kernel whose text is given instead of read from a file."""

    body: str

    @property
    def text(self) -> str:
        return self.body.replace("FACTOR", str(dict(self.constants)["kFactor"]))


def scale(factor: int = 3, body: str = BODY) -> Kernel:
    return Scale("scale.cuh", "scale", (("kFactor", factor),), body)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs the work in threads at once, numbered from 1, that switch as often as possible."""
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder; no warning has been given."""
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

    @pytest.mark.parametrize(
        ("missing", "advice"),
        [
            ("cuda-bindings", "pip install 'fastconv[cuda]'"),
            ("NVRTC", "a CUDA build of PyTorch brings it"),
        ],
    )
    def test_says_what_to_install(
        self, missing: str, advice: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Any:
            raise (ImportError if missing == "cuda-bindings" else RuntimeError)("not found")

        library = SimpleNamespace(nvrtcVersion=fail)
        answer = fail if missing == "cuda-bindings" else lambda name: library
        monkeypatch.setattr("importlib.import_module", answer)
        compile._nvrtc.cache_clear()
        with pytest.raises(jit.GpuUnavailable) as caught:
            jit.nvrtc_version()
        for part in (missing, advice, "CPU tensors work without it"):
            assert part in str(caught.value)

    def test_importing_needs_nothing_of_cuda(self) -> None:
        code = "import sys; sys.modules['cuda'] = None; import fastconv, fastconv.jit"
        subprocess.check_call([sys.executable, "-c", code])


# Threads that compile again and again a program that takes a second.
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
while not compile._compiling_threads:
    time.sleep(0.01)
time.sleep(0.3)  # On most machines, both are in the compiler then.
"""


# The exit status of a program whose compilation was over before the signal.
TOO_SOON_OVER = 9


@needs_nvrtc
class TestExit:
    """Threads that compile, or are about to, when the process ends."""

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
        """The process waits for them: the compiler would abort as its data is destroyed."""
        ended = self._run(THREADS.replace("CALL", call))
        assert ended.returncode == 0, ended.stderr

    def test_what_is_compiled_in_the_background(self) -> None:
        """Kernels under way are finished and stored; no others are begun."""
        program = """
import time
from fastconv.jit import compile, loading, pool
from test_jit import scale

pool.compile_threads = 3
function = 'extern "C" __global__ void f{}(float* x) {{ *x = powf(*x, x[{}]); }}'
body = "\\n".join(function.format(i, i) for i in range(40))
loading.compile_ahead([scale(n, body + "// FACTOR") for n in range(50)], "sm_80", 0)
while len(compile._compiling_threads) < 2:
    time.sleep(0.01)
"""
        ended = self._run(program)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert cache.size().entries in range(1, 50)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
    def test_forked_process_does_not_wait_for_threads_it_does_not_have(self) -> None:
        # The child exits without destructors, since the threads left their data in any state.
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
        """Python handles the signal. NVRTC would call exit() while its own threads run.

        The signal has to come while it compiles: where that is over in half a second, the next
        program is longer.
        """
        program = f"""
import os, signal, threading, time
from fastconv import jit
from fastconv.jit import compile
from test_jit import scale

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it
function = "__device__ int f{{}}(int x) {{{{ return x + {{}}; }}}}"
kernel = scale(body="\\n".join(function.format(i, i) for i in range(FUNCTIONS)))
thread = threading.Thread(target=jit.compile_kernel, args=(kernel, "sm_80"), daemon=True)
thread.start()
while not compile._compiling_threads:
    time.sleep(0.01)
time.sleep(0.5)
if not compile._compiling_threads:
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
        """Half-written entries are removed, and no other files of the folder."""
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
        """Eight processes store and load one entry, which is damaged or missing at times."""
        program = (
            "import os, sys, types\n"
            "for name in ('fastconv', 'fastconv.jit'):\n"  # Their __init__ imports torch.
            "    sys.modules[name] = types.ModuleType(name)\n"
            "sys.modules[name].__path__ = sys.argv[1:]\n"
            "from fastconv.jit import cache\n"
            "os.umask(0o022)\n"  # Only files that are trusted are read, damaged ones included.
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
