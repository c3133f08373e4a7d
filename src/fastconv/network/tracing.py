"""A model as a ``torch.fx`` graph: what its nodes result in, and which of them write to tensors."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy, Tracer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from fastconv import _frozen, _precision, tables
from fastconv.network.calls import Form
from fastconv.network.dry_run import call_without_data, tensors_of
from fastconv.network.exchange import kind_of
from fastconv.network.snapshot import Snapshot


class Untraceable(Exception):
    """A model cannot be fused; says why."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, or a ``forward`` other than its class's."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _Tracer(Tracer):
    """Keeps modules with hooks as single nodes, so that the hooks run when the graph is called.

    A graph has no ``with``: what a block sets holds while the model is traced, but not when the
    graph is called. So the tracer finds settings that differ from those around the model.
    """

    # Unpickling a graph makes its tracer without arguments.
    def __init__(
        self,
        devices: Collection[str] = (),
        inlined: Collection[str] | None = None,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self._in_place = in_place
        self._devices = devices
        self._inlined = inlined
        self._around = _settings(devices)
        self.lost: str | None = None  # a setting that the model changes for a part of itself

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = kind_of(m) is not None or has_hooks(m)
        if self._inlined is not None and module_qualified_name not in self._inlined:
            whole = True
        return whole or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: Node) -> Proxy:
        return _InPlaceProxy(node, self) if self._in_place else super().proxy(node)

    def create_arg(self, a: Any) -> Any:
        """Keeps the type of OrderedDicts, in which segmentation models return results."""
        if type(a) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, (dict(a),), {}).node
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        now = _settings(self._devices)
        changed = (name for name, value in self._around.items() if now[name] != value)
        self.lost = self.lost or next(changed, None)
        return node


class _InPlaceProxy(Proxy):
    """Keeps ``x += y`` as it is; for other proxies it is ``x = x + y``."""


def _in_place_method(function: Callable[[Any, Any], Any]) -> Callable[[Proxy, Any], Proxy]:
    def method(self: Proxy, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_InPlaceProxy, f"__i{_name}__", _in_place_method(getattr(operator, f"i{_name}")))


def _settings(devices: Collection[str]) -> dict[str, object]:
    """The settings of ``with`` blocks that results or their types depend on, by name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return {
        "autocast": [
            (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
            for device in sorted({"cpu", "cuda", *devices})
        ],
        "whether gradients are recorded": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "fastconv.precision": _precision.override(),
        "fastconv.frozen_weights": _frozen.active(),
        "torch.backends.cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "the precision of convolutions": _precision.pytorch_setting(),
        "the precision of matrix products": _matmul_precision(),
        "torch.backends.mkldnn": mkldnn.enabled,
        "the attention kernels": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the default type": torch.get_default_dtype(),
        "a function mode": list(map(id, torch.overrides._get_current_function_mode_stack())),
        "a dispatch mode": list(map(id, _get_current_dispatch_mode_stack())),
        "a transform of torch.func": torch._C._functorch.maybe_current_level(),
        "a CUDA stream": _stream(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }  # fmt: skip


def _matmul_precision() -> object:
    matmul: Any = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction
    return (
        matmul.allow_bf16_reduced_precision_reduction,
        reduced,
        getattr(matmul, "fp32_precision", None),
    )


def _stream() -> object:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


@dataclass(frozen=True)
class Traced:
    """A model as a graph, and what its nodes do."""

    module: GraphModule
    forms: Mapping[Node, Form]  # the results of nodes that are tensors
    writers: Collection[Node]  # nodes that write to tensors that existed before them
    storages: Mapping[Node, int]  # of the results of nodes that are tensors; 0: an unknown one
    written: Mapping[Node, Collection[int]]  # the storages that these nodes write to

    def is_written_after(self, result: Node, node: Node) -> bool:
        """Whether a node behind another one may write to the memory of a result."""
        own = self.storages.get(result, 0)
        while node.op != "output":
            node = node.next
            found = self.written.get(node, ())
            if own in found or 0 in found or (found and own == 0):
                return True
        return False


def traced(model: nn.Module, example: Any, named: Any, before: Snapshot) -> Traced:
    """The model's graph for such arguments; the modules in it are the model's own.

    Tracing runs the model's code with proxies, which it may keep: the model is put back to
    ``before``.

    Raises:
        Untraceable: there is no graph.
    """
    if has_hooks(model):
        raise Untraceable("the model has hooks, or a forward other than its class's")
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        raise Untraceable("global hooks of modules are registered")
    return traced_part(model, example, named, before)


def traced_part(
    model: nn.Module,
    example: Any,
    named: Any,
    before: Snapshot,
    inlined: Collection[str] | None = None,
    in_place: bool = False,
) -> Traced:
    """The graph of a module's ``forward``; hooks of the module itself are no part of it.

    Args:
        model: the module.
        example: its arguments by position, which may be fake tensors.
        named: its arguments by name.
        before: what the module is put back to.
        inlined: names of those of its modules whose ``forward`` becomes part of the graph; None for
            all that have no hooks.
        in_place: whether the graph has ``x += y`` as it is, instead of ``x = x + y``.

    Raises:
        Untraceable: there is no graph.
    """
    try:
        given = inspect.signature(model.forward).bind(*example, **named)
        given.apply_defaults()
        # Arguments without tensors may decide branches: the graph has them as constants.
        fixed = {name: value for name, value in given.arguments.items() if not tensors_of(value)}
        tracer = _Tracer(
            {one.device.type for one in tensors_of((example, named))}, inlined, in_place
        )
        try:
            graph = tracer.trace(model, fixed)
            _name_placeholders(graph, list(given.signature.parameters))
            # The tracer stores constants as attributes of the model. GraphModule copies them
            # before put_back() removes them.
            module = GraphModule(model, graph, type(model).__name__)
        finally:
            before.put_back()
        values = list(given.arguments.values())
        watch = _WriteWatch()
        interpreter = _NodeResults(module, watch)
        call_without_data(interpreter.run, values, {}, watch=watch)
    except Exception as error:
        raise Untraceable(f"torch.fx cannot trace the model: {tables.error_line(error)}") from error
    if tracer.lost is not None:
        raise Untraceable(f"the model sets {tracer.lost} itself, which torch.fx would lose")
    written = interpreter.written
    return Traced(module, interpreter.forms, written.keys(), interpreter.storages, written)


def _name_placeholders(graph: Graph, names: Sequence[str]) -> None:
    """Gives arguments the model's own names, as torch.fx renames those that are constants.

    Annotations that are strings are dropped: a graph that has them cannot be pickled.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if any(str(node.target).startswith("*") for node in placeholders):
        raise Untraceable("it takes a variable number of arguments")
    for node, name in zip(placeholders, names, strict=True):
        node.target = name
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = None


class _NodeResults(Interpreter):
    """Records the form and the memory of each node's result, and what nodes write to."""

    def __init__(self, module: GraphModule, watch: _WriteWatch) -> None:
        super().__init__(module)
        self._watch = watch
        self.forms: dict[Node, Form] = {}
        self.storages: dict[Node, int] = {}
        self.written: dict[Node, set[int]] = {}

    def run_node(self, n: Node) -> Any:
        self._watch.reset()
        result = super().run_node(n)
        if self._watch.written:
            self.written[n] = self._watch.written
        if isinstance(result, Tensor):
            self.forms[n] = Form.of(result)
            self.storages[n] = self._watch.storage(result)
        return result


class _WriteWatch(TorchDispatchMode):
    """Records which tensors operators write to, as the operators' schemas say.

    Tensors that were made since :meth:`reset` do not count, unless ``new_too`` is set. To tell them
    from others by address, it holds all storages that it sees, so that no address is used twice.
    With ``new_too`` it holds none, so that it does not take memory where tensors have data.
    """

    def __init__(self, new_too: bool = False) -> None:
        super().__init__()
        self._held: list[Any] | None = None if new_too else []
        self.reset()

    def reset(self) -> None:
        self._made: set[int] = set()
        self.written: set[int] = set()  # addresses of storages; 0: an unknown one

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(function, "_schema", None)
        if schema is None:  # a higher-order operator: it may write to anything
            self.written.add(0)
            return function(*args, **kwargs)
        given = set(self._storages((args, kwargs)))
        named = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.update(set(self._storages(named.get(argument.name))) - self._made)
        result = function(*args, **kwargs)
        if self._held is not None:
            self._made.update(set(self._storages(result)) - given - {0})
        return result

    def _storages(self, values: Any) -> Iterator[int]:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                yield self.storage(leaf)

    def storage(self, tensor: Tensor) -> int:
        """The address of the tensor's storage object; 0 if it has none."""
        with suppress(NotImplementedError, RuntimeError):  # a tensor with no storage, or several
            storage = tensor.untyped_storage()
            if self._held is not None:
                self._held.append(storage)
            return storage._cdata
        return 0


def written_tensors(model: nn.Module, run: Callable[[], object], before: Snapshot) -> set[int]:
    """The ids of a model's parameters and buffers that its call writes to or replaces.

    ``run`` calls the model. Its results are of no other use: under a dispatch mode some of
    PyTorch's functions compute differently.
    """
    before.put_back()
    tensors = [*model.parameters(), *model.buffers()]
    watch = _WriteWatch(new_too=True)
    with watch:
        run()
    # The schemas of some operators do not tell that they write to statistics.
    by_value = before.changed_tensors()
    before_run = {id(tensor) for tensor in tensors}
    there = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    by_schema = {id(one) for one in tensors if watch.storage(one) in watch.written - {0}}
    before.put_back()  # the model has the tensors of these ids again
    return by_value | by_schema | (before_run - there)
