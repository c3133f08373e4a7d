// Runs the CPU kernels on random problems, in tensors that end where their memory does, against
// sums in the order of the formula. It is compiled with sanitizers, and needs no PyTorch.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cpu/kernels.h"

using namespace fastconv::cpu;

std::mt19937 generator(0);

int64_t drawn(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(generator);
}

void serial(int64_t count, Parallel::Body body, void* context) {
  for (int64_t i = 0; i < count; ++i) body(context, i, i + 1);
}

struct Problem {
  int64_t images, groups, depth, channels;
  Axis rows, columns;
  bool channels_last;
};

Axis drawn_axis() {
  Axis axis{0, drawn(1, 20), drawn(1, 5), drawn(1, 3), drawn(1, 3), drawn(0, 4)};
  const int64_t reach = (axis.outputs - 1) * axis.step + (axis.taps - 1) * axis.reach + 1;
  axis.size = std::max<int64_t>(1, reach - axis.before - drawn(0, 3));
  return axis;
}

// An axis of a kernel of one tap, without padding.
Axis pointwise_axis() {
  Axis axis{0, drawn(1, 12), 1, drawn(1, 3), 1, 0};
  axis.size = (axis.outputs - 1) * axis.step + drawn(1, axis.step);
  return axis;
}

Problem drawn_problem(Kernel kernel) {
  const bool depthwise = kernel == kDepthwise, pointwise = kernel == kPointwise;
  const int64_t groups = depthwise ? drawn(1, 40) : drawn(1, 2);
  return {drawn(1, 2),
          groups,
          depthwise ? 1 : drawn(1, pointwise ? 150 : 40),
          depthwise ? 1 : drawn(1, 40),
          pointwise ? pointwise_axis() : drawn_axis(),
          pointwise ? pointwise_axis() : drawn_axis(),
          drawn(0, 1) == 1};
}

std::vector<float> numbers(int64_t count) {
  std::vector<float> found(count);
  for (float& number : found) number = float(drawn(-8, 8)) / 4;  // sums of products are exact
  return found;
}

std::array<int64_t, 4> strides(const Problem& p, int64_t channels, int64_t rows, int64_t columns) {
  if (p.channels_last) return {rows * columns * channels, 1, columns * channels, channels};
  return {channels * rows * columns, rows * columns, columns, 1};
}

std::array<int64_t, 5> weight_strides(const Problem& p) {
  const int64_t taps = p.rows.taps * p.columns.taps, filter = p.depth * taps;
  if (p.channels_last) {
    return {p.channels * filter, filter, 1, p.columns.taps * p.depth, p.depth};
  }
  return {p.channels * filter, filter, taps, p.columns.taps, 1};
}

// Calls a function with the offsets of the input, the weight and the output of each product.
template <class Function>
void for_each_product(const Problem& p, const Function& function) {
  const int64_t read = p.groups * p.depth, written = p.groups * p.channels;
  const auto in = strides(p, read, p.rows.size, p.columns.size),
             out = strides(p, written, p.rows.outputs, p.columns.outputs);
  const auto w = weight_strides(p);
  for (int64_t n = 0; n < p.images; ++n)
    for (int64_t k = 0; k < written; ++k)
      for (int64_t c = 0; c < p.depth; ++c)
        for (int64_t y = 0; y < p.rows.outputs; ++y)
          for (int64_t x = 0; x < p.columns.outputs; ++x)
            for (int64_t r = 0; r < p.rows.taps; ++r)
              for (int64_t s = 0; s < p.columns.taps; ++s) {
                const int64_t row = y * p.rows.step + r * p.rows.reach - p.rows.before,
                              column = x * p.columns.step + s * p.columns.reach - p.columns.before;
                if (row < 0 || row >= p.rows.size || column < 0 || column >= p.columns.size) {
                  continue;
                }
                const int64_t group = k / p.channels;
                function(n * in[0] + (group * p.depth + c) * in[1] + row * in[2] + column * in[3],
                         group * w[0] + k % p.channels * w[1] + c * w[2] + r * w[3] + s * w[4],
                         n * out[0] + k * out[1] + y * out[2] + x * out[3]);
              }
}

void check(const char* what, const std::vector<float>& found, const std::vector<float>& expected) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == expected[i]) continue;
    std::fprintf(stderr, "%s: %g at %zu, expected %g\n", what, found[i], i, expected[i]);
    std::exit(1);
  }
}

void run(Kernel kernel) {
  const Problem p = drawn_problem(kernel);
  const int64_t read = p.groups * p.depth, written = p.groups * p.channels;
  const auto in = strides(p, read, p.rows.size, p.columns.size),
             out = strides(p, written, p.rows.outputs, p.columns.outputs);
  auto input = numbers(p.images * read * p.rows.size * p.columns.size),
       weight = numbers(written * p.depth * p.rows.taps * p.columns.taps),
       grad = numbers(p.images * written * p.rows.outputs * p.columns.outputs);
  std::vector<float> output(grad.size(), NAN), weight_grad(weight.size(), NAN),
      output_sums(grad.size()), weight_sums(weight.size());
  for_each_product(p, [&](int64_t i, int64_t w, int64_t o) {
    output_sums[o] += input[i] * weight[w];
    weight_sums[w] += input[i] * grad[o];
  });
  const Parallel parallel(serial, drawn(1, 3));
  Blocks blocks{drawn(1, 20), drawn(1, 20), drawn(1, 20), 32 * drawn(1, 2)};
  if (kernel == kPointwise) blocks.columns = 32 * drawn(1, 3), blocks.depth = drawn(1, 300);
  Gather gather{};
  gather.images = p.images, gather.groups = p.groups;
  gather.depth = p.depth, gather.channels = p.channels;
  gather.rows = p.rows, gather.columns = p.columns;
  gather.source = {input.data(), in}, gather.target = {output.data(), out};
  gather.weights = {weight.data(), weight_strides(p)};
  gather.blocks = blocks;
  fastconv::cpu::gather(kernel, gather, parallel);
  check("output", output, output_sums);
  WeightGrad pass{kFloat32,
                  p.images,
                  p.groups,
                  p.depth,
                  p.channels,
                  p.rows,
                  p.columns,
                  {input.data(), in},
                  {grad.data(), out},
                  {weight_grad.data(), weight_strides(p)},
                  blocks};
  fastconv::cpu::weight_grad(kernel, pass, parallel);
  check("weight gradient", weight_grad, weight_sums);
}

int main(int, char** arguments) {
  const int count = std::atoi(arguments[1]);
  for (int i = 0; i < count; ++i) run(Kernel(i % 3));
  std::printf("%d problems\n", count);
}
