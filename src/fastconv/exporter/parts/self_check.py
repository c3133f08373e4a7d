"""Compares an exported model with PyTorch: results and speed."""

import copy
import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastconv.exporter.parts.runtime import PRECISION, Conv2d, missing_gpu

# The largest error relative to the norm, by precision. TF32 has a mantissa of 10 bits.
TOLERANCE = {"ieee": 1e-5, "tf32": 1e-3}


def pytorch_twin(module: nn.Module) -> nn.Module:
    """A copy of the module with PyTorch's convolutions and the same parameters."""
    if isinstance(module, Conv2d):
        names = ("kernel_size", "stride", "padding", "dilation")
        sizes = {name: getattr(module, name) for name in names}
        layer = nn.Conv2d(
            module.in_channels, module.out_channels, groups=module.groups,
            bias=module.bias is not None, **sizes,
        )  # fmt: skip
        layer.load_state_dict(module.state_dict())
        return layer.to(module.weight)
    twin = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(twin, name, pytorch_twin(child))
    return twin


def results(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    model.zero_grad()
    y = model(*inputs)
    y.backward(torch.linspace(-1, 1, y.shape[-1], device=y.device).expand(y.shape))
    found = {"output": y.detach()}
    found.update((f"gradient of input {i}", x.grad) for i, x in enumerate(inputs))
    found.update((f"gradient of {name}", p.grad) for name, p in model.named_parameters())
    return found


def milliseconds(step: Callable[[], object], repeats: int = 10) -> float:
    """The median time of a step on the GPU, after three warm-up steps."""
    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def self_check(model: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Prints a model's errors and speed-up on inputs of these shapes, in both precisions.

    Raises an AssertionError if it differs from PyTorch by more than rounding errors. Exits with a
    message if there is no GPU.
    """
    missing = missing_gpu()
    if missing is not None:
        raise SystemExit(missing)
    model = model.cuda()
    twin = pytorch_twin(model)
    inputs = [torch.randn(shape, device="cuda") for shape in shapes]
    torch.backends.cudnn.benchmark = True  # let cuDNN choose its fastest algorithm
    for precision, tolerance in TOLERANCE.items():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        tolerance = max(tolerance, TOLERANCE[PRECISION or precision])
        ours, theirs = results(model, inputs), results(twin, inputs)
        for name, expected in theirs.items():
            error = (torch.norm(ours[name] - expected) / torch.norm(expected)).item()
            print(f"{precision}  {name} differs by {error:.1e} of its norm")
            assert error < tolerance, f"{name} differs by {error:.1e}, more than {tolerance}"
        del ours, theirs
        with torch.no_grad():
            report(precision, "forward", model, twin, lambda m: m(*inputs))
        report(precision, "forward and backward", model, twin, lambda m: results(m, inputs))


def report(
    precision: str,
    what: str,
    model: nn.Module,
    twin: nn.Module,
    step: Callable[[nn.Module], object],
) -> None:
    """Prints the time that a step takes with the model and with PyTorch."""
    ours, theirs = (milliseconds(functools.partial(step, m)) for m in (model, twin))
    speed_up = theirs / ours
    print(f"{precision}  {what}: {ours:.2f} ms, PyTorch {theirs:.2f} ms, speed-up {speed_up:.2f}")
