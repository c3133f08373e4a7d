"""Checks the Python code of layers beside Conv2d in an exported file, on the CPU.

As :mod:`exported_file`, it needs nothing but torch:

    python tests/api/exported_layers.py FILE
"""

import sys

import torch
from torch import nn

from exported_file import load, on_cpu, raises

# A layer's class, its arguments, and the shape of its input.
LAYERS = {
    "sequence": ("Conv1d", (8, 16, 5), {"padding": 2}, (2, 8, 96)),
    "strided sequence": (
        "Conv1d", (6, 9, (3,)), {"stride": (2,), "padding": 3, "dilation": [2], "groups": 3},
        (2, 6, 31),
    ),
    "depthwise sequence": ("Conv1d", (6, 6, 4), {"padding": 3, "groups": 6}, (2, 6, 40)),
    "transposed sequence": (
        "ConvTranspose1d", (16, 8, 4), {"stride": 2, "padding": 1}, (2, 16, 48)
    ),
    "sequence with output padding": (
        "ConvTranspose1d", (4, 6, 3),
        {"stride": 3, "output_padding": 2, "groups": 2, "bias": False}, (2, 4, 11),
    ),
    "sequence beyond its weight": (
        "ConvTranspose1d", (4, 6, 3), {"padding": 1, "output_padding": 2, "dilation": 3}, (2, 4, 9)
    ),
    "transposed": (
        "ConvTranspose2d", (16, 8, 3), {"stride": 2, "padding": 1, "output_padding": 1},
        (2, 16, 6, 20),
    ),
    "positions without taps": (
        "ConvTranspose2d", (8, 12, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 1), "groups": 2,
         "dilation": (2, 1)},
        (2, 8, 5, 7),
    ),
    "output beyond its weight": (
        "ConvTranspose2d", (4, 6, (3, 1)),
        {"padding": (1, 2), "output_padding": (2, 3), "dilation": (3, 4)}, (2, 4, 5, 6),
    ),
    "volume": (
        "Conv3d", (4, 6, (3, 2, 3)),
        {"stride": (1, 2, 1), "padding": (2, 0, 1), "dilation": (2, 1, 1), "groups": 2},
        (2, 4, 5, 6, 8),
    ),
    "transposed volume": (
        "ConvTranspose3d", (4, 6, (3, 2, 1)),
        {"stride": (2, 2, 3), "padding": (1, 0, 0), "output_padding": (1, 0, 2), "groups": 2},
        (2, 4, 3, 4, 3),
    ),
    "volume beyond its weight": (
        "ConvTranspose3d", (4, 2, (2, 1, 3)),
        {"padding": (1, 0, 1), "output_padding": (1, 0, 2), "dilation": (2, 1, 3)},
        (1, 4, 3, 4, 3),
    ),
    "images": ("Conv2d", (4, 6, (3, 2)), {"stride": 2, "padding": 1}, (2, 4, 9, 8)),
}  # fmt: skip


def pair(module, name):
    """A layer of the file and PyTorch's with the same parameters, and an input."""
    kind, arguments, options, shape = LAYERS[name]
    ours, theirs = (
        getattr(where, kind)(*arguments, **options) for where in (module, nn)
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, torch.randn(shape)


def formats(x):
    """The input, contiguous and with channels last."""
    return x, x.movedim(1, -1).contiguous().movedim(-1, 1)


def check_parameters(module):
    for name in LAYERS:
        kind, arguments, options, _ = LAYERS[name]
        states = []
        for where in (module, nn):
            torch.manual_seed(3)
            states.append(getattr(where, kind)(*arguments, **options).state_dict())
        ours, theirs = states
        assert list(ours) == list(theirs), name
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def check_results(module):
    on_cpu(module)
    for name in LAYERS:
        ours, theirs, images = pair(module, name)
        for x in formats(images):
            x = x.detach().requires_grad_()
            y, expected = ours(x), theirs(x)
            assert torch.allclose(y, expected, atol=1e-5), name
            if y.dim() == 4:
                assert y.stride() == expected.stride(), name
            results = []
            for layer, output in ((ours, y), (theirs, expected)):
                inputs = [x, *layer.parameters()]
                results.append(torch.autograd.grad(output.square().sum(), inputs))
            for found, wanted in zip(*results, strict=True):
                assert found.shape == wanted.shape, name
                assert torch.allclose(found, wanted, atol=1e-3), name


def check_passes(module):
    """A transposed layer runs the other passes of a convolution, and those that are needed."""
    ran = on_cpu(module)
    layer, _, x = pair(module, "transposed")
    layer(x.requires_grad_()).sum().backward()
    assert [which for which, _ in ran] == ["input_grad", "forward", "weight_grad"]
    del ran[:]
    layer(x.detach()).sum().backward()
    assert [which for which, _ in ran] == ["input_grad", "weight_grad"]
    del ran[:]
    layer.zero_grad()
    layer(torch.randn(0, *x.shape[1:], requires_grad=True)).sum().backward()
    assert not ran
    assert layer.weight.grad.abs().max() == 0
    (first,) = torch.autograd.grad(layer(x.detach()).square().sum(), [layer.weight],
                                   create_graph=True)  # fmt: skip
    with raises(RuntimeError, "once_differentiable"):
        first.sum().backward()


def check_nothing_is_copied(module):
    """Kernels read sequences as they lie in memory, also with channels last."""
    on_cpu(module)
    run, addresses = module.run, []

    def noting(built, which, tensors):
        addresses.append({key: tensor.data_ptr() for key, tensor in tensors.items()})
        run(built, which, tensors)

    module.run = noting
    for name in ("sequence", "transposed sequence"):
        layer, _, sequence = pair(module, name)
        for x in formats(sequence):
            y = layer(x)
            found = addresses.pop()
            assert found["input"] == x.data_ptr()
            assert found["weight"] == layer.weight.data_ptr()
            assert found["output"] == y.data_ptr()
            assert y.is_contiguous() == x.is_contiguous()


def check_output_sizes(module):
    on_cpu(module)
    for name, sizes in (("transposed sequence", [97]), ("transposed", (2, 8, 12, 39))):
        ours, theirs, x = pair(module, name)
        expected = theirs(x, output_size=sizes)
        assert torch.allclose(ours(x, output_size=sizes), expected, atol=1e-5)
        with raises(ValueError, "output_padding should be at least 0, and below the stride"):
            ours(x, output_size=[*sizes[:-1], 200])


def check_errors(module):
    one, _, sequence = pair(module, "sequence")
    transposed, _, images = pair(module, "transposed")
    with raises(ValueError, "(batch, 8, length), but got (2, 7, 96)"):
        one(sequence[:, 1:])
    with raises(ValueError, "(batch, 8, length), but got (8, 96)"):
        one(sequence[0])
    with raises(ValueError, "(batch, 16, height, width), but got (2, 15, 6, 20)"):
        transposed(images[:, 1:])
    with raises(TypeError, "torch.bfloat16, but got torch.float64"):
        one(sequence.double())
    with raises(ValueError, "stride should be an int of at least 1, but got (1, 2)"):
        module.Conv1d(2, 2, 3, (1, 2))
    with raises(ValueError, "padding should be an int of at least 0, but got 'same'"):
        module.Conv1d(2, 2, 3, padding="same")
    with raises(ValueError, "output_padding should be an int, or two, of at least 0, but got -1"):
        module.ConvTranspose2d(2, 2, 3, output_padding=-1)
    with raises(ValueError, "groups divide channels, but got in_channels=5, out_channels=4"):
        module.ConvTranspose1d(5, 4, 3, groups=2)
    if module.missing_gpu() is not None:
        with raises(RuntimeError, "kernels need an NVIDIA GPU"):
            transposed(images)
    on_cpu(module)
    with raises(ValueError, "the kernel is longer than the padded input"):
        module.Conv1d(8, 2, 9)(sequence[:, :, :8])
    with raises(ValueError, "below the stride or the dilation, but got (2, 2)"):
        module.ConvTranspose2d(16, 2, 3, 2, output_padding=2)(images)
    with raises(ValueError, "the output would be of size 0x14"):
        module.ConvTranspose2d(16, 2, 3, padding=4)(images)


def check_repr(module):
    layer = module.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1)
    assert repr(layer).startswith("ConvTranspose1d(4, 6, kernel_size=(1, 3), stride=(1, 2)")
    assert repr(layer).endswith("output_padding=(0, 1))")


CHECKS = (check_parameters, check_results, check_passes, check_nothing_is_copied,
          check_output_sizes, check_errors, check_repr)  # fmt: skip


def main(paths):
    for path in paths:
        for check in CHECKS:
            check(load(path))
        print(f"{path}: all right with torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
