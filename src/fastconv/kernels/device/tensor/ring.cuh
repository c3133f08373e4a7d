// The pipeline: a ring of stages in shared memory that producers fill and consumers empty.
#pragma once

namespace fastconv {
namespace tensor {

// A position in the ring, with the parity of the stage's mbarrier phase. Producers start with
// parity 1 and consumers with 0: all stages are empty at first.
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
