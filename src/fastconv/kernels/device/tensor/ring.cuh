// Stages of shared memory that are filled and emptied in turn.
#pragma once

namespace fastconv {
namespace tensor {

// A position in a ring of stages. Producers start a lap ahead: the stages are empty.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity;

  __device__ explicit Ring(unsigned first_parity) : parity(first_parity) {}
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tensor
}  // namespace fastconv
