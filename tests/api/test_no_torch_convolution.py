"""Nothing in the package calls PyTorch's own convolutions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastconv
from exports import exported
from fastconv.backends import cpu
from fastconv.workloads import FOUNDING

PACKAGE = Path(fastconv.__file__).parent
# Files that measure PyTorch's convolutions, compare with them, or replace them.
REFERENCES = [
    PACKAGE / path
    for path in (
        "bench",
        "exporter/subject.py",
        "exporter/parts/self_check.py",
        "exporter/parts/layer_twins.py",  # the self-check's twins of 1-D and transposed layers
    )
]
# Decompositions for other programs' files and graphs name PyTorch's operators. No computation uses
# them: see tests/api/test_networks.py.
DECOMPOSITION = PACKAGE / "ops/decomposition.py"

# Functions, modules and operators that convolve, or that turn a convolution into a GEMM.
FORBIDDEN = re.compile(
    r".*(conv\w*[123]d|convolution|conv_tbc|_conv_forward|im2col|col2im).*|(un)?fold", re.IGNORECASE
)


DRIVERS = "cuTensorMapEncode"  # The driver's functions that make tensor maps, tiled or im2col.

# PyTorch's convolutions in C++.
FORBIDDEN_IN_CPP = re.compile(
    r"(?:at|_ops|aten)::\w*(?:conv|im2col|col2im|unfold)\w*", re.IGNORECASE
)


class _Uses(ast.NodeVisitor):
    """Collects where a module reaches for a forbidden name that is not its own package's."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.own: set[str] = set()  # names that are bound to fastconv, or to something of it
        self.methods: set[str] = set()  # methods of the class that is being visited

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_import(node, alias, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._check_import(node, alias, f"{node.module}.{alias.name}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        # Bases are not visited: a class may derive from a convolution of PyTorch.
        for child in (*node.keywords, *node.decorator_list, *node.body):
            self.visit(child)
        self.methods = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if node.attr not in self.methods:
                self._check(node, node.attr)
            return
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in self.own):
            self._check(node, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # getattr(torch, "conv2d"), operator.attrgetter("conv2d"), library.impl("aten::conv2d", ...)
        for argument in node.args:
            value = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"\w+((::|\.)\w+)*", value):
                self._check(node, value)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self._check(node, node.slice.value)  # vars(torch)["conv2d"]
        self.generic_visit(node)

    def _check_import(self, node: ast.stmt, alias: ast.alias, path: str) -> None:
        if path.split(".")[0] == "fastconv":
            self.own.add(alias.asname or alias.name.split(".")[0])
        else:
            self._check(node, alias.name.rpartition(".")[2])

    def _check(self, node: ast.expr | ast.stmt, name: str) -> None:
        if FORBIDDEN.fullmatch(name) and not name.startswith(DRIVERS):
            self.found.append(f"line {node.lineno}: {name}")


def _uses(source: str) -> list[str]:
    visitor = _Uses()
    visitor.visit(ast.parse(source))
    return visitor.found


def _sources() -> Iterator[Path]:
    return (
        path
        for path in PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(reference) for reference in (*REFERENCES, DECOMPOSITION))
    )


@pytest.mark.parametrize("path", list(_sources()), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sources_use_no_convolution_of_pytorch(path: Path) -> None:
    assert _uses(path.read_text(encoding="utf-8")) == []


def test_the_decomposition_names_two_alone() -> None:
    uses = _uses(DECOMPOSITION.read_text(encoding="utf-8"))
    assert {use.split()[-1] for use in uses} == {"convolution", "convolution_backward"}
    importers = [path.relative_to(PACKAGE) for path in _sources() if _imports_decompositions(path)]
    assert importers == [Path("ops/__init__.py")], "it registers the decompositions, and calls none"


def _imports_decompositions(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return any(name.startswith("fastconv.ops.decomposition") for name in names)


def test_pytorchs_layers_have_one_name_by_which_none_is_made() -> None:
    """``optimize`` and ``convert`` use PyTorch's layers only to measure and exchange the user's."""
    sources = {path.stem: path.read_text("utf-8") for path in _sources()}
    holders = {name for name, text in sources.items() if "__bases__" in text}
    assert holders == {"modules", "reachable"}, "reachable looks for objects that a model refers to"
    assert not any("__base__" in text for text in sources.values())
    users = {name for name, text in sources.items() if re.search(r"\bCOUNTERPARTS\b", text)}
    assert users == {"modules", "conversion", "exchange"}
    users = {name for name, text in sources.items() if re.search(r"kind\S*\.pytorchs\b", text)}
    assert users == {"exchange", "calls"}
    # Nothing of these classes is used but the name: none is called or asked for a method.
    used = re.compile(r"kind\S*\.pytorchs(\(|\.(?!__name__\b))")
    assert not any(used.search(text) for text in sources.values())
    assert used.search("known_kind(layer).pytorchs(3, 3, 1)")


@pytest.mark.parametrize(
    "path", [*PACKAGE.rglob("*.cc"), *PACKAGE.rglob("*.h")], ids=lambda path: path.name
)
def test_sources_in_cpp_use_none_either(path: Path) -> None:
    assert FORBIDDEN_IN_CPP.findall(path.read_text(encoding="utf-8")) == []


def test_uses_in_cpp_are_found() -> None:
    source = 'at::conv2d(x, w); at::_ops::convolution_backward::call(x); op("aten::im2col");'
    assert len(FORBIDDEN_IN_CPP.findall(source)) == 3


@pytest.mark.parametrize("name", [workload.name for workload in FOUNDING])
def test_exported_files_use_it_in_their_self_check_alone(name: str) -> None:
    source = exported(name).read_text(encoding="utf-8")
    (twin,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "pytorch_twin"
    )
    # The model's own attribute has the name that PyTorch's function has.
    uses = _uses(source.replace("self.conv2d", "self.layer"))
    lines = [int(use.split()[1].rstrip(":")) for use in uses]
    assert len(lines) == 1
    assert twin.lineno < lines[0] <= (twin.end_lineno or 0)


@pytest.mark.parametrize(
    "source",
    [
        "F.conv2d(x, w)",
        "torch.conv1d(x, w)",
        "torch.nn.functional.conv_transpose2d(x, w)",
        "torch.ops.aten.convolution.default(x, w)",
        "torch.ops.aten.convolution_backward(x, w)",
        "torch.cudnn_convolution(x, w)",
        "torch.mkldnn_convolution(x, w)",
        "torch._C._nn.slow_conv_dilated2d(x, w)",
        "F.unfold(x, 3)",
        "x.unfold(2, 3, 1)",
        "F.fold(x, 4, 3)",
        "torch.ops.aten.im2col(x)",
        "from torch.nn.functional import conv2d",
        "from torch.nn.functional import conv2d as harmless",
        "import torch.nn.modules.conv2d",
        "convolution = torch.nn.Conv2d(1, 1, 1)",
        "super()._conv_forward(x, w, b)",
        "class C(B):\n  def f(self): self._conv_forward(x)",
        "class C(B):\n  def conv2d(self): ...\ndef f(self): self.conv2d(x)",
        "class C(B):\n  def conv2d(self): F.conv2d(x)",
        "getattr(torch, 'conv2d')",
        "vars(torch)['conv2d']",
        "torch._C._jit_get_operation('aten::conv2d')",
    ],
)
def test_uses_are_found(source: str) -> None:
    assert len(_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "'''Like F.conv2d(x, w).'''",
        "raise RuntimeError('no such convolution')",
        "from fastconv.functional import conv2d\nconv2d(x, w)",
        "import fastconv\nfastconv.conv2d(x, w)\nfastconv.functional.conv2d(x, w)",
        "from fastconv import functional as own\nown.conv2d(x, w)",
        "__all__ = ['Conv2d', 'conv2d']",
        "class Conv2d(torch.nn.Conv2d): ...",
        "class C(B):\n  def f(self): self._conv_forward(x)\n  def _conv_forward(self, x): return x",
        "torch.backends.cudnn.conv.fp32_precision",
        "x.unflatten(0, (2, 3))",
        "_unfold(x, 0, 2)",
    ],
)
def test_other_uses_are_not(source: str) -> None:
    assert _uses(source) == []


class _NoConvolutions(TorchDispatchMode):
    """Raises when PyTorch convolves, in the operators' kernels too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        if func.namespace == "fastconv":
            # Calls the device's kernel directly, because this mode would not see it otherwise.
            device = args[0].device.type.upper()
            key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
            with self:
                return func.redispatch(key, *args, **(kwargs or {}))
        if re.search("conv|im2col|col2im", func._opname):
            raise AssertionError(f"{func} was called")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", [1, 3], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4], ids=str)
def test_kernels_use_no_convolution_of_pytorch(
    dtype: torch.dtype, channels_last: bool, kernel: int, groups: int, device: torch.device
) -> None:
    module = fastconv.Conv2d(
        4, 8, kernel, stride=2, padding="valid", groups=groups, device=device, dtype=dtype
    )
    input = torch.randn(2, 4, 9, 8, device=device, dtype=dtype, requires_grad=True)
    if channels_last:
        input = input.to(memory_format=torch.channels_last)
    with _NoConvolutions() as mode:
        fastconv.conv2d(module(input), module.weight[:, :1], groups=8).abs().sum().backward()
        fastconv.conv2d(input.detach(), module.weight, groups=groups).abs().sum().backward()
        fastconv.conv2d(input, module.weight.detach(), groups=groups).abs().sum().backward()
    names = ("forward", "backward", "weight_grad", "input_grad")
    assert {f"fastconv.{name}.default" for name in names} < mode.seen
    assert any(name.startswith("aten.") for name in mode.seen)


@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d", "ConvTranspose2d"])
@pytest.mark.parametrize("groups", [1, 4], ids=str)
def test_other_layers_use_none_either(name: str, groups: int, device: torch.device) -> None:
    module = getattr(fastconv, name)(4, 8, 3, stride=2, groups=groups, device=device)
    shape = (2, 4, 9, 8) if name.endswith("2d") else (2, 4, 9)
    input = torch.randn(shape, device=device, requires_grad=True)
    with _NoConvolutions() as mode:
        module(input).square().sum().backward()
    expected = ("forward" if name == "Conv1d" else "transposed", "backward")
    assert {f"fastconv.{one}.default" for one in expected} < mode.seen


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "twice differentiable"])
def test_causal_convolutions_use_none_either(create_graph: bool, device: torch.device) -> None:
    x = torch.randn(2, 4, 9, device=device, requires_grad=True)
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    with _NoConvolutions() as mode:
        output = fastconv.causal_conv1d_fn(x, weight, activation="silu")
        torch.autograd.grad(output.sum(), (x, weight), create_graph=create_graph)
        with torch.no_grad():
            fastconv.causal_conv1d_update(x, torch.zeros(2, 4, 2, device=device), weight)
    # Gradients that are differentiated again are PyTorch's elementwise operations.
    expected = ("causal_forward", "causal_update", *(() if create_graph else ("causal_backward",)))
    assert {f"fastconv.{one}.default" for one in expected} < mode.seen


def test_mode_sees_convolutions_of_pytorch() -> None:
    with pytest.raises(AssertionError, match=r"aten\.convolution"), _NoConvolutions():
        F.conv2d(torch.randn(1, 1, 3, 3), torch.randn(1, 1, 2, 2))


def test_mode_sees_into_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "forward", lambda _, input, weight, *others: F.conv2d(input, weight))
    with pytest.raises(AssertionError, match=r"aten\..*conv"), _NoConvolutions():
        fastconv.conv2d(torch.randn(1, 1, 3, 3), torch.randn(1, 1, 2, 2))
