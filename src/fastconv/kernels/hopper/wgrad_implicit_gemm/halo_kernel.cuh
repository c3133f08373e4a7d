// The kernel whose TMA boxes have a halo (halo.cuh). What it is compiled with has more constants,
// so its programs are a source of their own.
#pragma once
#include "hopper/wgrad_implicit_gemm/kernel.cuh"
