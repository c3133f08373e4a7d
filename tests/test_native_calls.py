"""Calls by the native host path: its table, its launches, and how PyTorch sees them.

They go by a copy of the library: with a table of its own, and a `prepare` of the test's. That it
computes as Python does is seen in other files, which run with both (``host_path``).
"""

from __future__ import annotations

import _ctypes
import copy
import ctypes
import importlib.machinery
import importlib.util
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
import oracle
from fastconv import _precision, native
from fastconv.kernels import planner
from fastconv.native import build
from fastconv.ops import entries
from fastconv.ops.entries import Entry
from fastconv.problem import ACTIVATIONS
from test_native import (
    BIAS,
    INPUT,
    WEIGHT,
    check_works,
    close,
    in_child,
    noted_warnings,
    tensors,
)
from test_precision import SETTINGS, _pytorch_setting, cudnn  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

NAMES = ("input", "weight", "bias")


class Host:
    """A copy of the library, which notes what it asks of Python."""

    def __init__(self, path: Path) -> None:
        # Of two modules by the same name, pybind11 makes but one.
        name = f"of_{path.parent.name}.{build._NAME}"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        self.module = importlib.util.module_from_spec(spec)
        loader.exec_module(self.module)
        self.conv2d = self.module.call
        self.asked: list[tuple[Any, ...]] = []  # the operator, and its arguments
        self.filled: list[str] = []
        self.module.set_make_entry(self._prepare)
        self.answer: Callable[..., Entry] = self._real

    def _prepare(self, operator: str, *arguments: Any) -> Entry:
        self.asked.append((operator, *arguments))
        return self.answer(operator, *arguments)

    def _real(self, operator: str, *arguments: Any) -> Entry:
        entry = entries.make_entry(operator, *arguments)
        assert entry.fill is not None
        fill = entry.fill

        def noted(*arguments: Any) -> None:
            self.filled.append(operator)
            fill(*arguments)

        return entry._replace(fill=noted)

    @property
    def operators(self) -> list[str]:
        return [operator for operator, *_ in self.asked]


@pytest.fixture
def host(_native_library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    path = tmp_path / "host.so"
    shutil.copy(build.library(), path)
    host = Host(path)
    monkeypatch.setattr(native, "conv2d", host.conv2d)
    return host


def misaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor)
    return moved.copy_(tensor)


class TestTable:
    def test_the_same_form_is_prepared_once(self, host: Host) -> None:
        for _ in range(3):
            check_works()
        assert host.operators == ["forward"]
        assert host.filled == ["forward"] * 3

    @pytest.mark.parametrize(
        "form",
        [
            {"input": (3, 4, 6, 5)},
            {"input": (2, 4, 5, 6)},
            {"weight": (6, 4, 2, 3)},
            {"bias": None},
            {"stride": 2},
            {"stride": (1, 2)},
            {"padding": (1, 0)},
            {"padding": ((0, 1), (1, 1))},
            {"dilation": 2},
            {"weight": (6, 2, 3, 3), "groups": 2},
            {"layout": {0: lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}},
            {"layout": {1: lambda w: w.to(memory_format=torch.channels_last)}},
            {"layout": {2: lambda b: b.repeat_interleave(2)[::2]}},
            {"layout": dict.fromkeys(range(3), torch.Tensor.double)},
            {"layout": {0: misaligned}},
            {"layout": {1: misaligned}},
        ],
        ids=",".join,
    )
    def test_another_form_is_another_entry(self, host: Host, form: dict[str, Any]) -> None:
        def call(form: dict[str, Any]) -> None:
            shapes = {"input": INPUT, "weight": WEIGHT, "bias": BIAS, **form}
            layout = shapes.pop("layout", {})
            some = [shape and torch.randn(shape) for shape in map(shapes.pop, NAMES)]
            some = [layout.get(i, lambda x: x)(tensor) for i, tensor in enumerate(some)]
            geometry = {"padding": 1, **shapes}
            output = fastconv.conv2d(*some, **geometry)
            torch.testing.assert_close(output, oracle.conv2d(*some, **geometry))

        for _ in range(2):
            call({})
            call(form)
        assert len(host.asked) == 2

    def test_the_alignment_of_each_tensor_counts(self, host: Host) -> None:
        """One of those that are copied does not: the other's may not be taken for it."""
        input, weight = tensors(INPUT, WEIGHT)
        fastconv.conv2d(misaligned(input), weight)
        fastconv.conv2d(input, misaligned(weight))
        assert len(host.asked) == 2

    @pytest.mark.parametrize("fuses", [False, True], ids=["forward", "fused"])
    def test_the_alignment_of_a_bias_counts(self, host: Host, fuses: bool) -> None:
        """Kernels read it in pairs of 16 bits, where plans may assume that these are aligned."""
        input, weight, bias = (tensor.bfloat16() for tensor in tensors(INPUT, WEIGHT, BIAS))
        options = {"activation": "relu"} if fuses else {}
        pairs = torch.empty(BIAS[0] + 2, dtype=bias.dtype)[2:].copy_(bias)
        for given, asked in ((bias, 1), (misaligned(bias), 2), (pairs, 2), (misaligned(bias), 2)):
            output = fastconv.conv2d(input, weight, given, **options)
            assert output.equal(fastconv.conv2d(input, weight, bias, **options))
            assert len(host.asked) == asked

    @pytest.mark.parametrize(
        ("forms", "sides"),
        [
            ((1, (1, 1), ((1, 1), (1, 1)), "same", [1, 1], (1,)), (1, 1, 1, 1)),
            ((0, (0, 0), ((0, 0), (0, 0)), "valid", [[0, 0], [0, 0]]), (0, 0, 0, 0)),
            (((1, 2), ((1, 1), (2, 2))), (1, 1, 2, 2)),
        ],
    )
    def test_forms_of_padding(self, host: Host, forms: tuple[Any, ...], sides: Any) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        for padding in forms:  # those that only Python knows do not get here
            fastconv.conv2d(input, weight, padding=padding)
        ((*_, padding, _, _, _),) = host.asked
        assert tuple(padding) == sides

    @pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (4, 4)])
    def test_same_padding_is_that_of_the_kernel(self, host: Host, kernel: Any) -> None:
        input, weight = tensors(INPUT, (6, 4, *kernel))
        for dilation in (1, 2):
            output = fastconv.conv2d(input, weight, padding="same", dilation=dilation)
            expected = F.conv2d(input, weight, padding="same", dilation=dilation)
            torch.testing.assert_close(output, expected)

    @pytest.mark.usefixtures("_pytorch_setting")
    def test_precision(self, host: Host) -> None:
        """PyTorch's setting at the time of the call, unless ours says otherwise."""
        some = tensors(INPUT, WEIGHT)

        def asked(**options: Any) -> list[str]:
            host.asked.clear()
            fastconv.conv2d(*some, **options)
            return [precision for *_, precision in host.asked]

        cudnn.allow_tf32 = False
        assert asked() == ["ieee"]
        cudnn.allow_tf32 = True
        assert asked() == ["tf32"]
        assert asked() == asked(precision="ieee") == []
        cudnn.allow_tf32 = False
        with fastconv.precision("tf32"):
            assert asked() == []
        some = [tensor.double() for tensor in some]
        assert asked() == ["ieee"]
        cudnn.allow_tf32 = True
        assert asked() == [], "of other types there is but one"

    @pytest.mark.usefixtures("_pytorch_setting")
    def test_precision_is_read_as_in_python(self, host: Host) -> None:
        """Whichever of PyTorch's settings was written last, and whichever inherits it."""

        def check(width: int) -> None:
            fastconv.conv2d(*tensors((1, 1, 1, width), (1, 1, 1, 1)))
            *_, precision = host.asked[-1]
            assert precision == _precision.pytorch_setting()

        width = itertools.count(1)
        for apply, _ in [*SETTINGS.values()] * 2:
            apply()
            check(next(width))
        if hasattr(cudnn, "conv"):
            owners = (torch.backends, cudnn, cudnn.conv)
            for values in itertools.product(("none", "ieee", "tf32"), repeat=3):
                for owner, value in zip(owners, values, strict=True):
                    owner.fp32_precision = value
                check(next(width))
        assert len(host.asked) == next(width) - 1

    def test_more_forms_than_are_kept(self, host: Host) -> None:
        host.answer = lambda operator, input, *_: Entry((1, 1, 1, input.shape[3]), False, 0)
        weight, forms = torch.ones(1, 1, 1, 1), 4096
        inputs = [torch.empty(1, 1, 1, 1).expand(1, 1, 1, size + 1) for size in range(forms)]
        for _ in range(2):
            for input in inputs:
                assert fastconv.conv2d(input, weight).shape == input.shape
        assert len(host.asked) == forms
        fastconv.conv2d(torch.empty(2, 1, 1, 1), weight)  # one too many: all are dropped
        assert fastconv.conv2d(inputs[7], weight).shape == inputs[7].shape
        assert len(host.asked) == forms + 2

    def test_threads(self, host: Host) -> None:
        """Sixteen, each with all forms in an order of its own."""
        weight = torch.randn(2, 3, 3, 3)
        inputs = [torch.randn(1, 3, h, w) for h in range(3, 9) for w in range(3, 9)]
        expected = [F.conv2d(input, weight, padding=1) for input in inputs]
        together, wrong = threading.Barrier(16), []

        def work(number: int) -> None:
            together.wait()
            for i in range(4 * len(inputs)):
                i = (i * 5 + number * 7) % len(inputs)
                output = fastconv.conv2d(inputs[i], weight, padding=1)
                if not torch.allclose(output, expected[i], atol=1e-5):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(host.filled) == 16 * 4 * len(inputs)
        before = len(host.asked)
        for input in inputs:
            fastconv.conv2d(input, weight, padding=1)
        assert len(host.asked) == before

    def test_an_error_is_not_kept(self, host: Host) -> None:
        class Special(Exception):
            pass

        def answer(*_: Any) -> Entry:
            raise Special("words")

        host.answer = answer
        some = tensors(INPUT, WEIGHT)
        for count in (1, 2, 3):
            with pytest.raises(Special, match=r"^words$"):
                fastconv.conv2d(*some)
            assert len(host.asked) == count
        host.answer = host._real
        torch.testing.assert_close(fastconv.conv2d(*some), F.conv2d(*some))

    def test_the_operator_s_own_error(self, host: Host) -> None:
        input, weight = tensors(INPUT, (6, 5, 3, 3))
        with pytest.raises(RuntimeError, match="channels") as ours:
            fastconv.conv2d(input, weight)
        native.conv2d = None  # the fixture's patch is undone all the same
        with pytest.raises(RuntimeError) as pythons:
            fastconv.conv2d(input, weight)
        assert str(ours.value) == str(pythons.value)


def fused(host: Host, *some: Any, **options: Any) -> Tensor:
    """A call with an epilogue, which has to go by the library."""
    before = len(host.filled)
    output = fastconv.conv2d(*some, **options)
    assert host.filled[before:] == ["fused"]
    return output


class TestEpilogues:
    def test_every_activation_is_known(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, BIAS)
        for name in ACTIVATIONS:
            fused(host, *some, activation=name)
        slopes = dict.fromkeys(ACTIVATIONS, 0.0) | {"leaky_relu": 0.01}
        assert {activation: slope for *_, activation, slope in host.asked} == slopes
        assert host.operators == ["fused"] * len(ACTIVATIONS)

    def test_the_same_form_is_prepared_once(self, host: Host) -> None:
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        for _ in range(3):
            output = fused(host, *some, activation="relu", residual=residual)
            close(output, F.relu(F.conv2d(*some) + residual))
        ((_, *arguments),) = host.asked
        assert [t.data_ptr() for t in arguments[:4]] == [t.data_ptr() for t in (*some, residual)]
        assert arguments[4:] == [[1, 1], [0, 0, 0, 0], [1, 1], 1, arguments[8], "relu", 0.0]

    @pytest.mark.parametrize(
        "change",
        [
            {"activation": "silu"},
            {"activation": None},
            {"activation": ("leaky_relu", 0.2)},
            {"residual": None},
            {"residual": lambda r: r.to(memory_format=torch.channels_last)},
            {"residual": lambda r: r.repeat_interleave(2, 3)[..., ::2]},
            {"residual": misaligned},
        ],
        ids=str,
    )
    def test_another_epilogue_is_another_entry(self, host: Host, change: dict[str, Any]) -> None:
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        first = {"activation": ("leaky_relu", 0.1), "residual": residual}
        second = first | change
        if callable(second["residual"]):
            second["residual"] = second["residual"](residual)
        for options in (first, second, first, second):
            fused(host, *some, **options)
        assert len(host.asked) == 2

    def test_calls_without_one_are_as_ever(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, BIAS)
        fused(host, *some, activation="identity")
        fastconv.conv2d(*some, activation=None, residual=None)
        assert host.operators == ["fused", "forward"]

    @pytest.mark.parametrize("which", range(4))
    def test_recorded(self, host: Host, which: int) -> None:
        """Made of a convolution that is recorded here, and PyTorch's functions."""
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        (*some, residual)[which].requires_grad_()
        output = fastconv.conv2d(*some, activation="silu", residual=residual)
        close(output, F.silu(F.conv2d(*some) + residual))
        assert output.requires_grad
        assert host.filled == ["forward"]
        with torch.no_grad():
            close(fused(host, *some, activation="silu", residual=residual), output)

    def test_a_tangent(self, host: Host) -> None:
        input, weight, residual = tensors(INPUT, WEIGHT, (2, 6, 4, 3))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(residual, torch.ones_like(residual))
            output = fastconv.conv2d(input, weight, activation="relu", residual=dual)
            tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
        assert tangent.equal((F.conv2d(input, weight) + residual > 0).float())
        assert "fused" not in host.filled

    def test_autocast(self, host: Host) -> None:
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = fused(host, *some, activation="relu", residual=residual)
        assert output.dtype == torch.bfloat16
        assert {t.dtype for t in host.asked[0][1:5]} == {torch.bfloat16}

    @pytest.mark.parametrize(
        "options",
        [
            {"activation": "swish"},
            {"activation": ("relu", 0.5)},
            {"activation": ("leaky_relu", float("nan"))},
            {"residual": torch.zeros(2, 6, 4, 4)},
            {"residual": torch.zeros(6, 4, 3)},
            {"residual": torch.zeros(2, 6, 4, 3).double()},
        ],
        ids=str,
    )
    def test_errors_are_pythons(self, host: Host, options: dict[str, Any]) -> None:
        some = tensors(INPUT, WEIGHT)
        with pytest.raises((RuntimeError, ValueError)) as ours:
            fastconv.conv2d(*some, **options)
        native.conv2d = None  # the fixture's patch is undone all the same
        with pytest.raises(type(ours.value)) as pythons:
            fastconv.conv2d(*some, **options)
        assert str(ours.value) == str(pythons.value)


SUBSETS = [which for n in (1, 2, 3) for which in itertools.combinations(range(3), n)]


class TestGradients:
    """Only those asked for are computed: not those that could be, as in Python."""

    def _expected(self, wanted: tuple[int, ...]) -> list[str]:
        both = {0: "input_grad", 1: "weight_grad"}  # the bias's comes with the weight's, or a sum
        return [name for index, name in both.items() if index in wanted]

    @pytest.mark.parametrize("how", ["grad", "inputs", "only leaves", "not leaves"])
    @pytest.mark.parametrize("wanted", SUBSETS, ids=str)
    def test_passes(self, host: Host, wanted: tuple[int, ...], how: str) -> None:
        def gradients(function: Callable[..., Tensor]) -> list[Tensor | None]:
            torch.manual_seed(0)
            some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
            if how == "only leaves":
                some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(some)]
            elif how == "not leaves":
                some = [t * 1 for t in some]
            chosen, loss = [some[i] for i in wanted], function(*some).square().sum()
            if how in ("grad", "not leaves"):
                return [*torch.autograd.grad(loss, chosen)]
            loss.backward(inputs=chosen if how == "inputs" else None)
            return [t.grad for t in some]

        close(gradients(fastconv.conv2d), gradients(F.conv2d))
        assert host.operators == host.filled == ["forward", *self._expected(wanted)]

    @pytest.mark.parametrize("wanted", SUBSETS, ids=str)
    def test_recorded(self, host: Host, wanted: tuple[int, ...]) -> None:
        """Gradients of gradients are those of the operators, which the dispatcher has to see."""

        def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
            torch.manual_seed(0)
            some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
            loss = function(*some).square().sum()
            found = torch.autograd.grad(loss, [some[i] for i in wanted], create_graph=True)
            if function is fastconv.conv2d:
                assert host.filled == ["forward"]
            return [*found, *torch.autograd.grad(sum(t.square().sum() for t in found), some)]

        close(gradients(fastconv.conv2d), gradients(F.conv2d))

    def test_retained_graph(self, host: Host) -> None:
        """What is asked for may change from one pass to the next."""
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        output = fastconv.conv2d(*some).sum()
        for wanted in SUBSETS:
            host.filled.clear()
            torch.autograd.grad(output, [some[i] for i in wanted], retain_graph=True)
            assert host.filled == self._expected(wanted), wanted


# A driver that has Python do it.
DRIVER = """
int (*on_launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                 void**, void**);
int (*on_replace)(void*, void*);
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned bytes, void* stream, void** arguments, void** extra) {
  return on_launch(f, x, y, z, a, b, c, bytes, stream, arguments, extra);
}
struct attribute { int id, pad; union { char all[64]; int allowed; void* aligned; } value; };
struct config {
  unsigned x, y, z, a, b, c, bytes;
  void* stream;
  struct attribute* attributes;
  unsigned count;
};
int early;
int cuLaunchKernelEx(const struct config* o, void* f, void** arguments, void** extra) {
  if (o->count != 1 || o->attributes->id != 6 || o->attributes->value.allowed != 1) return 1;
  early = 1;
  int status =
      on_launch(f, o->x, o->y, o->z, o->a, o->b, o->c, o->bytes, o->stream, arguments, extra);
  early = 0;
  return status;
}
int cuTensorMapReplaceAddress(void* map, void* address) { return on_replace(map, address); }
int captured;
int cuStreamIsCapturing(void* stream, int* status) {
  *status = captured;
  return 0;
}
"""
ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
ON_REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LIBCUDA = "libcuda.so.1"


def loaded_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBCUDA, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


class Driver:
    """Notes launches, and has what tests tell it to for a status."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.signatures: dict[int, str] = {}  # of functions, by handle
        self.launched: list[tuple[Any, ...]] = []
        self.early: list[bool] = []  # of each launch
        self._early = ctypes.c_int.in_dll(library, "early")
        self.replaced: list[int] = []
        self.launch_statuses: list[int] = []
        self.replace_statuses: list[int] = []
        self.captured = ctypes.c_int.in_dll(library, "captured")
        self.captured.value = 0
        self._callbacks = (ON_LAUNCH(self._launch), ON_REPLACE(self._replace))  # kept alive
        for name, function in zip(("on_launch", "on_replace"), self._callbacks, strict=True):
            address = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.in_dll(library, name).value = address

    def _launch(self, function: int, *rest: Any) -> int:
        *configuration, arguments, extra = rest
        assert extra is None
        values = [
            self._read(kind, arguments[i]) for i, kind in enumerate(self.signatures[function])
        ]
        self.launched.append((function, *configuration, values))
        self.early.append(bool(self._early.value))
        return self.launch_statuses.pop(0) if self.launch_statuses else 0

    def _read(self, kind: str, address: int) -> Any:
        if kind == "m":
            return address % 64, ctypes.string_at(address, 128)
        return {"p": ctypes.c_uint64, "i": ctypes.c_int32}[kind].from_address(address).value

    def _replace(self, map: int, address: int | None) -> int:
        status = self.replace_statuses.pop(0) if self.replace_statuses else 0
        self.replaced.append(address or 0)
        if not status:
            ctypes.c_uint64.from_address(map).value = address or 0
        return status


@pytest.fixture(scope="module")
def _driver_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    if loaded_driver() is not None:
        pytest.skip("the real driver is loaded")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    soname = f"-Wl,-soname,{LIBCUDA}"
    command = ["cc", "-shared", "-fPIC", soname, "driver.c", "-o", LIBCUDA]
    subprocess.check_call(command, cwd=folder)
    yield ctypes.CDLL(str(folder / LIBCUDA))
    # Each copy of the library has opened it, too: nobody else shall find it.
    while (still := loaded_driver()) is not None:
        for _ in range(2):
            _ctypes.dlclose(still._handle)


@pytest.fixture
def driver(_driver_library: ctypes.CDLL) -> Driver:
    return Driver(_driver_library)


class Trouble(Exception):
    pass


class Launching:
    """By Entries of the tests' own; tensors of a CPU have the null stream."""

    TENSORS = tuple(("tensor", i) for i in range(6))

    def _answer(
        self, host: Host, driver: Driver, *arguments: Any, early: Sequence[int] = (), **fields: Any
    ) -> list[Any]:
        """Has calls launch functions 0xF0, 0xF1, ... with these arguments; notes the trouble.

        ``early`` are the numbers of those that are.
        """
        troubles: list[Any] = []
        launches = []
        for number, some in enumerate(arguments):
            size = ((5, 6, 7 + number), 128, 1024 * number)
            launches.append((0xF0 + number, *size, number in early, some))
            kinds = {"tensor": "p", "int": "i", "map": "m"}
            driver.signatures[0xF0 + number] = "".join(kinds[kind] for kind, *_ in some)

        def trouble(*what: Any) -> None:
            troubles.append(what)
            status, again = what[-2:]
            if status != 201 or again:
                raise Trouble(f"status {status}")

        def answer(operator: str, first: Tensor, second: Tensor, *rest: Any) -> Entry:
            shape = entries.make_entry(operator, first, second, *rest).shape
            elements = first.shape[1] if operator == "weight_grad" and rest[-2] else 0
            form = {"channels_last": False, **fields}
            return Entry(shape, bias_elements=elements, launches=launches, trouble=trouble, **form)

        host.answer = answer
        return troubles


class TestLaunching(Launching):
    @pytest.mark.parametrize("early", [(), (0,), (1,), (0, 1)], ids=str)
    def test_every_field(self, host: Host, driver: Driver, early: tuple[int, ...]) -> None:
        integers = tuple(("int", value) for value in (-1, 0, 2**31 - 1, -(2**31)))
        self._answer(
            host, driver, self.TENSORS + integers, (*integers, *self.TENSORS[::-1]),
            scratch_bytes=100, early=early,
        )  # fmt: skip
        some = tensors(INPUT, WEIGHT, BIAS)
        output = fastconv.conv2d(*some)
        first, second = driver.launched
        *addresses, scratch = first[-1][:6]
        assert first[:-1] == (0xF0, 5, 6, 7, 128, 1, 1, 0, None)
        assert second[:-1] == (0xF1, 5, 6, 8, 128, 1, 1, 1024, None)
        assert addresses == [*(t.data_ptr() for t in some), 0, output.data_ptr()]
        assert scratch not in addresses
        values = [-1, 0, 2**31 - 1, -(2**31)]
        assert first[-1][6:] == values
        assert second[-1] == [*values, scratch, *addresses[::-1]]
        assert driver.early == [number in early for number in range(2)]

    def test_absent_tensors(self, host: Host, driver: Driver) -> None:
        self._answer(host, driver, self.TENSORS)
        input, weight = tensors(INPUT, WEIGHT)
        output = fastconv.conv2d(input, weight)
        addresses = [t.data_ptr() for t in (input, weight, output)]
        assert driver.launched[0][-1] == [*addresses[:2], 0, 0, addresses[2], 0]

    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    def test_backward(self, host: Host, driver: Driver, bias: bool) -> None:
        self._answer(host, driver, self.TENSORS, scratch_bytes=64)
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)[: 2 + bias]
        output = fastconv.conv2d(*some)
        grad_output = torch.randn_like(output)
        input, weight = (t.data_ptr() for t in some[:2])
        gradients = torch.autograd.grad(output, some, grad_output)
        found = [gradient.data_ptr() for gradient in gradients] + [0] * (not bias)
        above = grad_output.data_ptr()
        of_input, of_weight = (values for *_, values in driver.launched[1:])
        assert of_input[:5] == [above, weight, 0, 0, found[0]]
        assert of_weight[:4] == [above, input, found[1], found[2]]
        assert [gradient.shape for gradient in gradients] == [t.shape for t in some]
        assert 0 not in (of_input[5], of_weight[4])

    @pytest.mark.parametrize(
        "copied", [(False, False), (False, True), (True, False), (True, True)], ids=str
    )
    def test_copies(self, host: Host, driver: Driver, copied: tuple[bool, bool]) -> None:
        self._answer(host, driver, self.TENSORS[:3], copied=copied)
        input, weight, bias = tensors((2, 4, 6, 10), WEIGHT, (12,))
        some = (input[..., ::2], weight.transpose(2, 3), bias[::2])
        tensor = iter(some)

        def read(kind: str, address: int) -> Any:
            """The values that a kernel would find if it took the tensor for contiguous."""
            values = ctypes.POINTER(ctypes.c_float).from_address(address)
            return values[: next(tensor).numel()]

        driver._read = read  # type: ignore[method-assign]
        fastconv.conv2d(*some)
        contiguous = [tensor.flatten().tolist() for tensor in some]
        (*_, values) = driver.launched[0]
        assert [a == b for a, b in zip(values, contiguous, strict=True)] == [*copied, True]

    @pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels last"])
    def test_residual(self, host: Host, driver: Driver, channels_last: bool) -> None:
        """It lies in memory as the output does, or is copied."""
        self._answer(host, driver, self.TENSORS[3:5], channels_last=channels_last)
        *some, residual = tensors(INPUT, WEIGHT, BIAS, (2, 6, 4, 3))
        stored = residual.permute(0, 2, 3, 1) if channels_last else residual

        def read(kind: str, address: int) -> Any:
            values = ctypes.POINTER(ctypes.c_float).from_address(address)
            return ctypes.c_uint64.from_address(address).value, values[: residual.numel()]

        driver._read = read  # type: ignore[method-assign]
        last = residual.to(memory_format=torch.channels_last)
        apart = residual.repeat_interleave(2, 2)[:, :, ::2]
        for given, as_it_is in ((residual, not channels_last), (last, channels_last), (apart, 0)):
            output = fastconv.conv2d(*some, activation="relu", residual=given)
            *_, ((address, values), (to, _)) = driver.launched[-1]
            assert to == output.data_ptr() != address
            assert values == stored.flatten().tolist()
            assert (address == given.data_ptr()) == as_it_is

    def test_maps(self, host: Host, driver: Driver) -> None:
        """Several among other arguments, in several launches."""
        one, two = bytes(range(128)), bytes(reversed(range(128)))
        arguments = (("map", one, 0), ("int", 7), ("map", two, 1), ("tensor", 2), ("map", one, 4))
        self._answer(host, driver, arguments, (("map", two, 0),))
        for _ in range(2):
            driver.launched.clear()
            input, weight, bias = some = tensors(INPUT, WEIGHT, BIAS)
            output = fastconv.conv2d(*some)

            def map_of(template: bytes, tensor: Tensor) -> tuple[int, bytes]:
                return 0, tensor.data_ptr().to_bytes(8, sys.byteorder) + template[8:]

            assert [values for *_, values in driver.launched] == [
                [map_of(one, input), 7, map_of(two, weight), bias.data_ptr(), map_of(one, output)],
                [map_of(two, input)],
            ]

    def test_a_thread_without_a_context(self, host: Host, driver: Driver) -> None:
        """Trouble sees to it, and what failed is done again, no more and no less."""
        troubles = self._answer(host, driver, (("int", 1),), (("int", 2), ("map", bytes(128), 0)))
        some = tensors(INPUT, WEIGHT)
        driver.launch_statuses = [0, 201]
        fastconv.conv2d(*some)
        assert troubles == [(1, -1, 0, 201, False)]
        assert [values[0] for *_, values in driver.launched] == [1, 2, 2]
        driver.launched.clear()
        troubles.clear()
        driver.replace_statuses = [201]
        fastconv.conv2d(*some)
        assert troubles == [(1, 1, some[0].data_ptr(), 201, False)]
        assert [values[0] for *_, values in driver.launched] == [1, 2]

    @pytest.mark.parametrize("statuses", [[1], [201, 201], [201, 700]], ids=str)
    @pytest.mark.parametrize("which", ["launch", "replace"])
    @pytest.mark.parametrize("direction", ["forward", "backward", "grad"])
    def test_errors(
        self, host: Host, driver: Driver, statuses: list[int], which: str, direction: str
    ) -> None:
        troubles = self._answer(host, driver, (("tensor", 0), ("map", bytes(128), 1)))
        input, weight = some = tensors(INPUT, WEIGHT, requires_grad=True)
        output = fastconv.conv2d(*some).sum()
        getattr(driver, f"{which}_statuses")[:] = statuses
        call = {
            "forward": lambda: fastconv.conv2d(*some),
            "backward": lambda: output.backward(retain_graph=True),
            "grad": lambda: torch.autograd.grad(output, input, retain_graph=True),
        }[direction]
        with pytest.raises(Trouble, match=f"^status {statuses[-1]}$"):
            call()
        mapped = (1, weight.data_ptr()) if which == "replace" else (-1, 0)
        expected = [(0, *mapped, status, i > 0) for i, status in enumerate(statuses)]
        assert troubles == expected
        call()  # nothing is left of it


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(fastconv.Conv2d(4, 6, 3), nn.ReLU(), fastconv.Conv2d(6, 2, 1, bias=False))


def trained(net: nn.Module, step: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    step(net, torch.ones(INPUT)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


class TestFrozenWeights(Launching):
    """The first launch packs the weight into the workspace, the second reads it there."""

    @pytest.fixture(autouse=True)
    def _packing(self, host: Host, driver: Driver) -> Iterator[None]:
        weight, scratch = self.TENSORS[1], self.TENSORS[5]
        self._answer(host, driver, (weight, scratch), (scratch,), packs=1, scratch_bytes=256)
        self.driver = driver
        self.where: dict[int, int] = {}
        yield
        host.module.freeze(False)

    def _packs(self, *some: Tensor) -> bool:
        """Whether a call does, having checked that what is read is what was packed last."""
        self.driver.launched.clear()
        fastconv.conv2d(*some)
        *packed, (*_, (read,)) = self.driver.launched
        if packed:
            address, self.where[some[1].data_ptr()] = packed[0][-1]
            assert address == some[1].data_ptr()
        assert read == self.where[some[1].data_ptr()]
        return bool(packed)

    def test_within_and_without(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT)
        assert [self._packs(*some) for _ in range(2)] == [True, True]
        for _ in range(2):
            host.module.freeze(True)
            assert [self._packs(*some) for _ in range(3)] == [True, False, False]
            host.module.freeze(False)
            assert self._packs(*some)

    def test_changes_of_the_weight(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        for change in (lambda: None, weight.neg_, lambda: weight[0].zero_()):
            change()
            assert [self._packs(input, weight) for _ in range(2)] == [True, False]
        assert not self._packs(input + 1, weight)
        assert self._packs(input, weight.clone())
        assert not self._packs(input, weight)

    def test_version_counters_are_silent_about_data(self, host: Host) -> None:
        """Why this is not done without being asked for."""
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        assert self._packs(input, weight)
        weight.data.neg_()
        assert not self._packs(input, weight)

    def test_another_weight_at_the_same_address(self, host: Host) -> None:
        host.module.freeze(True)
        input, weight = tensors(INPUT, WEIGHT)
        memory = weight.clone().numpy()  # what PyTorch does not know that tensors share
        for _ in range(3):
            assert self._packs(input, torch.from_numpy(memory))

    def test_not_what_is_recorded_captured_or_copied(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        assert [self._packs(input, weight) for _ in range(2)] == [True, False]
        recorded = weight.detach().requires_grad_()
        assert [self._packs(input, recorded) for _ in range(2)] == [True, True]
        self.driver.captured.value = 1
        assert [self._packs(input, weight) for _ in range(2)] == [True, True]
        self.driver.captured.value = 0

    def test_a_failed_launch_leaves_nothing(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT)
        host.module.freeze(True)
        self.driver.launch_statuses = [0, 1]
        with pytest.raises(Trouble):
            fastconv.conv2d(*some)
        assert [self._packs(*some) for _ in range(2)] == [True, False]

    def test_contexts(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_module", host.module)
        some = tensors(INPUT, WEIGHT)
        with fastconv.frozen_weights():
            assert self._packs(*some)
            with fastconv.frozen_weights():
                assert not self._packs(*some)
            assert not self._packs(*some)
        assert self._packs(*some)


class TestBypass:
    """The table has no place for the plans of another switch: all goes by Python meanwhile."""

    def test_forward_and_backward(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_module", host.module)
        input, weight = tensors(INPUT, WEIGHT, requires_grad=True)
        expected = fastconv.conv2d(input, weight)
        gradients = torch.autograd.grad(expected.sum(), (input, weight))
        recorded = fastconv.conv2d(input, weight)
        count = len(host.filled)
        with planner.only("direct"):
            with planner.only("hopper"):
                close(fastconv.conv2d(input, weight), expected)
            close(fastconv.conv2d(input, weight), expected)
            close(torch.autograd.grad(recorded.sum(), (input, weight)), gradients)
        assert len(host.filled) == count
        fastconv.conv2d(input, weight).sum().backward()
        assert host.filled[count:] == ["forward", "input_grad", "weight_grad"]

    def test_a_library_that_is_loaded_within(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[bool] = []
        monkeypatch.setattr(build, "load", lambda: mock.Mock(bypass=told.append))
        monkeypatch.setattr(native, "_module", None)
        with planner.only("direct"):
            native.load.__wrapped__()
        assert told == [True, False]


class TestPyTorch:
    """What stands around a call sees it as it sees one of PyTorch's."""

    def test_autocast_sees_a_change_within_a_region(self, host: Host) -> None:
        """PyTorch's own operators keep a leaf's cast until its end; ours do not, by either path."""
        input, weight, bias = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            before = fastconv.conv2d(input, weight, bias)
            weight.neg_()
            bias.neg_()
            after = fastconv.conv2d(input, weight, bias)
        assert before.dtype == torch.bfloat16
        assert torch.equal(after, -before)
        assert host.filled == ["forward"] * 2

    def test_profiler(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, requires_grad=True)
        with torch.profiler.profile() as profile:
            fastconv.conv2d(*some).sum().backward()
        names = {event.key for event in profile.key_averages()}
        assert {"fastconv::forward", "fastconv::input_grad", "fastconv::weight_grad"} <= names
        assert host.asked == []

    def test_compile(self, host: Host) -> None:
        seen: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        compiled = torch.compile(net(), fullgraph=True, backend=backend)
        input = torch.ones(INPUT)
        close(compiled(input), net()(input))
        assert any("fastconv.forward" in name for name in seen)
        eager = trained(net(), lambda net, x: net(x))
        step = torch.compile(fullgraph=True, backend="aot_eager")
        close(trained(net(), lambda net, x: step(net)(x)), eager)

    def test_compiled_autograd(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._dynamo import compiled_autograd

        def gradients() -> list[Tensor]:
            torch.compiler.reset()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                return trained(net(), lambda net, x: net(x))

        expected = trained(net(), lambda net, x: net(x))
        close(gradients(), expected)
        assert "input_grad" in host.operators
        monkeypatch.setattr(native, "conv2d", None)
        close(gradients(), expected)

    def test_hooks(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        output = fastconv.conv2d(*some)
        output.retain_grad()
        seen: list[str] = []
        output.register_hook(lambda grad: seen.append("tensor") or grad * 2)
        node = output.grad_fn
        node.register_prehook(lambda grads: seen.append("before"))
        node.register_hook(lambda *_: seen.append("after"))
        some[1].register_post_accumulate_grad_hook(lambda _: seen.append("leaf"))
        output.sum().backward()
        assert seen == ["tensor", "before", "after", "leaf"]
        assert output.grad.eq(2).all()
        assert some[2].grad.eq(2 * output.numel() / 6).all()

    def test_anomaly_mode(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT, requires_grad=True)
        with pytest.warns(UserWarning, match="Anomaly Detection"):
            anomaly = torch.autograd.detect_anomaly()
        with anomaly, noted_warnings() as words:
            output = fastconv.conv2d(input, weight)
            with pytest.raises(RuntimeError, match="'FastconvConv2dBackward' returned nan"):
                output.backward(torch.full_like(output, torch.nan))
        (warning,) = words
        assert "in test_anomaly_mode" in warning, "where forward was called"

    def test_saved_tensors_hooks(self, host: Host) -> None:
        """They may put tensors elsewhere."""
        some = tensors(INPUT, WEIGHT, requires_grad=True)
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
            output = fastconv.conv2d(*some)
        packed[1].zero_()
        input_grad, weight_grad = torch.autograd.grad(output.sum(), some)
        assert input_grad.eq(0).all()
        assert weight_grad.ne(0).any()
        assert host.filled == ["forward", "input_grad", "weight_grad"]

    def test_weight_changed_in_place(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, requires_grad=True)
        output = fastconv.conv2d(*some).sum()
        with torch.no_grad():
            some[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    def test_inference_tensors_are_not_saved(self, host: Host) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        with torch.inference_mode():
            made = input + 0
            assert fastconv.conv2d(made, weight).is_inference()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            fastconv.conv2d(made, weight.requires_grad_())
        assert not fastconv.conv2d(made, weight.detach()).requires_grad

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_of_modules(self, host: Host, duplicate: Callable[[Any], Any]) -> None:
        original, input = net(), torch.ones(INPUT)
        output = original(input)
        assert duplicate(original)(input).equal(output)

    def test_forked_process(self, host: Host) -> None:
        """As a loader of data is."""
        known, new = tensors(INPUT, WEIGHT), tensors((1, 4, 9, 9), WEIGHT)
        expected = [F.conv2d(*known), F.conv2d(*new)]  # PyTorch's hangs in the child
        fastconv.conv2d(*known)

        def work() -> None:
            close([fastconv.conv2d(*known), fastconv.conv2d(*new)], expected)
            assert len(host.asked) == 2

        in_child(work)
