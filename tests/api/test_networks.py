"""What tools for whole networks see of our convolutions: docs/deployment.md."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.export import Dim
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from fastconv.ops.late import when_imported

# Arguments after (in_channels=4, out_channels=6, kernel_size=(3, 2)).
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": (2, 1), "padding": (1, 2)},
    {"dilation": (1, 3), "padding": "same"},
    {"groups": 2, "padding": 1},
    {"padding": (2, 1), "padding_mode": "circular"},
    {"padding": ((1, 0), (2, 3)), "stride": 2, "groups": 2},
    {"padding": ((0, 2), (1, 0)), "padding_mode": "reflect"},
]
configurations = pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=str)


def _make(**arguments: Any) -> fastconv.Conv2d:
    return fastconv.Conv2d(4, 6, (3, 2), **arguments)


def _input(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 9, 8)


def _pytorchs(padding: Any = 0, **arguments: Any) -> nn.Module:
    """PyTorch's layer for ours, after a padding layer if the sides' paddings differ."""
    if not isinstance(padding, tuple) or isinstance(padding[0], int):
        return nn.Conv2d(4, 6, (3, 2), padding=padding, **arguments)
    (top, bottom), (left, right) = padding
    pads = {"zeros": nn.ZeroPad2d, "reflect": nn.ReflectionPad2d}
    pad = pads[arguments.pop("padding_mode", "zeros")]
    return nn.Sequential(pad((left, right, top, bottom)), nn.Conv2d(4, 6, (3, 2), **arguments))


# --- Operations -----------------------------------------------------------------------------------


def _operations(function: Callable[[], Any]) -> tuple[Any, int]:
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def _of_both_passes(module: nn.Module, input: Tensor) -> tuple[int, int]:
    output, forward = _operations(lambda: module(input))
    return forward, _operations(lambda: output.sum().backward())[1]


@pytest.mark.usefixtures("host_path")
@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
@configurations
def test_operations_are_counted_as_pytorchs(arguments: dict[str, Any], frozen: str) -> None:
    ours, theirs = _make(**arguments), _pytorchs(**arguments)
    for module in (ours, theirs):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen))
    input = _input().requires_grad_(frozen != "input")
    counts = _of_both_passes(ours, input)
    assert counts == _of_both_passes(theirs, input)
    assert min(counts) > 0


@pytest.mark.usefixtures("host_path")
def test_a_bias_alone_costs_nothing_to_differentiate() -> None:
    module = _make()
    module.weight.requires_grad_(False)
    forward, backward = _of_both_passes(module, _input())
    assert forward > 0
    assert backward == 0
    assert module.bias.grad is not None


def test_operations_are_counted_by_the_operator() -> None:
    module = fastconv.Conv2d(3, 8, 3)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3, 10, 10, requires_grad=True)).sum().backward()
    operators = torch.ops.fastconv
    each = 2 * (2 * 8 * 8 * 8) * (3 * 3 * 3)
    counts = {operators.forward: each, operators.backward: 2 * each}
    assert counter.get_flop_counts()["Global"] == counts
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3, 10, 10)).sum().backward()
        module.requires_grad_(False)
        module(torch.randn(2, 3, 10, 10, requires_grad=True)).sum().backward()
    counts = {operators.forward: 2 * each, operators.input_grad: each, operators.weight_grad: each}
    assert counter.get_flop_counts()["Global"] == counts


# --- ONNX and core ATen ---------------------------------------------------------------------------

OPERATORS = [
    torch.ops.fastconv.forward,
    torch.ops.fastconv.input_grad,
    torch.ops.fastconv.weight_grad,
    torch.ops.fastconv.backward,
]
GEOMETRIES = [
    ((1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((2, 1), (1, 1, 2, 2), (1, 3), 2),
    ((2, 3), (1, 0, 2, 3), (2, 1), 1),
    ((1, 2), (0, 1, 1, 0), (1, 1), 2),
]


class _AllConfigurations(nn.Module):
    """One network with one layer of each kind, because an export takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_make(**arguments) for arguments in CONFIGURATIONS)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(input).relu() for layer in self.layers)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_onnx(tmp_path: Path) -> None:
    model, path = _AllConfigurations().eval(), tmp_path / "model.onnx"
    torch.onnx.export(model, (_input(),), path, dynamo=True, dynamic_shapes=({0: Dim("batch")},))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    for batch in (1, 5):
        input = _input(batch)
        results = session.run(None, {argument.name: input.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(
                [torch.from_numpy(result) for result in results], list(model(input))
            )


def _targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_core_aten() -> None:
    model = nn.Sequential(
        _make(padding=((1, 0), (2, 3)), stride=2, groups=2), fastconv.Conv2d(6, 4, 3, padding=1)
    )
    program = torch.export.export(model, (_input(),), dynamic_shapes=({0: Dim("batch")},))
    table = torch.export.default_decompositions()
    table.update(torch._decomp.get_decompositions(OPERATORS))
    decomposed = program.run_decompositions(table)
    assert "fastconv.forward.default" in _targets(program.graph)
    assert "aten.convolution.default" in _targets(decomposed.graph)
    assert not any("fastconv" in target for target in _targets(decomposed.graph))
    input = _input(3)
    torch.testing.assert_close(decomposed.module()(input), model(input))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_decompositions_compute_the_same(
    geometry: tuple[Any, ...], bias: bool, memory_format: torch.memory_format
) -> None:
    table = torch._decomp.get_decompositions(OPERATORS)
    assert {operator.overloadpacket for operator in table} == set(OPERATORS)
    forward, input_grad, weight_grad, backward = (packet.default for packet in OPERATORS)
    input, weight = (
        _input().to(memory_format=memory_format),
        torch.randn(6, 4 // geometry[-1], 3, 2),
    )
    bias_tensor = torch.randn(6) if bias else None
    grad_output = torch.randn_like(forward(input, weight, bias_tensor, *geometry, None))
    for operator, arguments in (
        (forward, (input, weight, bias_tensor, *geometry, None)),
        (input_grad, (grad_output, weight, (9, 8), *geometry, None)),
        (input_grad, (grad_output, weight, (9, 8), *geometry, None, torch.channels_last)),
        (weight_grad, (grad_output, input, (3, 2), *geometry, None, bias)),
        (weight_grad, (grad_output, input, (3, 2), *geometry, None, bias, torch.channels_last)),
        (backward, (grad_output, input, weight, *geometry, None, False, bias)),
        # The same tensors, as those of a transposed convolution.
        (backward, (input, grad_output, weight, *geometry, None, True, bias)),
    ):
        actual, expected = table[operator](*arguments), operator(*arguments)
        torch.testing.assert_close(actual, expected, check_stride=True)


def test_complex_convolutions_have_no_decomposition() -> None:
    module = _make(dtype=torch.complex64)
    program = torch.export.export(module, (_input().to(torch.complex64),))
    with pytest.raises(Exception, match=r"torch\.complex64 .* real numbers"):
        program.run_decompositions(torch._decomp.get_decompositions(OPERATORS))


@pytest.mark.usefixtures("host_path")
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_that_computes_is_decomposed(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("a decomposition was asked for")

    for packet in OPERATORS:
        monkeypatch.setitem(torch._decomp.decomposition_table, packet.default, fails)
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    as_inductor = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table)
    # One layer has a gradient of the weight, one has both, and one has that of the input.
    model = nn.Sequential(
        _make(padding=((1, 0), (2, 3))),
        nn.ReLU(),
        fastconv.Conv2d(6, 4, 3),
        fastconv.Conv2d(4, 4, 1).requires_grad_(False),
    )
    for network in (
        model,
        torch.compile(model, backend=as_inductor, fullgraph=True, dynamic=dynamic),
    ):
        network(_input()).sum().backward()
    seen = set.union(*(_targets(graph.graph) for graph in graphs))
    assert {str(packet.default) for packet in OPERATORS} <= seen
    assert not any("convolution" in target for target in seen)


# --- torch.fx -------------------------------------------------------------------------------------


class _Network(nn.Module):
    def __init__(self, convolution: type[nn.Conv2d] = fastconv.Conv2d) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = convolution(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.rest = nn.Sequential(nn.ReLU(), convolution(6, 6, 3, stride=2, groups=2))
        nn.init.normal_(self.norm.running_mean)

    def forward(self, input):  # torch.fx cannot pickle annotations that are strings.
        return self.rest(self.norm(self.first(input)))


@pytest.mark.usefixtures("host_path")
def test_symbolic_trace_calls_modules() -> None:
    network = _Network().eval()
    traced = torch.fx.symbolic_trace(network)
    assert str(traced.graph) == str(torch.fx.symbolic_trace(_Network(nn.Conv2d)).graph)
    for twin in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert type(twin.first) is fastconv.Conv2d
        input = _input()
        assert twin(input).equal(network(input))


def test_symbolic_trace_of_a_convolution_alone() -> None:
    module = _make(padding="same")
    traced = torch.fx.symbolic_trace(module)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [
        fastconv.conv2d
    ]
    input = _input()
    assert pickle.loads(pickle.dumps(traced))(input).equal(module(input))


def test_a_tracer_that_looks_into_convolutions_looks_into_ours() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return not isinstance(module, nn.Conv2d) and super().is_leaf_module(module, name)

    for convolution, function in ((fastconv.Conv2d, fastconv.conv2d), (nn.Conv2d, torch.conv2d)):
        graph = Tracer().trace(_Network(convolution))
        assert [node.target for node in graph.nodes if node.op == "call_function"] == [function] * 2


class _Doubled(fastconv.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


def _hooked(network: _Network) -> None:
    network.first.register_forward_hook(lambda module, arguments, output: output + 1)


def _hooked_before(network: _Network) -> None:
    network.first.register_forward_pre_hook(lambda module, arguments: (3 * arguments[0],))


def _derived(network: _Network) -> None:
    network.first.__class__ = _Doubled


def _parametrized(network: _Network) -> None:
    nn.utils.parametrizations.weight_norm(network.first)


@pytest.mark.parametrize("change", [_hooked, _hooked_before, _derived, _parametrized])
def test_symbolic_trace_of_more_than_a_convolution(change: Callable[[_Network], None]) -> None:
    network = _Network().eval()
    change(network)
    input = _input()
    torch.testing.assert_close(torch.fx.symbolic_trace(network)(input), network(input))


def _become(model: nn.Module, source: type[nn.Module], target: type[nn.Module]) -> None:
    """The code of docs/deployment.md."""
    for module in model.modules():
        if type(module) is source:
            module.__class__ = target


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_fuse() -> None:
    # Imported here, because this warns of PyTorch's own use of TorchScript.
    from torch.fx.experimental.optimization import fuse

    network, input = _Network().eval(), _input()
    expected = network(input)
    assert any(isinstance(module, nn.BatchNorm2d) for module in fuse(network).modules())
    _become(network, fastconv.Conv2d, nn.Conv2d)
    fused = fuse(network)
    _become(fused, nn.Conv2d, fastconv.Conv2d)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert type(fused.first) is fastconv.Conv2d
    torch.testing.assert_close(fused(input), expected)


def test_fuse_one() -> None:
    network, input = _Network().eval(), _input()
    fused = fuse_conv_bn_eval(network.first, network.norm)
    assert type(fused) is fastconv.Conv2d
    torch.testing.assert_close(fused(input), network.norm(network.first(input)))


def _quantized(network: nn.Module, input: Tensor) -> torch.fx.GraphModule:
    # Imported here, because this warns of PyTorch's own use of TorchScript, too.
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    mapping = get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = prepare_fx(network, mapping, (input,))
    prepared(input)
    return convert_fx(prepared)


@pytest.fixture
def _quantization_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with which PyTorch can quantize its own layers on this CPU."""
    quantization, input = torch.backends.quantized, _input()
    refusals = {}
    for engine in dict.fromkeys([quantization.engine, *quantization.supported_engines]):
        if engine == "none":
            continue
        monkeypatch.setattr(quantization, "engine", engine)
        try:
            _quantized(_Network(nn.Conv2d).eval(), input)(input)
        except RuntimeError as error:
            refusals[engine] = str(error).partition("\n")[0]
        else:
            return
    pytest.skip(f"PyTorch quantizes none of its own convolutions on this CPU: {refusals}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("_quantization_engine")
def test_quantization() -> None:
    network, input = _Network().eval(), _input()
    assert type(_quantized(copy.deepcopy(network), input).first) is fastconv.Conv2d
    expected = network(input)
    _become(network, fastconv.Conv2d, nn.Conv2d)
    found = _quantized(network, input)
    assert isinstance(found.first, torch.ao.nn.quantized.Conv2d)
    torch.testing.assert_close(found(input), expected, rtol=0.1, atol=0.1)


# --- TorchScript ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_torchscript() -> None:
    network, input = _Network().eval(), _input()
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace or torch\.export"):
        torch.jit.script(network)
    assert type(network.first) is fastconv.Conv2d
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(network, _input()), file)
    file.seek(0)
    assert torch.jit.load(file)(input).equal(network(input))
    _become(network, fastconv.Conv2d, nn.Conv2d)
    torch.testing.assert_close(torch.jit.script(network)(input), network(input))


# --- What PyTorch imports late --------------------------------------------------------------------


def test_registers_when_a_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_one.py").write_text("table = {}\n")
    calls = []
    finders = list(sys.meta_path)
    when_imported("late_one", lambda: calls.append(sys.modules["late_one"].table))
    assert importlib.util.find_spec("late_one") is not None  # find_spec does not import it.
    assert calls == []
    late = importlib.import_module("late_one")
    assert calls == [late.table]
    assert "table" in inspect.getsource(late)
    assert sys.meta_path == finders
    when_imported("late_one", lambda: calls.append("at once"))
    assert calls == [late.table, "at once"]
    assert sys.meta_path == finders


def test_waits_for_a_module_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_two.py").write_text("import builtins\nbuiltins.late_two\n")
    calls = []
    when_imported("late_two", lambda: calls.append("imported"))
    with pytest.raises(AttributeError):
        importlib.import_module("late_two")
    assert calls == []
    monkeypatch.setattr("builtins.late_two", None, raising=False)
    importlib.import_module("late_two")
    assert calls == ["imported"]


def test_a_registration_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "late_three", None)
    with pytest.warns(UserWarning, match="registered with late_three .*no such name"):
        when_imported("late_three", lambda: vars(sys)["no such name"])


PROCESS = """
import sys
import torch
before = set(sys.modules)
import fastconv
late = {"torch.utils.flop_counter", "torch.distributed.tensor", "torch.onnx"}
print(sorted(late & (set(sys.modules) - before)))
from torch.utils.flop_counter import flop_registry
print(torch.ops.fastconv.forward in flop_registry)
import torch.distributed.fsdp  # This imports DTensor.
from torch.distributed.tensor import DTensor
propagator = DTensor._op_dispatcher.sharding_propagator
print(torch.ops.fastconv.forward.default in propagator.op_strategy_funcs)
"""


def test_importing_imports_none_of_them() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PROCESS],
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout.splitlines() == ["[]", "True", "True"]
