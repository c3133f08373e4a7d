"""What ``optimize`` fuses in training, and models that would break it. A CPU is the GPU."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv.backends.batchnorm import launches
from fastconv.network import training_graph
from fastconv.network.block_calls import BlockCall
from fastconv.network.calls import Times
from fastconv.network.preparation import needs_of
from fastconv.ops import batchnorm_schema
from network.helpers import (
    EXAMPLE,
    KINDS,
    Block,
    Clock,
    ResNet,
    layer_of,
    norm_calls,
    norm_for,
    ours,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")

IMAGES = torch.randn(4, 3, 9, 9)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Hides objects that were there before: a dry run looks at all for what it has left behind.

    In a run of all tests, that would take most of the time. ``test_dry_run_objects`` tests it.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def _blocks() -> nn.Sequential:
    """Two residual blocks, with five BatchNorms, in training."""
    return nn.Sequential(Block(3, 4, 2), Block(4, 4)).train()


def _step(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Output, gradients and buffers of a step."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(*args, **kwargs)
    output.float().square().mean().backward()
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    return [
        output.detach().clone(),
        *(g.clone() for g in grads),
        *(b.clone() for b in model.buffers()),
    ]


def _is_fused(model: nn.Module, *args: Any) -> int:
    return norm_calls(lambda: model(*args))["forward"]


def _same(model: nn.Module, *examples: Tensor) -> nn.Module:
    """The optimized model, whose steps have to give what those of the model do."""
    model.train()
    optimized = fastconv.optimize(model, examples[0])
    for example in examples:
        for found, expected in zip(_step(optimized, example), _step(model, example), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    return optimized


def test_a_residual_network(clock: Clock) -> None:
    model = ResNet()
    keys = list(model.state_dict())
    tree = [name for name, _ in model.named_modules()]
    optimized = _same(model, EXAMPLE, torch.randn(3, 3, 12, 8))
    assert norm_calls(lambda: _step(optimized, EXAMPLE)) == {"forward": 7, "backward": 7}
    assert [type(one).__name__ for one in optimized.layers] == ["Block"] * 3
    assert all(isinstance(one, Block) for one in optimized.layers)
    assert list(optimized.state_dict()) == keys
    assert [name for name, _ in optimized.named_modules()] == tree
    found = report(optimized)
    followed = {name: row.followed_by for row in found.blocks for name in row.fused}
    assert followed["layers.0.bn2"] == "addition, relu"
    assert followed["layers.1.downsample.1"] == ""
    assert len(followed) == 7
    assert "7 of 7 BatchNorms computed with what follows them" in str(found)
    assert not any("BatchNorm" in call.kind for call in clock.seen)


def test_prepare_finds_the_kernels_of_blocks() -> None:
    optimized = fastconv.optimize(_blocks(), EXAMPLE)
    asked = needs_of(optimized, (EXAMPLE,), {})
    norms = [need for need in asked if isinstance(need, launches.Need)]
    # Of the five BatchNorms, two pairs are called alike.
    alone, last, shortcut = ("relu", False), ("relu", True), ("identity", False)
    found = sorted((one.call.activation, one.call.residual) for one in norms)
    assert found == sorted(2 * [alone, last, shortcut])  # forward and backward


def test_checkpoints_copies_pickles_and_eval() -> None:
    model = _blocks()
    optimized = fastconv.optimize(model, EXAMPLE)
    optimized.load_state_dict(model.state_dict())
    for one in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert _is_fused(one, EXAMPLE) == 5
        one[0].bn1.weight.data.zero_()  # the copy has parameters of its own
        torch.testing.assert_close(_step(optimized, EXAMPLE), _step(model, EXAMPLE))
        model.load_state_dict(optimized.state_dict())
        assert not torch.equal(one(EXAMPLE), optimized(EXAMPLE))
        model.load_state_dict(optimized.state_dict())
    assert _is_fused(optimized.eval(), EXAMPLE) == 0
    torch.testing.assert_close(optimized(EXAMPLE), model.eval()(EXAMPLE), rtol=1e-4, atol=1e-4)
    assert _is_fused(optimized.train(), EXAMPLE) == 5
    restored = fastconv.restore(optimized)
    assert [type(one) for one in restored] == [Block] * 2
    assert _is_fused(restored, EXAMPLE) == 0
    assert not any(name.startswith("_fastconv") for one in restored.modules() for name in vars(one))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False, "eps": 1e-2},
    ],
)
def test_options_of_norms(options: dict[str, Any]) -> None:
    optimized = _same(
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, **options), nn.SiLU()), IMAGES, IMAGES
    )
    assert _is_fused(optimized, IMAGES) == 1


def test_a_frozen_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).train()
    model[1].eval()
    model[1].running_mean.normal_()
    optimized = fastconv.optimize(model, IMAGES)
    torch.testing.assert_close(_step(optimized, IMAGES), _step(model, IMAGES), rtol=1e-4, atol=1e-5)
    assert _is_fused(optimized, IMAGES) == 1
    optimized[1].train(), model[1].train()
    torch.testing.assert_close(_step(optimized, IMAGES), _step(model, IMAGES), rtol=1e-3, atol=1e-4)


class Readers(nn.Module):
    """The ReLU in place changes what is read besides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        before = self.bn(self.conv(x))
        after = self.act(before)
        return after + 2 * before


class Twice(nn.Module):
    """The same BatchNorm normalizes two layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.first(x))) + torch.relu(self.bn(self.second(x)))


class Drops(nn.Module):
    """Layers are skipped at random, as in stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.5:
            return x
        return torch.relu(self.inner(x) + x)


class Scheduled(nn.Module):
    """Its forward reads an attribute that the training loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.scale = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x))) * self.scale


class Checks(nn.Module):
    """Checkpointed layers, whose graph would keep what the checkpoint does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + 1


FACTOR = 2.0


class Methods(nn.Module):
    """Its forward calls another method, which reads a variable of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.bn(self.conv(x)))

    def tail(self, x: Tensor) -> Tensor:
        return torch.relu(x) * FACTOR


class Asks(nn.Module):
    """A branch that a graph's placeholders would take the wrong way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn(self.conv(x)))
        return out * 2 if isinstance(x, Tensor) else out


@pytest.mark.parametrize(
    ("kind", "fused"),
    [(Readers, 1), (Twice, 0), (Scheduled, 1), (Checks, 1), (Methods, 1), (Asks, 0)],
)
def test_models_that_would_break_it(kind: type[nn.Module], fused: int) -> None:
    optimized = _same(kind(), IMAGES, IMAGES.flip(0))
    assert _is_fused(optimized, IMAGES) == fused


class Writes(nn.Module):
    """What follows an activation writes to its result or to the residual, as PyTorch's allows."""

    def __init__(self, activation: nn.Module, to_residual: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), activation
        self.to_residual = to_residual

    def forward(self, x: Tensor) -> Tensor:
        residual = x * 2
        out = self.act(self.bn(self.conv(x)) + residual)
        written = residual if self.to_residual else out
        written += 1
        return out + residual


WRITTEN = [
    (nn.LeakyReLU(0.1), False), (nn.ReLU6(), False), (nn.SiLU(), True), (nn.GELU(), True),
    (nn.Hardswish(), True), (nn.LeakyReLU(-0.1), True),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "to_residual"), WRITTEN, ids=str)
def test_what_a_block_keeps_may_be_written_to(activation: nn.Module, to_residual: bool) -> None:
    optimized = _same(Writes(activation, to_residual), IMAGES)
    assert _is_fused(optimized, IMAGES) == 1
    assert report(optimized).blocks[0].followed_by == "addition"
    kept = _same(Writes(activation, not to_residual), IMAGES)
    assert "addition, " in report(kept).blocks[0].followed_by


def test_writes_that_no_graph_shows() -> None:
    """A block's result is the module's own, and another one writes to it."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(self.bn(self.conv(x)) + x)

    optimized = _same(nn.Sequential(Leaky(), Adds()), IMAGES)
    assert _is_fused(optimized, IMAGES) == 0
    assert any("its step fails" in note for note in report(optimized).notes)


def test_a_branch_taken_at_random_is_no_part_of_a_graph() -> None:
    optimized = fastconv.optimize(Drops().train(), IMAGES)
    results = [torch.equal(optimized(IMAGES), IMAGES) for _ in range(40)]
    assert {True, False} == set(results)


def test_attributes_that_change_later() -> None:
    model = Scheduled().train()
    optimized = fastconv.optimize(model, IMAGES)
    assert _is_fused(optimized, IMAGES) == 1
    before = optimized(IMAGES)
    optimized.scale = 3.0
    assert _is_fused(optimized, IMAGES) == 0
    torch.testing.assert_close(optimized(IMAGES), 3 * before)
    optimized.scale = 1.0
    assert _is_fused(optimized, IMAGES) == 1


@pytest.mark.parametrize("at", ["conv", "bn", ""])
def test_hooks_that_are_registered_later_run(at: str) -> None:
    optimized = fastconv.optimize(Scheduled().train(), IMAGES)
    seen: list[str] = []
    handle = optimized.get_submodule(at).register_forward_hook(lambda *_: seen.append(at))
    optimized(IMAGES)
    assert seen == [at]
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    optimized(IMAGES)
    handle.remove()
    assert "BatchNorm2d" in seen
    assert _is_fused(optimized, IMAGES) == 1


def test_modules_that_are_exchanged_later_are_called() -> None:
    optimized = fastconv.optimize(Scheduled().train(), IMAGES)
    optimized.bn = nn.Identity()
    assert _is_fused(optimized, IMAGES) == 0
    torch.testing.assert_close(optimized(IMAGES), torch.relu(optimized.conv(IMAGES)))


def test_other_kinds_of_norms_are_left_and_named() -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), Own(3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
    )
    model[4].register_forward_hook(lambda *_: None)
    optimized = _same(model, IMAGES)
    assert _is_fused(optimized, IMAGES) == 0
    left = report(optimized).left
    assert left["1"] == "of another class, Own"
    assert left["4"].startswith("with hooks")


def test_sync_batch_norms_are_left() -> None:
    """Whatever follows them; in training they would need a GPU."""
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3).eval(), nn.ReLU(),
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(),
    )  # fmt: skip
    optimized = fastconv.optimize(model, IMAGES)
    torch.testing.assert_close(optimized(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)
    assert _is_fused(optimized, IMAGES) == 1
    assert report(optimized).left["1"].startswith("statistics of several processes")


def test_a_convolution_may_stay_pytorchs(clock: Clock) -> None:
    clock.gains = lambda call: times(1, 2)
    optimized = _same(_blocks(), EXAMPLE)
    assert ours(optimized) == []
    assert _is_fused(optimized, EXAMPLE) == 5


def test_blocks_that_gain_nothing_are_left(clock: Clock) -> None:
    clock.of_blocks = lambda call: times(2, 1) if call.residual else times(1, 2)
    optimized = fastconv.optimize(_blocks(), EXAMPLE)
    assert _is_fused(optimized, EXAMPLE) == 2
    clock.of_blocks = lambda call: times(1, 2)
    assert not any(map(training_graph.has_blocks, optimized[0].children()))
    alone = fastconv.optimize(_blocks(), EXAMPLE, fuse=False)
    assert _is_fused(alone, EXAMPLE) == 0
    assert not any(map(training_graph.has_blocks, alone.modules()))


def test_a_whole_model_that_gains_nothing_is_tried_without_blocks(clock: Clock) -> None:
    clock.wholes = [times(1, 2)]
    optimized = fastconv.optimize(_blocks(), EXAMPLE)
    assert _is_fused(optimized, EXAMPLE) == 0
    assert ours(optimized)
    assert "not fused: the model as a whole is not faster when fused" in str(report(optimized))


def test_a_wrong_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fastconv.network.block_comparison.bn_act
    monkeypatch.setattr(fastconv.batchnorm, "batch_norm_act", lambda *a, **k: _wrong(*a, **k))
    optimized = fastconv.optimize(Scheduled().train(), IMAGES)
    assert right is fastconv.batchnorm.bn_act
    assert "times what rounding can do" in str(report(optimized))
    assert not training_graph.has_blocks(optimized)


def _wrong(*args: Any, **named: Any) -> Tensor:
    output = fastconv.functional.conv2d.__globals__["torch"].nn.functional.batch_norm(*args[:8])
    return torch.relu(output) * 1.001


class Branch(nn.Module):
    """A block with a residual, of so many axes; its convolution may be a transposed one."""

    def __init__(self, axes: int, transposed: bool) -> None:
        super().__init__()
        kind = f"Conv{'Transpose' * transposed}{axes}d"
        self.conv = getattr(nn, kind)(3, 3, 3, padding=1)
        self.bn = getattr(nn, f"BatchNorm{axes}d")(3)

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(self.bn(self.conv(input)) + input, 0.2)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("axes", [1, 3])
def test_sequences_and_volumes(axes: int, transposed: bool, last: bool) -> None:
    example = torch.randn(4, 3, *(6, 5, 4)[:axes])
    if last:
        example = example.movedim(1, -1).contiguous().movedim(-1, 1)
    optimized = _same(nn.Sequential(Branch(axes, transposed), Branch(axes, False)), example)
    assert norm_calls(lambda: _step(optimized, example)) == {"forward": 2, "backward": 2}
    code = [vars(block)["_fastconv_training_graph"].source for block in optimized.children()]
    assert ["conv_of_bn_act" in one for one in code] == [not transposed, True]
    assert optimized(example).stride() == example.stride()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_that_differs_from_when_it_was_optimized(dtype: torch.dtype | None) -> None:
    """Outside of autocast, the residual has another type than the BatchNorm's output."""
    model = Block(3, 3).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        optimized = fastconv.optimize(model, IMAGES)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = optimized(IMAGES), model(IMAGES)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d"])
def test_convolutions_that_gain_only_with_their_batch_norm(kind: str, clock: Clock) -> None:
    """They leave statistics in 16 bits; what has no block, or a slow one, is judged alone."""
    model = nn.Sequential(
        layer_of(kind, 3, 4, 3), norm_for(kind, 4), nn.ReLU(),
        layer_of(kind, 4, 6, 1), norm_for(kind, 6),
        layer_of(kind, 6, 8, 1), norm_for(kind, 8),
        layer_of(kind, 8, 5, 1), nn.ReLU(),
    ).train()  # fmt: skip
    clock.gains = lambda call: times(2, 1) if call.weight.shape[0] == 6 else times(1.5, 2)
    clock.of_blocks = lambda call: times(1, 2) if call.input.shape[1] == 8 else times(2, 1)
    clock.together = lambda call: times(3, 2)
    example = KINDS[kind]
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            optimized = fastconv.optimize(model, example)
        assert ours(optimized) == (["0", "3"] if half else ["3"])
        # The second convolution gains alone, and the third one's BatchNorm is slow.
        assert [call.conv.weight.shape[0] for call in clock.pairs] == ([4] if half else [])
    together, alone, *_ = report(optimized).layers
    assert together.why == ("1.50x as fast with its BatchNorm; alone it takes 1.33 times as long")
    assert (together.exchanged, alone.why) == (1, "2.00x as fast")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _step(optimized, example), _step(model, example)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_a_block_that_cannot_be_measured(clock: Clock) -> None:
    def fail(call: BlockCall) -> Times:
        raise RuntimeError("out of memory")

    clock.gains, clock.together = lambda call: times(1, 2), fail
    model = nn.Sequential(layer_of("Conv2d", 3, 4, 3), norm_for("Conv2d", 4)).train()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == []
    assert (
        "0 was not measured with its BatchNorm: RuntimeError: out of memory"
        in report(optimized).notes
    )


class Same(nn.Conv2d):
    """A layer as those of torchvision's video networks: a class that adds a constructor."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, bias=False)


def test_convolutions_of_a_derived_class() -> None:
    model = nn.Sequential(Same(3), nn.BatchNorm2d(3), nn.ReLU(), Same(3))
    optimized = _same(model, EXAMPLE)
    assert ours(optimized) == ["0", "3"]
    assert all(isinstance(optimized[at], Same) for at in (0, 3))
    assert "conv_of_bn_act" in vars(optimized)["_fastconv_training_graph"].source
    expected = _step(model, EXAMPLE)
    for one in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert ours(one) == ["0", "3"]
        for found, other in zip(_step(one, EXAMPLE), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-4)
    restored = fastconv.restore(optimized)
    assert [type(restored[at]) for at in (0, 3)] == [Same, Same]
    with torch.no_grad():
        fused = fastconv.optimize(model.eval(), EXAMPLE)
        assert report(fused).fused
        torch.testing.assert_close(fused(EXAMPLE), model(EXAMPLE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", ["conv", "norm", "both"])
def test_blocks_whose_parameters_are_partly_frozen(frozen: str, clock: Clock) -> None:
    conv, norm = layer_of("Conv2d", 3, 4, 3), norm_for("Conv2d", 4)
    for module in (conv, norm):
        module.requires_grad_(frozen not in ("both", "conv" if module is conv else "norm"))
    clock.gains, clock.together = lambda call: times(1, 2), lambda call: times(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(fastconv.optimize(nn.Sequential(conv, norm).train(), EXAMPLE)) == ["0"]
    assert len(clock.pairs) == 1


def _compiled(model: Any, backend: str) -> tuple[Any, CompileCounterWithBackend]:
    """A model as ``torch.compile`` makes it in one graph, and a counter of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


needs_compiled = pytest.mark.skipif(
    not training_graph.COMPILED, reason="this PyTorch does not trace training graphs"
)


def _norms_in(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is batchnorm_schema.forward for node in graph.graph.nodes)


@needs_compiled
def test_compiled_models_run_blocks() -> None:
    """Also with batches of other sizes, for which a graph is made once."""
    model = Scheduled().train()
    optimized = fastconv.optimize(model, IMAGES)
    compiled, counter = _compiled(optimized, "aot_eager")
    for size in (4, 3, 5):
        images = torch.randn(size, 3, 9, 9)
        for found, expected in zip(_step(compiled, images), _step(model, images), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert [_norms_in(graph) for graph in counter.graphs] == [1, 1]
    assert int(optimized.bn.num_batches_tracked) == 3


@needs_compiled
def test_compiled_models_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph depends on is guarded: the model's own code is compiled where it changes."""
    optimized = fastconv.optimize(Methods().train(), IMAGES)
    compiled, counter = _compiled(optimized, "eager")
    before = compiled(IMAGES)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    torch.testing.assert_close(compiled(IMAGES), 1.5 * before)
    assert [_norms_in(graph) for graph in counter.graphs] == [1, 0]
    optimized = fastconv.optimize(Scheduled().train(), IMAGES)
    compiled, counter = _compiled(optimized, "eager")
    before = compiled(IMAGES)
    optimized.scale = 3.0
    torch.testing.assert_close(compiled(IMAGES), 3 * before)
    assert [_norms_in(graph) for graph in counter.graphs] == [1, 0]
    optimized.scale = 1.0
    compiled(IMAGES)
    assert counter.frame_count == 2
    for change in (optimized.eval, optimized.train, optimized.bn.eval):
        change()
        torch.testing.assert_close(compiled(IMAGES), optimized(IMAGES))
    optimized.bn = nn.Identity()
    torch.testing.assert_close(compiled(IMAGES), torch.relu(optimized.conv(IMAGES)))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_exported_models_have_their_own_code(strict: bool) -> None:
    optimized = fastconv.optimize(Scheduled().train(), IMAGES)
    program = torch.export.export(optimized, (IMAGES,), strict=strict)
    assert _norms_in(program.graph_module) == 0


def _recomputed(model: nn.Module) -> list[int]:
    """How many inputs of convolutions the graph of each module computes again."""
    graphs = [vars(one).get("_fastconv_training_graph") for one in model.modules()]
    return [graph.source.count("recomputes = True") for graph in graphs if graph is not None]


def test_activations_that_are_computed_again() -> None:
    """Those of a block without a residual, which the convolution of another block alone reads."""
    model = _blocks()
    optimized = fastconv.optimize(model, EXAMPLE, recompute=True)
    assert _recomputed(optimized) == [1, 1]
    assert "2 activations are computed again in backward passes" in str(report(optimized))
    for found, expected in zip(_step(optimized, EXAMPLE), _step(model, EXAMPLE), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert _recomputed(pickle.loads(pickle.dumps(optimized))) == [1, 1]
    assert _recomputed(fastconv.optimize(model, EXAMPLE)) == [0, 0]
    conv, norm = nn.Conv2d, nn.BatchNorm2d
    chain = nn.Sequential(
        conv(3, 4, 3), norm(4), nn.ReLU(), conv(4, 4, 3), norm(4), conv(4, 4, 1), norm(4),
        nn.SiLU(), nn.MaxPool2d(2), conv(4, 4, 1), norm(4),
    )  # fmt: skip
    assert _recomputed(fastconv.optimize(chain.train(), EXAMPLE, recompute=True)) == [2]
    readers = fastconv.optimize(Readers().train(), IMAGES, recompute=True)
    assert _recomputed(readers) == [0] * len(_recomputed(readers))
