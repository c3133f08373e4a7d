// The CPU kernels, compiled for each type (kernels.h). This file needs no headers but C++'s own.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#include "kernels.h"

#include "depthwise.h"
#include "direct.h"
#include "narrow.h"
#include "pointwise.h"
#include "rate.h"
#include "weights.h"

namespace fastconv::cpu {

bool has_type(Type type) { return type != kFloat16 || FASTCONV_HAS_FLOAT16; }

int64_t vector_bytes() { return kVectorBytes; }

template <class Function>
auto for_type(Type type, const Function& function) {
  switch (type) {
    case kFloat32:
      return function(float());
    case kFloat64:
      return function(double());
    case kBfloat16:
      return function(Bfloat16());
    case kFloat16:
#if FASTCONV_HAS_FLOAT16
      return function(Float16());
#else
      break;
#endif
  }
  __builtin_unreachable();
}

// The pass whose target and residual are the rows and columns that it writes.
template <class Stored>
Gather moved(Gather pass) {
  for (Images* images : {&pass.target, &pass.residual}) {
    auto& s = images->strides;
    if (!images->data) continue;
    images->data = static_cast<Stored*>(images->data) + pass.at_rows.first * s[2] +
                   pass.at_columns.first * s[3];
    s[2] *= pass.at_rows.step;
    s[3] *= pass.at_columns.step;
  }
  return pass;
}

bool gather(Kernel kernel, const std::vector<Gather>& passes, const Parallel& parallel) {
  return for_type(passes[0].type, [&](auto stored) {
    using Stored = decltype(stored);
    if (kernel == kDepthwise && !DepthwiseChannels<Stored>::takes(passes[0])) {
      return DepthwisePlanes<Stored>(passes).run(parallel);
    }
    std::vector<Gather> all;
    for (const Gather& one : passes) all.push_back(moved<Stored>(one));
    if (kernel == kDirect) return gather_directly<Stored>(all, parallel);
    if (kernel == kNarrow) return gather_narrowly<Stored>(all, parallel);
    for (const Gather& pass : all) {
      if (kernel == kDepthwise) {
        DepthwiseChannels<Stored>(pass).run(parallel);
      } else {
        product_of<Stored>(pass).run(parallel);
      }
    }
    return true;
  });
}

void weight_grad(Kernel kernel, const WeightGrad& pass, const Parallel& parallel) {
  for_type(pass.type, [&](auto stored) {
    using Stored = decltype(stored);
    switch (kernel) {
      case kDirect:
        return DirectWeightGrad<Stored>(pass).run(parallel);
      case kDepthwise:
        return DepthwiseWeightGrad<Stored>(pass).run(parallel);
      case kPointwise:
        return product_of<Stored>(pass).run(parallel);
      case kNarrow:  // of passes that gather
        break;
    }
    __builtin_unreachable();
  });
}

double multiply_add_rate(Type type, const Parallel& parallel, double seconds) {
  return type == kFloat64 ? multiply_add_rate<double>(parallel, seconds)
                          : multiply_add_rate<float>(parallel, seconds);
}

}  // namespace fastconv::cpu
