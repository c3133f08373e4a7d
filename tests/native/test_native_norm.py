"""Batch normalization on the native host path, alone and behind a convolution.

Calls run a copy of the library, with a table of its own. ``api/test_batchnorm.py`` tests results
with both host paths.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from fastconv import native
from fastconv.batchnorm import bn_act, conv_of_bn_act
from fastconv.ops import batchnorm_schema
from fastconv.ops.entries import WITH_STATISTICS, NormEntry, make_entry
from native.driver import Driver, Trouble
from native.helpers import Host, noted_warnings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

FORWARD, BACKWARD = "batch_norm_forward", "batch_norm_backward"
SUBSETS = [which for n in (1, 2, 6) for which in itertools.combinations(range(6), n)]


def in_python() -> Any:
    """A context in which Python serves calls."""
    return mock.patch.multiple(native, conv2d=None, batch_norm_act=None, conv_bn_act=None)


class Operands:
    """Leaves for one block: input, weight, bias, residual, and weight and bias of the norm."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, last: bool = False, axes: int = 2
    ) -> None:
        torch.manual_seed(0)
        before, taps, after = ((6, 5, 4)[:axes], (3, 3, 3)[:axes], (4, 3, 2)[:axes])
        sizes = ((3, 4, *before), (6, 4, *taps), (6,), (3, 6, *after), (6,), (6,))
        self.leaves = [torch.randn(size, dtype=dtype) for size in sizes]
        if last:
            self.leaves[0] = self.leaves[0].movedim(1, -1).contiguous().movedim(-1, 1)
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.mean, self.var = torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype)

    def block(self, **options: Any) -> Tensor:
        input, weight, bias, residual, scale, shift = self.leaves
        given: dict[str, Any] = {"activation": "relu", "residual": residual, "training": True}
        return fastconv.conv_bn_act(
            input, weight, bias, self.mean, self.var, scale, shift, **{**given, **options}
        )

    def norm(self, **options: Any) -> Tensor:
        """The normalization alone; the convolution's tensors have no part in it."""
        *_, residual, scale, shift = self.leaves
        given: dict[str, Any] = {"activation": "silu", "training": True}
        return fastconv.batch_norm_act(
            residual, self.mean, self.var, scale, shift, **{**given, **options}
        )


def results(make: Callable[[Operands], Tensor], *of: Any) -> list[Tensor]:
    """The output, running statistics and all gradients of a call."""
    operands = Operands(*of)
    output = make(operands)
    grad = torch.randn(output.shape, generator=torch.manual_seed(1)).to(output.dtype)
    found = torch.autograd.grad(output, operands.leaves, grad, materialize_grads=True)
    return [output.detach(), operands.mean, operands.var, *found]


def check_same(make: Callable[[Operands], Tensor], *of: Any) -> None:
    found = results(make, *of)
    with in_python():
        expected = results(make, *of)
    for one, other in zip(found, expected, strict=True):
        # The rules that lay tensors out are the same, so strides are.
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)


BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"residual": None},
    "residual": {},
    "silu": {"activation": "silu"},
    "slope": {"activation": ("leaky_relu", -0.5)},
    "identity": {"activation": None},
    "momentum": {"momentum": 0.7, "eps": 1e-3},
    "average": {"momentum": None, "num_batches_tracked": torch.tensor(3)},
}


class TestResults:
    """They are, bit for bit, those of Python: also the gradients' memory formats."""

    @pytest.fixture(autouse=True)
    def _convolutions_by_python(self, host: Host) -> None:
        """The library's kernels for CPUs add up in another order than Python's operations."""

    @pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
    @pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
    def test_blocks(self, host: Host, options: dict[str, Any], last: bool) -> None:
        check_same(lambda operands: operands.block(**options), torch.float32, last)
        assert host.operators == ["forward", FORWARD, BACKWARD, "input_grad", "weight_grad"]

    @pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
    @pytest.mark.parametrize("axes", [1, 3])
    def test_sequences_and_volumes(self, host: Host, axes: int, last: bool) -> None:
        check_same(lambda operands: operands.block(), torch.float32, last, axes)
        check_same(lambda operands: operands.block(residual=None), torch.bfloat16, last, axes)
        others = [FORWARD, BACKWARD, "input_grad", "weight_grad"]
        assert host.operators == ["forward", *others, WITH_STATISTICS, *others]

    @pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_norms(self, host: Host, dtype: torch.dtype, training: bool) -> None:
        check_same(lambda operands: operands.norm(training=training), dtype)
        assert host.operators == [FORWARD, BACKWARD]

    @pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (2, 6, 3, 2, 2)], ids=str)
    def test_other_ranks(self, host: Host, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        for given in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
            output = fastconv.batch_norm_act(given, None, None, training=True)
            assert output.stride() == given.stride()
            with in_python():
                assert torch.equal(
                    fastconv.batch_norm_act(given, None, None, training=True), output
                )
        assert set(host.operators) == {FORWARD}

    def test_layouts_that_differ(self, host: Host) -> None:
        """Residual and gradient have other formats than x, or none."""

        def block(operands: Operands) -> Tensor:
            _, _, _, residual, *_ = operands.leaves
            last = residual.to(memory_format=torch.channels_last)
            return operands.block(residual=last, activation="silu").transpose(1, 2) * 2

        check_same(block)

        def norm(operands: Operands) -> Tensor:
            x = operands.leaves[3].transpose(2, 3)
            return fastconv.batch_norm_act(x, None, None, training=True, activation="relu")

        check_same(norm)

    @pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
    def test_autocast(self, host: Host, last: bool) -> None:
        def block(operands: Operands) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return operands.block()

        check_same(block, torch.float32, last)
        assert host.operators == [WITH_STATISTICS, FORWARD, BACKWARD, "input_grad", "weight_grad"]

        def norm(operands: Operands) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                half = operands.leaves[3].bfloat16()
                return fastconv.batch_norm_act(
                    half, None, None, residual=half.float(), training=True
                )

        check_same(norm)

    def test_modules_and_frozen_statistics(self, host: Host) -> None:
        def train() -> list[Tensor]:
            torch.manual_seed(0)
            net = nn.Sequential(*(fastconv.ConvBNAct2d(4, 4, 3, padding=1) for _ in range(3)))
            net[1].bn.eval()
            images = torch.randn(2, 4, 6, 5)
            for _ in range(2):
                net(images).square().sum().backward()
            return [*net.state_dict().values(), *(one.grad for one in net.parameters())]

        found = train()
        with in_python():
            assert all(map(torch.equal, found, train()))


class TestGradients:
    @pytest.mark.parametrize("how", ["grad", "leaves"])
    @pytest.mark.parametrize("wanted", SUBSETS, ids=str)
    def test_only_what_is_wanted(self, host: Host, wanted: tuple[int, ...], how: str) -> None:
        operands = Operands()
        whole = torch.autograd.grad(operands.block().square().sum(), operands.leaves)
        host.filled.clear()
        if how == "leaves":
            for number, leaf in enumerate(operands.leaves):
                leaf.requires_grad_(number in wanted)
        chosen = [operands.leaves[number] for number in wanted]
        found = torch.autograd.grad(operands.block().square().sum(), chosen)
        for number, one in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, whole[number])
        passes = {0: "input_grad", 1: "weight_grad"}
        expected = [name for number, name in passes.items() if number in wanted]
        assert host.filled == ["forward", FORWARD, BACKWARD, *expected]

    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_second_derivatives(self, host: Host, axes: int) -> None:
        """Through the convolution as well, whose output is computed again for that."""

        def second() -> list[Tensor]:
            operands = Operands(torch.float64, False, axes)
            loss = operands.block(activation="silu").square().sum()
            first = torch.autograd.grad(loss, operands.leaves, create_graph=True)
            total = sum(one.square().sum() for one in first)
            assert isinstance(total, Tensor)
            return [*first, *torch.autograd.grad(total, operands.leaves)]

        found = second()
        with in_python():
            torch.testing.assert_close(found, second())

    def test_retained_graph(self, host: Host) -> None:
        operands = Operands()
        loss = operands.block().sum()
        first = torch.autograd.grad(loss, operands.leaves, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, operands.leaves)))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, operands.leaves)

    @pytest.mark.parametrize("changed", [0, 1, 3, 4], ids=str)
    def test_changes_in_place(self, host: Host, changed: int) -> None:
        operands = Operands()
        loss = operands.block(activation="silu").sum()
        with torch.no_grad():
            operands.leaves[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_an_output_changed_in_place(self, host: Host) -> None:
        """With a residual, the activation's gradient is computed from the output."""
        operands = Operands()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            operands.block().mul_(2).sum().backward()
        operands.block(residual=None).mul_(2).sum().backward()

    def test_mapped(self, host: Host) -> None:
        operands = Operands()
        output = operands.block()
        grads = torch.randn(3, *output.shape)
        found = torch.autograd.grad(
            output, operands.leaves, grads, is_grads_batched=True, retain_graph=True
        )
        for number, grad in enumerate(grads):
            expected = torch.autograd.grad(output, operands.leaves, grad, retain_graph=True)
            torch.testing.assert_close([one[number] for one in found], list(expected))


class Chain:
    """Two blocks, of which the second may compute its input, the first one's output, again."""

    def __init__(self, axes: int = 2, activation: Any = "silu", conv: bool = True) -> None:
        torch.manual_seed(0)
        self.activation, self.conv = activation, conv
        size = (6, 5, 4)[:axes]
        kind = {1: fastconv.ConvBNAct1d, 2: fastconv.ConvBNAct2d, 3: fastconv.ConvBNAct3d}[axes]
        self.layers = nn.ModuleList(kind(4, 4, 3, padding=1).double() for _ in range(2))
        self.input = torch.randn(3, 4, *size, dtype=torch.float64, requires_grad=True)
        self.leaves = [self.input, *self.layers.parameters()]
        if not conv:
            del self.leaves[1]

    def first(self, residual: Tensor | None = None) -> Tensor:
        conv, bn = self.layers[0].conv, self.layers[0].bn
        if self.conv:
            return conv_of_bn_act(conv, bn, self.input, residual, self.activation)
        return bn_act(bn, self.input, residual, self.activation)

    def second(self, between: Tensor, recomputes: bool = True) -> Tensor:
        conv, bn = self.layers[1].conv, self.layers[1].bn
        return conv_of_bn_act(conv, bn, between, None, "relu", recomputes=recomputes)

    def gradients(self, recomputes: bool, order: int = 1) -> list[Tensor]:
        self.kept = None
        between = self.first()
        output = self.second(between, recomputes)
        storage = StorageWeakRef(between.untyped_storage())
        del between
        self.kept = not storage.expired()
        found = list(
            torch.autograd.grad(output.square().sum(), self.leaves, create_graph=order > 1)
        )
        if order > 1:
            total = torch.stack([one.square().sum() for one in found]).sum()
            found += torch.autograd.grad(total, self.leaves)
        return found


OUTPUT = "batch_norm_output"


class TestOutputsComputedAgain:
    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("conv", [True, False], ids=["block", "norm"])
    def test_same_bits_in_less_memory(self, host: Host, axes: int, conv: bool) -> None:
        chain = Chain(axes, "gelu", conv)
        expected = chain.gradients(False)
        assert chain.kept
        assert OUTPUT not in host.filled
        host.filled.clear()
        found = chain.gradients(True)
        assert not chain.kept
        assert host.filled.count(OUTPUT) == 1
        assert all(map(torch.equal, found, expected))

    def test_second_derivatives(self, host: Host) -> None:
        chain = Chain()
        expected = chain.gradients(False, order=2)
        host.filled.clear()
        found = chain.gradients(True, order=2)
        assert host.filled.count(OUTPUT) == 2  # the second backward pass comes by here as well
        assert not chain.kept
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_what_must_be_kept(self, host: Host) -> None:
        """A residual, a change in place, an output of another node, and a released one."""
        chain = Chain(activation="relu")
        residual = torch.randn_like(chain.input)
        for make in (
            lambda: chain.first(residual),
            lambda: chain.first().mul_(2),
            lambda: chain.first() * 2,
            lambda: chain.input,
        ):
            (expected,) = torch.autograd.grad(chain.second(make(), False).sum(), chain.input)
            (found,) = torch.autograd.grad(chain.second(make()).sum(), chain.input)
            assert torch.equal(found, expected)
        between = chain.first()
        with torch.no_grad():
            between.mul_(2)
        weight = chain.layers[1].conv.weight
        (expected,) = torch.autograd.grad(chain.second(between, False).sum(), weight)
        (found,) = torch.autograd.grad(chain.second(between).sum(), weight)
        assert torch.equal(found, expected)
        between = chain.first()
        between.sum().backward()
        torch.autograd.grad(chain.second(between).sum(), weight)
        assert OUTPUT not in host.filled

    def test_changes_in_place_are_noticed(self, host: Host) -> None:
        """Of what the output is computed from; its own change is none to what it was."""
        chain = Chain()
        weight = chain.layers[1].conv.weight
        between = chain.first()
        output = chain.second(between)
        (expected,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
        with torch.no_grad():
            between.zero_()
        assert torch.equal(
            torch.autograd.grad(output.sum(), weight, retain_graph=True)[0], expected
        )
        with torch.no_grad():
            chain.layers[0].bn.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), weight)

    def test_retained_graph(self, host: Host) -> None:
        chain = Chain()
        loss = chain.second(chain.first()).sum()
        first = torch.autograd.grad(loss, chain.leaves, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, chain.leaves)))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, chain.leaves)

    def test_an_input_whose_node_was_released(self, host: Host) -> None:
        """The second node has what it needs, as one that had kept its input."""
        chain = Chain()
        between = chain.first()
        output = chain.second(between)
        between.sum().backward()
        weight = chain.layers[1].conv.weight
        (found,) = torch.autograd.grad(output.sum(), weight)
        (expected,) = torch.autograd.grad(chain.second(chain.first(), False).sum(), weight)
        assert torch.equal(found, expected)

    def test_hooks_of_saved_tensors(self, host: Host) -> None:
        """They decide what is kept: they are asked for the input itself, and for nothing else."""
        chain = Chain()
        expected = chain.gradients(False)
        counts = []
        for recomputes in (False, True):
            seen: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one, seen=seen: seen.append(one) or one, lambda one: one
            ):
                found = chain.gradients(recomputes)
            counts.append(len(seen))
            assert all(map(torch.equal, found, expected))
        assert counts[0] == counts[1]
        with torch.autograd.graph.save_on_cpu():
            between = chain.first()
        torch.autograd.grad(chain.second(between).sum(), chain.leaves)
        assert OUTPUT not in host.filled

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, host: Host, reentrant: bool) -> None:
        chain = Chain()
        expected = chain.gradients(False)
        for both in (True, False):
            run = (lambda _: chain.second(chain.first())) if both else (lambda _: chain.first())
            between = torch.utils.checkpoint.checkpoint(run, chain.input, use_reentrant=reentrant)
            output = between if both else chain.second(between)
            chain.layers.zero_grad()
            chain.input.grad = None
            output.square().sum().backward()
            found = [leaf.grad for leaf in chain.leaves]
            assert all(one is not None for one in found)
            torch.testing.assert_close(found, expected)

    def test_compiled_autograd(self, host: Host) -> None:
        from torch._dynamo import compiled_autograd

        def gradients(compiled: bool) -> list[Tensor]:
            chain = Chain()
            output = chain.second(chain.first()).square().sum()
            context = compiled_autograd._enable(torch.compile(backend="eager"))
            with context if compiled else nullcontext():
                output.backward()
            return [leaf.grad for leaf in chain.leaves]

        torch.compiler.reset()
        torch.testing.assert_close(gradients(True), gradients(False))
        assert host.filled.count(OUTPUT) == 2

    def test_modes(self, host: Host) -> None:
        """What a mode has to see, Python computes."""
        chain = Chain()
        expected = chain.gradients(False)
        output = chain.second(chain.first()).square().sum()
        with FlopCounterMode(display=False):
            found = torch.autograd.grad(output, chain.leaves)
        torch.testing.assert_close(list(found), expected)
        assert OUTPUT not in host.filled

    def test_hooks_of_tensors_and_mapped_gradients(self, host: Host) -> None:
        chain = Chain()
        results = []
        for recomputes in (False, True):
            between = chain.first()
            between.register_hook(lambda grad: grad * 2)
            output = chain.second(between, recomputes)
            grads = torch.ones(2, *output.shape, dtype=output.dtype)
            mapped = torch.autograd.grad(
                output, chain.leaves, grads, is_grads_batched=True, retain_graph=True
            )
            between.retain_grad()
            output.sum().backward()
            results.append([*mapped, between.grad])
        torch.testing.assert_close(results[1], results[0])


class TestPyTorch:
    """PyTorch's tools see a call as they see one of PyTorch's functions."""

    def test_node(self, host: Host) -> None:
        operands = Operands()
        names = [type(output.grad_fn).__name__ for output in (operands.block(), operands.norm())]
        assert names == ["FastconvConvBNActBackward", "FastconvBatchNormBackward"]

    def test_hooks(self, host: Host) -> None:
        operands, seen = Operands(), []
        output = operands.block()
        output.register_hook(lambda grad: seen.append("tensor") or grad * 2)
        output.grad_fn.register_prehook(lambda _: seen.append("before"))
        output.grad_fn.register_hook(lambda *_: seen.append("after"))
        output.sum().backward()
        assert seen == ["tensor", "before", "after"]
        shift = operands.leaves[5].grad
        (once,) = torch.autograd.grad(operands.block().sum(), operands.leaves[5])
        assert torch.equal(shift, 2 * once)

    def test_saved_tensors_hooks(self, host: Host) -> None:
        """Such hooks may store tensors elsewhere, in any layout."""
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        def unpack(number: int) -> Tensor:
            return packed[number].repeat_interleave(2, -1)[..., ::2]

        operands = Operands(torch.float32, True)
        expected = torch.autograd.grad(operands.block().sum(), operands.leaves)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = operands.block().sum()
        assert len(packed) == 9  # as many as Python's two nodes save, and the convolution's bias
        found = torch.autograd.grad(output, operands.leaves)
        torch.testing.assert_close(found, expected)

    def test_checkpoints(self, host: Host) -> None:
        layer = fastconv.ConvBNAct2d(4, 6, 3)
        images = torch.randn(2, 4, 7, 7, requires_grad=True)
        (expected,) = torch.autograd.grad(layer(images).square().sum(), images)
        output = torch.utils.checkpoint.checkpoint(layer, images, use_reentrant=False)
        with in_python():  # a library that is loaded in between saves the same tensors
            (found,) = torch.autograd.grad(output.square().sum(), images)
        torch.testing.assert_close(found, expected)

    def test_anomaly_mode(self, host: Host) -> None:
        operands = Operands()
        with pytest.warns(UserWarning, match="Anomaly Detection"):
            anomaly = torch.autograd.detect_anomaly()
        with anomaly, noted_warnings() as words:
            output = operands.block()
            with pytest.raises(RuntimeError, match="'FastconvConvBNActBackward' returned nan"):
                output.backward(torch.full_like(output, torch.nan))
        assert "in test_anomaly_mode" in words[0], "where forward was called"

    def test_versions_count_what_is_written(self, host: Host) -> None:
        operands = Operands()
        for make in (operands.block, operands.norm):
            before = operands.mean._version, operands.var._version
            make()
            assert operands.mean._version > before[0]
            assert operands.var._version > before[1]
        before = operands.mean._version, operands.var._version
        operands.norm(training=False)
        assert (operands.mean._version, operands.var._version) == before

    def test_inference_mode(self, host: Host) -> None:
        operands = Operands()
        with torch.inference_mode():
            assert operands.block().is_inference()
            assert operands.norm(training=False).is_inference()
        with torch.no_grad():
            assert not operands.block().requires_grad
        assert set(host.operators) == {"forward", FORWARD}

    def test_profiler(self, host: Host) -> None:
        operands = Operands()
        with torch.profiler.profile() as profile:
            operands.block().sum().backward()
        names = {event.key for event in profile.key_averages()}
        expected = {"forward", FORWARD, BACKWARD, "backward"}
        assert {f"fastconv::{name}" for name in expected} <= names

    def test_compiled_autograd(self, host: Host) -> None:
        from torch._dynamo import compiled_autograd

        def gradients(compiled: bool) -> list[Tensor]:
            operands = Operands()
            context = compiled_autograd._enable(torch.compile(backend="eager"))
            with context if compiled else nullcontext():
                (operands.block() + operands.norm()).square().sum().backward()
            return [leaf.grad for leaf in operands.leaves]

        torch.compiler.reset()
        torch.testing.assert_close(gradients(True), gradients(False))

    @pytest.mark.parametrize("by", ["functional", "module"])
    def test_compile(self, host: Host, by: str) -> None:
        layer = fastconv.ConvBNAct2d(4, 6, 3)
        operands = Operands()
        call = operands.block if by == "functional" else lambda: layer(operands.leaves[0])
        expected = call()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(), expected)
        assert host.operators == ["forward", FORWARD]


class TestDeclined:
    """What the dispatcher has to see, or what is unusual, Python serves."""

    def _declines(self, host: Host, call: Callable[[], Any]) -> None:
        count = len(host.asked)
        call()
        assert FORWARD not in host.operators[count:]

    def test_transforms_and_tangents(self, host: Host) -> None:
        operands = Operands()
        x = operands.leaves[0].detach()

        def function(x: Tensor) -> Tensor:
            weight = operands.leaves[1].detach()
            return fastconv.conv_bn_act(x, weight, None, None, None, training=True)

        self._declines(host, lambda: torch.vmap(function)(x[None]))
        self._declines(host, lambda: torch.func.jvp(function, (x,), (x,)))
        self._declines(host, lambda: torch.func.grad(lambda x: function(x).sum())(x))

    def test_strided_statistics(self, host: Host) -> None:
        operands = Operands()
        operands.mean, operands.var = torch.zeros(6, 2)[:, 0], torch.ones(6, 2)[:, 0]
        self._declines(host, operands.block)
        self._declines(host, operands.norm)
        assert operands.mean.any()

    def test_evaluation_of_blocks(self, host: Host) -> None:
        """It folds the normalization into the convolution."""
        self._declines(host, lambda: Operands().block(training=False))

    def test_subclasses_and_modes(self, host: Host) -> None:
        class Own(Tensor):
            pass

        operands = Operands()
        x = operands.leaves[3].detach().as_subclass(Own)
        self._declines(host, lambda: fastconv.batch_norm_act(x, None, None, training=True))

        seen: list[Any] = []

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(function)
                return function(*args, **(kwargs or {}))

        with Mode():
            operands.norm()
            operands.block()
        assert {fastconv.batch_norm_act, fastconv.conv_bn_act} <= set(seen)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"momentum": None}, "momentum is None"),
            ({"activation": "elu"}, "activation should be None"),
            ({"residual": torch.randn(3, 6, 4, 2)}, "residual of the input's size"),
            ({"residual": torch.randn(1)}, "residual of the input's size"),
        ],
        ids=str,
    )
    def test_errors_are_pythons(self, host: Host, options: dict[str, Any], words: str) -> None:
        for make in (Operands().block, Operands().norm):
            with pytest.raises((RuntimeError, ValueError), match=words):
                make(**options)


class TestLaunches:
    """What is launched, seen by a driver that only records; CPU tensors have the null stream."""

    TENSORS = tuple(("tensor", number) for number in range(12))

    @pytest.fixture(autouse=True)
    def _launched(self, host: Host, driver: Driver) -> None:
        self.driver = driver
        count = {FORWARD: 12, BACKWARD: 12}
        functions = {FORWARD: 0xF0, BACKWARD: 0xF1}
        driver.signatures = {functions[name]: "p" * size for name, size in count.items()}
        self.troubles: list[Any] = []

        def trouble(*what: Any) -> None:
            self.troubles.append(what)
            raise Trouble

        def answer(name: str, *args: Any) -> Any:
            entry = make_entry(name, *args)
            if not isinstance(entry, NormEntry):
                return entry
            launch = (functions[name], (5, 6, 7), 64, 0, False, self.TENSORS[: count[name]])
            return entry._replace(launches=[launch], scratch_bytes=64, fill=None, trouble=trouble)

        host.answer = answer

    def test_addresses(self, host: Host) -> None:
        operands, batches = Operands(), torch.tensor(2)
        *_, x, weight, bias = operands.leaves
        residual = torch.randn_like(x).requires_grad_()
        output = operands.norm(residual=residual, momentum=None, num_batches_tracked=batches)
        given = (x, residual, weight, bias, operands.mean, operands.var, batches)
        ((*_, forward),) = self.driver.launched
        assert forward[:7] == [one.data_ptr() for one in given]
        assert forward[10] == output.data_ptr()
        assert len(set(forward)) == 12
        grad = torch.randn_like(x)
        found = torch.autograd.grad(output, (x, residual, weight, bias), grad)
        *_, backward = self.driver.launched[-1]
        tensors = (grad, x, residual, weight, bias)
        assert backward[:5] == [one.data_ptr() for one in tensors]
        assert backward[5:7] == forward[8:10], "the statistics of the forward pass"
        assert backward[7:11] == [one.data_ptr() for one in found]
        assert len(set(backward)) == 12

    def test_absent_tensors(self, host: Host) -> None:
        x = torch.randn(2, 6, 4, 4, requires_grad=True)
        output = fastconv.batch_norm_act(x, None, None, training=True)
        (found,) = torch.autograd.grad(output, x, torch.ones_like(x))
        (*_, forward), (*_, backward) = self.driver.launched
        assert [number for number, one in enumerate(forward) if not one] == [1, 2, 3, 4, 5, 6, 7]
        assert [number for number, one in enumerate(backward) if not one] == [2, 3, 4, 8, 9, 10]
        assert backward[7] == found.data_ptr()

    @pytest.mark.parametrize("momentum", [0.1, None], ids=str)
    @pytest.mark.parametrize("block", [True, False], ids=["block", "norm"])
    def test_layers_count_by_launches(
        self, host: Host, block: bool, momentum: float | None
    ) -> None:
        """Not while a launch reads the number of batches, which is counted before."""
        layer = fastconv.ConvBNAct2d(4, 4, 1)
        layer.bn.momentum, batches = momentum, layer.bn.num_batches_tracked
        input, version = torch.randn(2, 4, 3, 3), batches._version
        layer(input) if block else bn_act(layer.bn, input)
        ((*_, forward),) = self.driver.launched
        read, counted = forward[6:8]
        assert (read, counted) == ((0, batches.data_ptr()) if momentum else (batches.data_ptr(), 0))
        assert int(batches) == (0 if momentum else 1)  # the driver's launches do nothing
        assert batches._version == version + 1

    @pytest.mark.parametrize(
        "batches",
        [torch.tensor(3.0), torch.tensor([3]), torch.tensor(3, dtype=torch.int32)],
        ids=str,
    )
    def test_counts_that_launches_do_not_take(self, host: Host, batches: Tensor) -> None:
        norm = nn.BatchNorm2d(4)
        norm.num_batches_tracked = batches
        bn_act(norm, torch.randn(2, 4, 3, 3))
        assert batches.flatten().tolist() == [4]

    def test_copies(self, host: Host) -> None:
        """Tensors of x's size that are laid out otherwise are copied; others are not."""
        x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
        for residual, same in ((x, True), (x.contiguous(), False), (x.transpose(2, 3), False)):
            self.driver.launched.clear()
            fastconv.batch_norm_act(x, None, None, training=True, residual=residual)
            ((*_, forward),) = self.driver.launched
            assert forward[0] == x.data_ptr()
            assert (forward[1] == residual.data_ptr()) == same

    def test_errors(self, host: Host) -> None:
        operands = Operands()
        output = operands.norm()
        for call in (operands.norm, lambda: output.sum().backward()):
            self.driver.launch_statuses = [1]
            with pytest.raises(Trouble):
                call()
            assert self.troubles.pop() == (0, -1, 0, 1, False)

    def test_forms(self, host: Host) -> None:
        """Entries are made once for each form."""
        operands = Operands()
        for _ in range(2):
            operands.norm()
        assert host.operators == [FORWARD]
        forms: tuple[dict[str, Any], ...] = (
            {"momentum": 0.2}, {"eps": 1e-3}, {"activation": "relu"}, {"training": False},
            {"activation": ("leaky_relu", 0.3)}, {"activation": ("leaky_relu", 0.4)},
            {"residual": torch.randn(3, 6, 4, 3)},
        )  # fmt: skip
        for number, form in enumerate(forms):
            for _ in range(2):
                operands.norm(**form)
            assert len(host.asked) == 2 + number


class TestStatistics:
    """A convolution in 16 bits leaves statistics, and the normalization takes them."""

    SHARES = 5

    @pytest.fixture(autouse=True)
    def _launched(self, host: Host, driver: Driver) -> None:
        self.driver, self.shares = driver, self.SHARES
        driver.signatures = {0xF0: "p" * 9, 0xF1: "p" * 12}

        def answer(name: str, *args: Any) -> Any:
            entry = make_entry(name, *args)
            is_norm = isinstance(entry, NormEntry)
            if name not in (WITH_STATISTICS, FORWARD):
                return entry
            tensors = tuple(("tensor", number) for number in range(12 if is_norm else 9))
            launch = (0xF0 + is_norm, (5, 6, 7), 64, 0, False, tensors)
            entry = entry._replace(launches=[launch], fill=None, trouble=lambda *_: None)
            return entry if is_norm else entry._replace(cpu_plan=None, shares=self.shares)

        host.answer = answer

    def _launches(self) -> tuple[list[int], list[int]]:
        (*_, conv), (*_, norm) = self.driver.launched
        self.driver.launched.clear()
        return conv, norm

    @pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no grad"])
    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_normalizations_take_what_convolutions_leave(
        self, host: Host, axes: int, recorded: bool
    ) -> None:
        operands = Operands(torch.bfloat16, True, axes)
        with torch.set_grad_enabled(recorded):
            operands.block()
        conv, norm = self._launches()
        output, statistics = conv[4], conv[8]
        assert norm[0] == output
        assert norm[11] == statistics
        assert statistics
        (*_, shares) = host.asked[1]
        assert host.operators == [WITH_STATISTICS, FORWARD]
        assert shares == self.SHARES

    def test_convolutions_that_leave_none(self, host: Host) -> None:
        self.shares = 0
        operands = Operands(torch.float16)
        operands.block()
        conv, norm = self._launches()
        assert conv[8] == norm[11] == 0  # this entry's workspace has no bytes either
        assert host.operators == [WITH_STATISTICS, FORWARD]
        assert len(host.asked[1]) == 1 + len(batchnorm_schema.Arguments._fields)

    def test_they_belong_to_a_form(self, host: Host) -> None:
        """Other calls of the convolution and of the normalization have entries of their own."""
        operands = Operands(torch.bfloat16)
        input, weight, bias, *_ = operands.leaves
        for _ in range(2):
            operands.block(residual=None)
        assert host.operators == [WITH_STATISTICS, FORWARD]
        fastconv.conv2d(input, weight, bias)
        operands.norm(residual=None, activation="relu")
        assert host.operators[2:] == ["forward", FORWARD]

    def test_only_in_16_bits(self, host: Host) -> None:
        Operands(torch.float32).block()
        assert host.operators == ["forward", FORWARD]

    def test_under_autocast(self, host: Host) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            Operands(torch.float32).block()
        assert host.operators == [WITH_STATISTICS, FORWARD]

    def test_forms_are_recorded_without(self, host: Host) -> None:
        """Bundles have the operator, which the block's convolution is an instance of."""
        seen: list[tuple[Any, ...]] = []
        host.module.record_forms(lambda *form: seen.append(form))
        try:
            operands = Operands(torch.bfloat16)
            operands.block()
            fastconv.conv2d(*(one.detach() for one in operands.leaves[:3]))
        finally:
            host.module.record_forms(None)
        assert [name for _, name, *_ in seen] == ["forward", FORWARD, "forward"]
        assert seen[0][0] == seen[2][0]
