"""``fastconv.convert`` makes all layers of a model fastconv's that can be, and nothing else."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.nn import qat, quantized
from torch.ao.quantization import get_default_qat_qconfig
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

import fastconv
from fastconv.network.exchange import reason_to_leave
from network.helpers import EXAMPLE, KINDS, Clock, ResNet, fused, layer_of, ours, times

INPUT = torch.randn(2, 3, 8, 8)


class Own(nn.Conv2d):
    """A class with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Widened(nn.Conv2d):
    """A class that adds to PyTorch's, and computes what that does."""

    factor = 2

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__(channels, self.factor * channels, 3, stride, padding=1)

    @staticmethod
    def shrinks(stride: int) -> bool:
        return stride > 1


class Wider(Widened):
    """Derived once more."""

    factor = 3

    def extra_repr(self) -> str:
        return f"wider, {super().extra_repr()}"


@pytest.mark.parametrize("kind", [Widened, Wider])
def test_classes_that_only_add_to_pytorchs(kind: type[Widened]) -> None:
    layer, images = kind(3, 2), torch.randn(2, 3, 9, 11)
    converted: Any = fastconv.convert(nn.Sequential(layer))
    (one,) = converted
    assert isinstance(one, kind)
    assert isinstance(one, fastconv.Conv2d)
    assert one.shrinks(2)
    assert (type(one).__name__, repr(one)) == (kind.__name__, repr(layer))
    assert kind._conv_forward is not type(one)._conv_forward is fastconv.Conv2d._conv_forward
    torch.testing.assert_close(converted(images), layer(images))
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(copied[0]) is type(one)
        torch.testing.assert_close(copied(images), layer(images))
        (restored,) = fastconv.restore(copied)
        assert type(restored) is kind
        torch.testing.assert_close(restored(images), layer(images))
    with pytest.raises(NotImplementedError, match=rf"__class__ = \S*\.{kind.__name__}$"):
        torch.jit.script(converted)
    parametrize.register_parametrization(one, "weight", nn.Identity())
    torch.testing.assert_close(converted(images), layer(images))
    (restored,) = fastconv.restore(converted)
    assert parametrize.type_before_parametrizations(restored) is kind
    torch.testing.assert_close(restored(images), layer(images))


@pytest.mark.parametrize(
    "own",
    [
        {"forward": lambda self, x: x},
        {"_conv_forward": lambda self, x, weight, bias: x},
        {"stride": property(lambda self: (2, 2), lambda self, value: None)},
        {"dilation": (2, 2)},
        {"__call__": lambda self, x: x},
        {"__getattr__": lambda self, name: nn.Module.__getattr__(self, name)},
        {"__reduce__": lambda self: (nn.Identity, ())},
        {"_padded": lambda self, x: x},
        {"train": lambda self, mode=True: self},
        {"__slots__": ("more",)},
    ],
    ids=lambda own: next(iter(own)),
)
def test_classes_that_change_what_they_add_to(own: dict[str, Any]) -> None:
    changed = type("Changed", (nn.Conv2d,), own)(3, 3, 3)
    assert _left(fastconv.convert(nn.Sequential(changed), inplace=True)) == {
        "0": "of another class, Changed"
    }


def _layer(kind: str = "Conv2d", **arguments: Any) -> Any:
    return layer_of(kind, 3, 3, 3, padding=1, **arguments)


def _left(model: nn.Module) -> dict[str, str]:
    return dict(fastconv.Conversion.of(model).left)


def _assert_same_function(model: nn.Module, other: nn.Module, input: Tensor = INPUT) -> None:
    """Compares results, and the gradients of input and parameters."""
    found = []
    for one in (model, other):
        leaf = input.clone().requires_grad_()
        output = one(leaf)
        wanted = [leaf, *(p for p in one.parameters() if p.requires_grad)]
        found.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# --- What is exchanged ----------------------------------------------------------------------------


def test_a_copy_is_converted(model: ResNet) -> None:
    model.train()
    model.layers.eval()
    before = copy.deepcopy(model.state_dict())
    names = [name for name, one in model.named_modules() if type(one) is nn.Conv2d]
    converted = fastconv.convert(model)
    assert type(converted) is ResNet
    assert ours(model) == []
    assert ours(converted) == names
    assert fastconv.Conversion.of(converted) == fastconv.Conversion(tuple(names), {})
    assert not hasattr(model, "fastconv_conversion")
    assert [one.training for one in converted.modules()] == [m.training for m in model.modules()]
    torch.testing.assert_close(converted.state_dict(), before, rtol=0, atol=0)
    assert not {id(p) for p in converted.parameters()} & {id(p) for p in model.parameters()}
    _assert_same_function(converted.eval(), model.eval())


def test_in_place_all_objects_stay(model: ResNet) -> None:
    model.stem.weight.requires_grad_(False)
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    expected = copy.deepcopy(model).eval()
    assert fastconv.convert(model, inplace=True) is model
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    now = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(now, tensors, strict=True))
    assert not model.stem.weight.requires_grad
    assert type(model.stem) is fastconv.Conv2d
    _assert_same_function(model.eval(), expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_model_itself_is_a_layer(inplace: bool) -> None:
    model = _layer()
    converted = fastconv.convert(model, inplace=inplace)
    assert type(converted) is fastconv.Conv2d
    assert type(model) is (fastconv.Conv2d if inplace else nn.Conv2d)
    assert fastconv.Conversion.of(converted).exchanged == ("",)
    assert type(fastconv.restore(converted)) is nn.Conv2d


@pytest.mark.parametrize("inplace", [False, True])
def test_a_layer_with_several_names_stays_one(inplace: bool) -> None:
    one = _layer()
    tied = _layer()
    tied.weight = one.weight
    model = nn.Sequential(OrderedDict(first=one, second=nn.ReLU(), third=one, tied=tied))
    converted = fastconv.convert(model, inplace=inplace)
    assert converted.first is converted.third
    assert converted.tied.weight is converted.first.weight
    assert fastconv.Conversion.of(converted).exchanged == ("first", "tied")


def test_layers_in_containers() -> None:
    model = nn.ModuleDict({
        "list": nn.ModuleList([_layer(), nn.ReLU()]),
        "dict": nn.ModuleDict({"inner": nn.Sequential(_layer())}),
    })  # fmt: skip
    assert ours(fastconv.convert(model)) == ["list.0", "dict.inner.0"]


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_types_and_devices_stay(mode: Any) -> None:
    layer = nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode, dtype=torch.float64)
    converted = fastconv.convert(layer)
    assert converted.weight.dtype is torch.float64
    _assert_same_function(converted, layer, INPUT.double())
    on_meta = fastconv.convert(nn.Conv2d(3, 3, 3, device="meta"))
    assert on_meta(torch.empty(1, 3, 8, 8, device="meta")).shape == (1, 3, 6, 6)


def test_models_that_share_layers_change_together() -> None:
    shared = _layer()
    first, second = nn.Sequential(shared), nn.Sequential(shared, _layer())
    fastconv.convert(first, inplace=True)
    assert ours(second) == ["0"]
    fastconv.convert(second, inplace=True)
    assert _left(second) == {"0": "fastconv's already"}
    assert fastconv.Conversion.of(second).exchanged == ("1",)
    fastconv.restore(second)
    assert ours(first) == ours(second) == []


# --- What is left ---------------------------------------------------------------------------------


def test_what_is_left_and_why() -> None:
    replaced = _layer()
    replaced.forward = lambda input: input
    model = nn.Sequential(OrderedDict(
        own=Own(3, 3, 3, padding=1), replaced=replaced, ours=fastconv.Conv2d(3, 3, 1),
        lazy=nn.LazyConv2d(3, 1), plain=_layer(), transposed=nn.ConvTranspose2d(3, 3, 1),
    ))  # fmt: skip
    converted = fastconv.convert(model, inplace=True)
    assert _left(converted) == {
        "own": "of another class, Own",
        "replaced": "with a forward of their own",
        "ours": "fastconv's already",
        "lazy": "without sizes until the model is called",
    }
    assert str(fastconv.Conversion.of(converted)).split("\n")[:2] == [
        "2 of 6 layers exchanged for fastconv's",
        "left as they are, of another class, Own: own",
    ]
    assert type(converted.transposed) is fastconv.ConvTranspose2d
    assert type(converted.own) is Own
    converted(INPUT)  # the lazy layer becomes PyTorch's
    assert type(converted.lazy) is nn.Conv2d
    assert fastconv.Conversion.of(fastconv.convert(converted)).exchanged == ("lazy",)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer(name: str) -> None:
    pytorchs, ours = getattr(nn, name), getattr(fastconv, name)
    model = nn.Sequential(pytorchs(3, 3, 3, stride=2), parametrizations.weight_norm(
        pytorchs(3, 3, 2)
    ))  # fmt: skip
    input = KINDS[name]
    expected = model(input)
    converted = fastconv.convert(model)
    assert fastconv.Conversion.of(converted).exchanged == ("0", "1")
    assert type(converted[0]) is ours
    assert isinstance(converted[1], ours)
    torch.testing.assert_close(converted(input), expected)
    restored = fastconv.restore(converted)
    assert type(restored[0]) is pytorchs
    assert not isinstance(restored[1], ours)
    torch.testing.assert_close(restored(input), expected)


def test_types_and_devices_that_fastconv_lacks_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(_layer(), nn.Conv2d(3, 3, 1, dtype=torch.float64))
    with monkeypatch.context() as patch:
        patch.setattr("fastconv.network.conversion.DTYPES", {torch.float32})
        assert _left(fastconv.convert(model)) == {"1": "with weights of torch.float64"}
    with monkeypatch.context() as patch:
        patch.setattr("fastconv.network.conversion._DEVICES", {"cuda"})
        assert _left(fastconv.convert(model)) == {"0": "on cpu", "1": "on cpu"}


def test_no_convolutions() -> None:
    report = fastconv.Conversion.of(fastconv.convert(nn.Linear(2, 2)))
    assert str(report) == (
        "the model has no convolutions that fastconv computes: it was left as it was"
    )
    with pytest.raises(ValueError, match=r"no attribute fastconv_conversion of a Conversion"):
        fastconv.Conversion.of(nn.Linear(2, 2))


def test_layers_that_are_trained_for_quantization_are_left() -> None:
    layer = qat.Conv2d(3, 3, 1, qconfig=get_default_qat_qconfig("fbgemm"))
    converted = fastconv.convert(nn.Sequential(layer))
    assert type(converted[0]) is qat.Conv2d
    assert _left(converted) == {"0": f"of another class, {qat.Conv2d.__module__}.Conv2d"}
    assert not issubclass(quantized.Conv2d, nn.Conv2d)  # so it is no layer to exchange


def _scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has deprecated it
        return torch.jit.script(model)


def test_what_torchscript_has_compiled_is_left() -> None:
    model = nn.Sequential(_scripted(nn.Sequential(_layer())), _layer())
    converted = fastconv.convert(model, inplace=True)
    assert _left(converted) == {"0.0": "of another class, RecursiveScriptModule"}
    assert ours(converted) == ["1"]
    with pytest.raises(ValueError, match=r"before torch\.jit compiles it"):
        fastconv.convert(_scripted(_layer()))


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"convert\(\) takes a torch\.nn\.Module, not str"):
        fastconv.convert("model")


# --- Hooks and parametrizations -------------------------------------------------------------------


def test_hooks_stay() -> None:
    model, called = nn.Sequential(_layer()), list[str]()
    layer = model[0]
    layer.register_forward_pre_hook(lambda *_: called.append("pre"))
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: called.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: called.append("state dict"))
    layer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    fastconv.convert(model, inplace=True)(INPUT.clone().requires_grad_()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert called == ["pre", "forward", "backward pre", "backward", "state dict", "load"]


def _older_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has deprecated it
        return nn.utils.weight_norm(layer)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "older weight_norm": _older_norm,
    "older spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_weights_that_are_computed(norm: Callable[[nn.Module], nn.Module], kind: str) -> None:
    model, input = nn.Sequential(norm(_layer(kind))).eval(), KINDS[kind]
    keys, expected = list(model.state_dict()), model(input).detach()
    converted = fastconv.convert(model, inplace=True)
    assert ours(converted) == ["0"]
    assert list(converted.state_dict()) == keys
    output = converted(input)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(one.grad is not None for one in converted.parameters())
    restored = fastconv.restore(converted)
    assert ours(restored) == []
    torch.testing.assert_close(restored(input), expected)


def test_parametrizations_are_removed_as_before() -> None:
    model = parametrizations.weight_norm(_layer())
    parametrize.register_parametrization(model, "bias", nn.Softplus())
    other = fastconv.convert(model)
    expected = model(INPUT)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(other, name)
    assert type(other) is fastconv.Conv2d
    torch.testing.assert_close(other(INPUT), expected)
    assert type(fastconv.restore(other)) is nn.Conv2d
    torch.testing.assert_close(model(INPUT), expected)  # its class has its properties still


def test_parametrizations_that_come_later() -> None:
    model = parametrizations.weight_norm(fastconv.convert(_layer()))
    assert repr(model).startswith("fastconv.ParametrizedConv2d(")
    expected = model(INPUT)
    fastconv.restore(model)
    assert not isinstance(model, fastconv.Conv2d)
    assert parametrize.type_before_parametrizations(model) is nn.Conv2d
    torch.testing.assert_close(model(INPUT), expected)


# --- Copies, and what comes after -----------------------------------------------------------------


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved_and_loaded,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_can_be_restored(duplicate: Callable[[Any], Any]) -> None:
    converted = fastconv.convert(nn.Sequential(_layer(), fastconv.Conv2d(3, 3, 1)))
    twin = duplicate(converted)
    assert fastconv.Conversion.of(twin) == fastconv.Conversion.of(converted)
    assert ours(fastconv.restore(twin)) == ["1"]  # it was built with that one
    assert not hasattr(twin, "fastconv_conversion")
    assert ours(converted) == ["0", "1"]
    _assert_same_function(twin, converted)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(_older_norm(_layer()))  # PyTorch copies no tensor with a history
    with pytest.raises(RuntimeError, match=r"convert\(\) cannot copy the model: .* inplace=True"):
        fastconv.convert(model)
    assert ours(model) == []


def test_a_model_is_converted_after_it_was_traced() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(_layer(), nn.ReLU()))
    converted = fastconv.convert(model)
    assert ours(converted) == ["0"]
    _assert_same_function(converted, model)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiled_model_is_compiled_anew(inplace: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled: Any = torch.compile(nn.Sequential(_layer()), backend=backend)
    expected = compiled(INPUT)
    converted = fastconv.convert(compiled, inplace=inplace)
    torch.testing.assert_close(converted(INPUT), expected)
    assert "torch.ops.fastconv.forward" in str(graphs[-1].graph)
    fastconv.restore(converted)
    converted(INPUT)
    assert len({str(graph.graph) for graph in graphs}) == 2
    torch.compiler.reset()


def test_an_optimizer_keeps_its_parameters() -> None:
    model = nn.Sequential(_layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastconv.convert(model, inplace=True)(INPUT).square().sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not model[0].weight.equal(before)


# --- Beside optimize ------------------------------------------------------------------------------


def test_what_optimize_has_left_is_converted(clock: Clock, model: ResNet) -> None:
    clock.gains = lambda call: times(2.0, 1.0) if call.weight.shape[2] == 3 else times(1.0, 2.0)
    with torch.no_grad():
        optimized = fastconv.optimize(model.eval(), EXAMPLE, fuse=False)
    some, convolutions = ours(optimized), 8
    converted = fastconv.convert(optimized)
    assert 0 < len(some) < convolutions
    assert fastconv.Conversion.of(converted).exchanged == tuple(
        name for name in ours(converted) if name not in some
    )
    fastconv.restore(converted)
    assert ours(converted) == []
    assert not hasattr(converted, "fastconv_optimization")


def test_a_fused_model_stays_fused(clock: Clock, model: ResNet) -> None:
    optimized = fused(model, EXAMPLE)
    converted = fastconv.convert(optimized)
    assert set(_left(converted).values()) <= {"fastconv's already"}
    with pytest.raises(ValueError, match="cannot take a fused model apart"):
        fastconv.restore(converted)


def test_layers_that_are_ours_already_have_that_reason_first() -> None:
    assert reason_to_leave(parametrizations.weight_norm(fastconv.Conv2d(3, 3, 1))) == (
        "fastconv's already"
    )


# --- Several processes ----------------------------------------------------------------------------


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    if not dist.is_gloo_available():
        pytest.skip("PyTorch has no gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_a_model_in_ddp() -> None:
    plain = nn.Sequential(_layer())
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    fastconv.convert(model, inplace=True)
    assert ours(model) == ["module.0"]
    output = model(INPUT)
    output.sum().backward()
    torch.testing.assert_close(output, plain(INPUT))
    assert model.module[0].weight.grad is not None


@pytest.mark.usefixtures("_one_process")
def test_a_model_in_fsdp() -> None:
    plain = nn.Sequential(_layer(), _layer())
    mesh = dist.init_device_mesh("cpu", (1,))
    model = copy.deepcopy(plain)
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fastconv.convert(model, inplace=True)
    assert _left(model) == {"1": "of another class, FSDPConv2d"}
    torch.testing.assert_close(model(INPUT), plain(INPUT))
    assert ours(fastconv.restore(model)) == []


@pytest.mark.usefixtures("_one_process")
def test_layers_of_another_class_since_are_not_restored() -> None:
    model = fastconv.convert(nn.Sequential(_layer(), _layer()))
    fully_shard(model[1], mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"cannot make 1 PyTorch's again: .* become FSDPConv2d"):
        fastconv.restore(model)
    assert ours(model) == ["0", "1"]
