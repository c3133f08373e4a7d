// Which of the tensor core's types an element is.
#pragma once
#include "include/scalar.cuh"
#include "include/wgmma.cuh"

namespace fastconv {
namespace hopper {

template <class T>
struct OperandOf;
template <>
struct OperandOf<float> {
  using type = Tf32;
};
template <>
struct OperandOf<float16> {
  using type = Float16;
};
template <>
struct OperandOf<bfloat16> {
  using type = Bfloat16;
};

}  // namespace hopper
}  // namespace fastconv
