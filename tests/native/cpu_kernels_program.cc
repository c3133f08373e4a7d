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
  Axis planes, rows, columns;
  bool channels_last;
};

Axis drawn_axis(int64_t most_outputs = 20, int64_t most_taps = 5) {
  Axis axis{0, drawn(1, most_outputs), drawn(1, most_taps), drawn(1, 3), drawn(1, 3), drawn(0, 4)};
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
  const bool gathers = kernel == kNarrow;
  const int64_t groups = depthwise || gathers ? drawn(1, 40) : drawn(1, 2);
  const bool narrow = depthwise && drawn(0, 1) == 0;  // groups of a few channels
  const Axis planes = drawn(0, 1) == 0 ? kOnePlane
                      : pointwise      ? pointwise_axis()
                                       : drawn_axis(4, 3);
  return {drawn(1, planes.outputs == 1 ? 3 : 2),
          groups,
          depthwise ? drawn(1, narrow ? 9 : 1) : drawn(1, pointwise ? 150 : 40),
          depthwise ? drawn(1, narrow ? 9 : 1) : drawn(1, gathers ? 17 : 40),
          planes,
          pointwise ? pointwise_axis() : drawn_axis(),
          pointwise ? pointwise_axis() : drawn_axis(),
          drawn(0, 1) == 1};
}

std::vector<float> numbers(int64_t count) {
  std::vector<float> found(count);
  for (float& number : found) number = float(drawn(-8, 8)) / 4;  // sums of products are exact
  return found;
}

// A tensor whose planes, rows and columns are an axis' elements, or its outputs.
Images images_of(const Problem& p, std::vector<float>& data, int64_t channels,
                 int64_t Axis::* extent) {
  const int64_t planes = p.planes.*extent, rows = p.rows.*extent, columns = p.columns.*extent;
  const int64_t pixel = p.channels_last ? channels : 1, plane = rows * columns * pixel;
  return {data.data(),
          {planes * rows * columns * channels, p.channels_last ? 1 : planes * plane,
           columns * pixel, pixel},
          plane};
}

Weights weights_of(const Problem& p, const std::vector<float>& data) {
  const int64_t plane = p.rows.taps * p.columns.taps, taps = p.planes.taps * plane,
                filter = p.depth * taps, pixel = p.channels_last ? p.depth : 1;
  return {data.data(),
          {p.channels * filter, filter, p.channels_last ? 1 : taps, p.columns.taps * pixel, pixel},
          plane * pixel};
}

// Calls function(read, output, tap) for each tap that reads an element.
template <class Function>
void for_each_read(const Axis& axis, const Function& function) {
  for (int64_t output = 0; output < axis.outputs; ++output)
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const int64_t read = output * axis.step + tap * axis.reach - axis.before;
      if (read >= 0 && read < axis.size) function(read, output, tap);
    }
}

// Calls a function with the offsets of the input, the weight and the output of each product.
template <class Function>
void for_each_product(const Problem& p, const Images& input, const Weights& weight,
                      const Images& output, const Function& function) {
  const auto &in = input.strides, &out = output.strides;
  const auto& w = weight.strides;
  for_each_read(p.planes, [&](int64_t read_plane, int64_t plane, int64_t of_plane) {
    for_each_read(p.rows, [&](int64_t read_row, int64_t row, int64_t of_row) {
      for_each_read(p.columns, [&](int64_t read_column, int64_t column, int64_t of_column) {
        const int64_t from = read_plane * input.plane + read_row * in[2] + read_column * in[3],
                      by = of_plane * weight.plane + of_row * w[3] + of_column * w[4],
                      to = plane * output.plane + row * out[2] + column * out[3];
        for (int64_t n = 0; n < p.images; ++n)
          for (int64_t k = 0; k < p.groups * p.channels; ++k)
            for (int64_t c = 0; c < p.depth; ++c) {
              const int64_t group = k / p.channels;
              function(from + n * in[0] + (group * p.depth + c) * in[1],
                       by + group * w[0] + k % p.channels * w[1] + c * w[2],
                       to + n * out[0] + k * out[1]);
            }
      });
    });
  });
}

// The rows or columns of a result that a pass writes, if there are several passes.
Axis residue(const Axis& axis, const Every& at) {
  Axis part = axis;
  part.outputs = (axis.outputs - at.first + at.step - 1) / at.step;
  part.step *= at.step;
  part.before -= at.first * axis.step;
  return part;
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
  const int64_t pixels = p.planes.outputs * p.rows.outputs * p.columns.outputs,
                taps = p.planes.taps * p.rows.taps * p.columns.taps;
  auto input = numbers(p.images * read * p.planes.size * p.rows.size * p.columns.size),
       weight = numbers(written * p.depth * taps), grad = numbers(p.images * written * pixels);
  std::vector<float> output(grad.size(), NAN), weight_grad(weight.size(), NAN),
      output_sums(grad.size()), weight_sums(weight.size());
  const Images source = images_of(p, input, read, &Axis::size),
               target = images_of(p, output, written, &Axis::outputs);
  for_each_product(p, source, weights_of(p, weight), target, [&](int64_t i, int64_t w, int64_t o) {
    output_sums[o] += input[i] * weight[w];
    weight_sums[w] += input[i] * grad[o];
  });
  const Parallel parallel(serial, drawn(1, 3));
  Blocks blocks{drawn(1, 20), drawn(1, 20), drawn(1, 64), 32 * drawn(1, 2), drawn(1, 3)};
  blocks.skips = kernel == kDirect && drawn(0, 1) == 1;
  if (kernel == kPointwise) blocks.columns = 32 * drawn(1, 3), blocks.depth = drawn(1, 300);
  Gather gather{};
  gather.images = p.images, gather.groups = p.groups;
  gather.depth = p.depth, gather.channels = p.channels;
  gather.planes = p.planes;
  gather.source = source, gather.target = target;
  gather.weights = weights_of(p, weight);
  gather.blocks = blocks;
  std::vector<Gather> passes;
  // A matrix product reads from the first element on.
  const int64_t most = kernel == kPointwise ? 1 : 3;
  const int64_t down = std::min(drawn(1, most), p.rows.outputs),
                across = std::min(drawn(1, most), p.columns.outputs);
  for (int64_t i = 0; i < down * across; ++i) {
    gather.at_rows = {i / across, down}, gather.at_columns = {i % across, across};
    gather.rows = residue(p.rows, gather.at_rows);
    gather.columns = residue(p.columns, gather.at_columns);
    passes.push_back(gather);
  }
  if (kernel != kDepthwise || p.depth * p.channels == 1) {
    fastconv::cpu::gather(kernel, passes, parallel);
    check("output", output, output_sums);
  }
  WeightGrad pass{kFloat32,
                  p.images,
                  p.groups,
                  p.depth,
                  p.channels,
                  p.rows,
                  p.columns,
                  source,
                  images_of(p, grad, written, &Axis::outputs),
                  weights_of(p, weight_grad),
                  blocks,
                  p.planes};
  if (kernel == kNarrow) return;
  fastconv::cpu::weight_grad(kernel, pass, parallel);
  check("weight gradient", weight_grad, weight_sums);
}

int main(int, char** arguments) {
  const int count = std::atoi(arguments[1]);
  for (int i = 0; i < count; ++i) run(Kernel(i % 4));
  std::printf("%d problems\n", count);
}
