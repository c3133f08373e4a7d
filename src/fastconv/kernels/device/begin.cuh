// How short kernels begin that every GPU runs. On GPUs that can, their launches are early: blocks
// come onto an SM while the last ones of the launch before still run, and wait for its end.
#pragma once
#include "device/tile.cuh"
#if __CUDA_ARCH__ >= 900
#include "device/sm90.cuh"
#endif

namespace fastconv {

// Every thread calls it before it accesses a tensor. Blocks of the next launch may begin once all
// of this one have: they find room only where no block of this one is left to begin.
__device__ __forceinline__ void begin_launch() {
#if __CUDA_ARCH__ >= 900
  wait_for_earlier_launch();
  allow_later_launch();
#endif
}

}  // namespace fastconv
