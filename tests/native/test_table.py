"""The native host path's table: which calls share an entry, and what an entry is asked for."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
import oracle
from fastconv import _precision, native
from fastconv.ops.entries import Entry
from fastconv.problem import ACTIVATIONS
from native.helpers import BIAS, INPUT, WEIGHT, Host, check_works, close, misaligned, tensors
from test_precision import SETTINGS, _pytorch_setting, cudnn  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")


NAMES = ("input", "weight", "bias")


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
        """An entry for a misaligned input does not serve a misaligned weight."""
        input, weight = tensors(INPUT, WEIGHT)
        fastconv.conv2d(misaligned(input), weight)
        fastconv.conv2d(input, misaligned(weight))
        assert len(host.asked) == 2

    @pytest.mark.parametrize("fuses", [False, True], ids=["forward", "fused"])
    def test_the_alignment_of_a_bias_counts(self, host: Host, fuses: bool) -> None:
        """Where plans may assume that a bias is aligned, kernels read it in pairs of 16 bits."""
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
        for padding in forms:
            fastconv.conv2d(input, weight, padding=padding)
        assert host.filled == ["forward"] * len(forms)
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
        """A call uses PyTorch's setting at its time, unless fastconv's says otherwise."""
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
        """The library reads PyTorch's settings, in any order and inherited, as Python does."""

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
        fastconv.conv2d(torch.empty(2, 1, 1, 1), weight)  # One entry too many: all are dropped.
        assert fastconv.conv2d(inputs[7], weight).shape == inputs[7].shape
        assert len(host.asked) == forms + 2

    def test_threads(self, host: Host) -> None:
        """Sixteen threads each call all forms in an order of their own."""
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
        native.conv2d = None  # The fixture restores it.
        with pytest.raises(RuntimeError) as pythons:
            fastconv.conv2d(input, weight)
        assert str(ours.value) == str(pythons.value)


def fused(host: Host, *some: Any, **options: Any) -> Tensor:
    """A call with an epilogue, which has to run in the library."""
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
        """Recorded calls are a convolution in the library, and PyTorch's functions."""
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
        native.conv2d = None  # The fixture restores it.
        with pytest.raises(type(ours.value)) as pythons:
            fastconv.conv2d(*some, **options)
        assert str(ours.value) == str(pythons.value)
