"""GPUs that plans can be made for though they are not there, one of each architecture."""

from __future__ import annotations

from fastconv.kernels.family import Gpu

_KIB = 1024

GPUS: dict[str, Gpu] = {
    gpu.architecture: gpu
    for gpu in (
        Gpu("sm_70", 80, 96 * _KIB, 96 * _KIB),  # V100
        Gpu("sm_75", 40, 64 * _KIB, 64 * _KIB),  # T4
        Gpu("sm_80", 108, 163 * _KIB, 164 * _KIB),  # A100
        Gpu("sm_86", 82, 99 * _KIB, 100 * _KIB),  # RTX 3090
        Gpu("sm_89", 128, 99 * _KIB, 100 * _KIB),  # RTX 4090
        Gpu("sm_90a", 132, 227 * _KIB, 228 * _KIB),  # H100 and H200
        Gpu("sm_100a", 148, 227 * _KIB, 228 * _KIB),  # B200
        Gpu("sm_120a", 170, 99 * _KIB, 100 * _KIB),  # RTX 5090
    )
}
"""By what their kernels are compiled for."""

H200 = GPUS["sm_90a"]
