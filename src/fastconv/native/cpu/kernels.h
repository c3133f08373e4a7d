// The CPU kernels as functions: what host.cc calls, and tests without PyTorch.
//
// They know nothing of PyTorch: a test can compile them alone, with sanitizers.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace fastconv::cpu {

enum Type : int64_t { kFloat32, kFloat64, kBfloat16, kFloat16 };

// Whether the compiler that compiled the kernels has the type.
bool has_type(Type type);

// The bytes of a vector register that the kernels were compiled for.
int64_t vector_bytes();

// Planes, rows or columns: for output o, tap t reads element o * step + t * reach - before.
// Elements outside of [0, size) are zeros.
struct Axis {
  int64_t size, outputs, taps, step, reach, before;
};

// The planes of an image, which is a volume of a single one.
constexpr Axis kOnePlane{1, 1, 1, 1, 1, 0};

// A tensor of images or volumes, with its strides in elements: images, channels, rows, columns, and
// that of planes.
struct Images {
  void* data;
  std::array<int64_t, 4> strides;
  int64_t plane = 0;
};

// The weight, with its strides in elements: groups, written channels, read channels, tap rows, tap
// columns, and that of tap planes.
struct Weights {
  const void* data;
  std::array<int64_t, 5> strides;
  int64_t plane = 0;
};

// Activations that the kernels apply. The others are passes of their own.
enum Activation : int64_t { kIdentity, kRelu, kRelu6, kLeakyRelu, kHardswish };

// How a pass is cut into tiles. Results do not depend on it, except by `depth` and `skips`.
struct Blocks {
  int64_t rows, columns;  // output rows and columns of a tile, or a matrix's (pointwise.h)
  int64_t depth;          // read channels that are staged together
  int64_t channels;       // written channels of one task
  int64_t images = 1;     // images of a tile
  bool skips = false;     // whether products with padding are left out (direct.h)
};

// Which rows or columns of the result a pass writes: each `step`-th, from `first` on.
struct Every {
  int64_t first = 0, step = 1;
};

// A pass that gathers: each output is a sum over read channels and taps. Forward passes are one
// such pass, input gradients one for each residue of the stride.
struct Gather {
  Type type;
  int64_t images, groups;
  int64_t depth, channels;  // channels of a group that are read, and written
  Axis rows, columns;
  Images source, target;
  Weights weights;
  const void* bias;  // may be null
  Images residual;   // its data may be null
  Activation activation;
  double slope;
  // Whether zeros beyond the source's borders must not meet weights that are infinite or NaN: there
  // is no product of them in an input gradient.
  bool needs_finite_weights;
  Blocks blocks;
  Axis planes = kOnePlane;
  Every at_rows = {}, at_columns = {};
};

// A weight gradient: the sums over images, rows and columns of the output's gradient times what
// taps read of the input.
struct WeightGrad {
  Type type;
  int64_t images, groups;
  int64_t depth, channels;  // channels of a group of the input, and of the gradient
  Axis rows, columns;       // those of the forward pass
  Images input, grad;
  Weights target;  // the gradient; its data is written
  Blocks blocks;
  Axis planes = kOnePlane;
};

// Calls function(begin, end) for parts of the range [0, count), in several threads.
class Parallel {
 public:
  using Body = void (*)(void* context, int64_t begin, int64_t end);
  using For = void (*)(int64_t count, Body body, void* context);

  explicit Parallel(For function, int64_t threads = 1) : function_(function), threads_(threads) {}

  // So many threads may run at once. Results do not depend on it.
  int64_t threads() const { return threads_; }

  template <class Function>
  void operator()(int64_t count, Function function) const {
    function_(
        count,
        [](void* context, int64_t begin, int64_t end) {
          (*static_cast<Function*>(context))(begin, end);
        },
        &function);
  }

 private:
  For function_;
  int64_t threads_;
};

enum Kernel : int64_t {
  kDirect,     // layers with many channels: a register tile of output columns by output channels
  kDepthwise,  // depthwise layers; weight gradients of groups with few channels
  kPointwise,  // kernels of 1x1 without padding: products of matrices
  kNarrow,     // passes that gather few channels of a group: vectors of columns
};

// Computes passes that write different rows and columns of one result, and differ by these and by
// their taps. Returns false if weights are not finite where they need to be; then the result is
// unfinished.
bool gather(Kernel kernel, const std::vector<Gather>& passes, const Parallel& parallel);

void weight_grad(Kernel kernel, const WeightGrad& pass, const Parallel& parallel);

// The operations a second of multiply-adds in registers, of all threads together and in the type
// that numbers of a type are multiplied in. The measurement takes about so many seconds.
double multiply_add_rate(Type type, const Parallel& parallel, double seconds);

}  // namespace fastconv::cpu
