"""The values that options of the command take, and their defaults, without importing PyTorch.

Lists of plain names are defined here and nowhere else; the package imports them. Where the package
has an object for each name (``PEERS``, ``SUITES``, ``WRITTEN``, ``GPUS`` and ``EXPORTED_DTYPES``),
a test compares its names with those here.
"""

from __future__ import annotations

from itertools import product

GRADIENTS = ("input_grad", "weight_grad")
PASSES = ("forward", *GRADIENTS)
STEP = "step"  # A training step: the forward pass and both gradients, through autograd.

DTYPES = ("float32", "bfloat16", "float16", "float64")
EXPORTED_DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("ieee", "tf32")
AXES = (1, 2, 3)  # of sequences, images and volumes
FORMATS = ("nchw", "nhwc")
FORMAT_TRIPLES = tuple("/".join(names) for names in product(FORMATS, repeat=3))
"""Every choice of a memory format for input, weight and output gradient: "nhwc/nchw/nchw"."""

SHAPE_SYNTAX = (
    '"NxCxHxW OxIxKHxKW [stride=S|SH,SW] [padding=P|PH,PW|T,B,L,R] [dilation=D|DH,DW] [groups=G]"; '
    'of sequences "NxCxW OxIxKW", with [padding=P|L,R]; of volumes "NxCxDxHxW OxIxKDxKHxKW", with '
    "[stride=S|SD,SH,SW] [padding=P|PD,PH,PW|F,B,T,B,L,R]; of a transposed convolution "
    '"NxCxHxW IxOxKHxKW transposed", with [output_padding=P|PH,PW]'
)
SUITES = (
    "founding", "real", "odd", "depthwise", "sequence", "transposed", "video", "volume", "cpu",
)  # fmt: skip
PEERS = ("pytorch", "best", "compile")
GPUS = (
    "sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a",
    "sm_120a", "sm_121a",
)  # fmt: skip

NETWORKS = (
    "resnet50", "convnext_tiny", "efficientnet_b0", "inception_v3", "deeplabv3_resnet50", "vgg16",
    "unet",
)  # fmt: skip
WRITTEN = ("unet", "wav2vec2", "hifigan", "dcgan", "unet3d", "video_decoder")
"""The networks that need neither torchvision nor timm."""
MODES = ("training", "inference")
BATCH = 64  # images of a network, unless the user gives another number

# On a CPU the suites take minutes at full size. A quarter of each side is 1/16 of the arithmetic.
CPU_DIVISOR = 4
MOST_JOBS = 16  # The default number of processes of verify is at most this.

NORMAL = "normal"
FAR = "far"
DATA = {
    NORMAL: "Gaussian",
    "sparse": "one number in 16 is not zero",
    "spike": "one number is 2^20 times larger",
    "single": "the weight (of a weight gradient, the output gradient) is zero except for a single "
    "1 in each output channel",
    "faint": "half of the channels are 2^20 times smaller",
    FAR: "one operand is up to 2^90 times smaller or 2^122 times larger, the other compensates",
}
"""What tensors hold. In float16, whose range is small, 2^4 stands for 2^20, 2^90 and 2^122."""

TENSORS = ("input", "weight", "grad_output")
PLACED = (*TENSORS, "bias", "residual")
"""The tensors whose alignment a trial of verify chooses."""
