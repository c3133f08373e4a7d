"""Checks an installed wheel: `make test-package` runs this beside PyTorch and nothing else.

python tests/api/installed.py
"""

import importlib.metadata
import sysconfig
from pathlib import Path

import torch

import fastconv


def main() -> None:
    """Compares a layer with PyTorch's, forward and backward; raises if anything is wrong."""
    place = Path(fastconv.__file__).resolve()
    assert place.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()), place
    assert importlib.metadata.version("fastconv") == fastconv.__version__
    assert list((place.parent / "kernels").rglob("*.cuh")), "the wheel has no device code"
    options = {"padding": (2, 4), "dilation": (2, 3), "dtype": torch.float64}
    torch.manual_seed(0)
    reference = torch.nn.Conv2d(3, 4, (5, 9), **options)
    layer = fastconv.Conv2d(3, 4, (5, 9), **options)
    layer.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    for ours, theirs in zip(_results(layer, images), _results(reference, images), strict=True):
        torch.testing.assert_close(ours, theirs)
    print(f"fastconv {fastconv.__version__} at {place.parent}: a layer and its gradients are right")


def _results(layer: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """A layer's output and its gradients by the input, the weight and the bias."""
    images = images.clone().requires_grad_()
    output = layer(images)
    return [output, *torch.autograd.grad(output.square().sum(), [images, *layer.parameters()])]


if __name__ == "__main__":
    main()
