"""Calls on the native host path: their gradients, and how PyTorch's tools see them.

Calls run a copy of the library, with a table of its own. Other files test that it computes what
Python computes: they run with both host paths (``host_path``).
"""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from fastconv import native
from fastconv.kernels import planner
from fastconv.native import build
from native.helpers import (
    BIAS,
    INPUT,
    WEIGHT,
    Host,
    close,
    in_child,
    noted_warnings,
    tensors,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

SUBSETS = [which for n in (1, 2, 3) for which in itertools.combinations(range(3), n)]


class TestGradients:
    """Only the gradients that a backward pass asks for are computed, as in Python."""

    def _expected(self, wanted: tuple[int, ...]) -> list[str]:
        # The gradient of the bias comes with that of the weight, or is a sum.
        both = {0: "input_grad", 1: "weight_grad"}
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
        """Second derivatives are those of the operators, which the dispatcher has to see."""

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
        """Each backward pass may ask for other gradients."""
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        output = fastconv.conv2d(*some).sum()
        for wanted in SUBSETS:
            host.filled.clear()
            torch.autograd.grad(output, [some[i] for i in wanted], retain_graph=True)
            assert host.filled == self._expected(wanted), wanted


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(fastconv.Conv2d(4, 6, 3), nn.ReLU(), fastconv.Conv2d(6, 2, 1, bias=False))


def trained(net: nn.Module, step: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    step(net, torch.ones(INPUT)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


class TestBypass:
    """Inside ``planner.only``, whose plans the table cannot hold, all calls run in Python."""

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
    """PyTorch's tools see a call as they see one of PyTorch's functions."""

    def test_autocast_sees_a_change_within_a_region(self, host: Host) -> None:
        """PyTorch's operators keep a leaf's cast until the region ends; ours do not."""
        input, weight, bias = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            before = fastconv.conv2d(input, weight, bias)
            weight.neg_()
            bias.neg_()
            after = fastconv.conv2d(input, weight, bias)
        assert before.dtype == torch.bfloat16
        assert torch.equal(after, -before)
        assert host.filled == ["forward"] * 2

    @pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "not leaves"])
    def test_autocast_records_no_cast(self, host: Host, leaves: bool) -> None:
        """The engine casts gradients back: hooks, ``grad`` and second derivatives see float32."""

        def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
            torch.manual_seed(0)
            some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
            given = some if leaves else [one * 1 for one in some]
            hooked: list[torch.dtype] = []
            for one in given:
                one.register_hook(lambda grad: hooked.append(grad.dtype))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = function(*given)
            if function is fastconv.conv2d:
                nodes = [node for node, _ in output.grad_fn.next_functions]
                assert nodes == [torch.autograd.graph.get_gradient_edge(t).node for t in given]
            loss = output.float().square().sum()
            first = torch.autograd.grad(loss, given, retain_graph=True)
            twice = torch.autograd.grad(loss, given, create_graph=True)
            second = torch.autograd.grad(sum(one.square().sum() for one in twice), some)
            assert {one.dtype for one in (*first, *second)} == {*hooked} == {torch.float32}
            return [*first, *second]

        for found, expected in zip(gradients(fastconv.conv2d), gradients(F.conv2d), strict=True):
            assert (found - expected).norm() <= 0.02 * expected.norm()

    def test_a_weight_may_change_behind_its_cast(self, host: Host) -> None:
        """As in PyTorch, the backward pass of a call under autocast reads the casts it made."""

        def gradient(function: Callable[..., Tensor]) -> Tensor:
            torch.manual_seed(0)
            input, weight = tensors(INPUT, WEIGHT, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = function(input, weight)
            with torch.no_grad():
                weight.neg_()
            return torch.autograd.grad(output.float().square().sum(), input)[0]

        found, expected = gradient(fastconv.conv2d), gradient(F.conv2d)
        assert (found - expected).norm() <= 0.02 * expected.norm()

    def test_profiler(self, host: Host) -> None:
        some = tensors(INPUT, WEIGHT, requires_grad=True)
        with torch.profiler.profile() as profile:
            fastconv.conv2d(*some).sum().backward()
        names = {event.key for event in profile.key_averages()}
        assert {"fastconv::forward", "fastconv::backward"} <= names
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
        """Such hooks may store tensors elsewhere."""
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
        """Data loaders fork processes."""
        known, new = tensors(INPUT, WEIGHT), tensors((1, 4, 9, 9), WEIGHT)
        expected = [F.conv2d(*known), F.conv2d(*new)]  # PyTorch's convolution hangs in the child.
        fastconv.conv2d(*known)

        def work() -> None:
            close([fastconv.conv2d(*known), fastconv.conv2d(*new)], expected)
            assert len(host.asked) == 2

        in_child(work)
