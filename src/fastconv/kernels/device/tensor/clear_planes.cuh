// Fills those planes of volumes with zeros that no tap of an input gradient reaches: every
// `step`th, from `first` on, of `depth` planes. Such planes have `plane` contiguous elements, and a
// volume has `rows` sequences of planes: one for each channel, or a single one where channels come
// last.
#pragma once

extern "C" __global__ void __launch_bounds__(256)
    clear_planes(Config::Scalar* __restrict__ output, int batch) {
  using C = Config;
  constexpr int kCleared = (C::depth - C::first + C::step - 1) / C::step;
  const long long total = 1ll * batch * C::rows * kCleared;
  for (long long i = blockIdx.x; i < total; i += gridDim.x) {
    const long long at = i / kCleared * C::depth + C::first + i % kCleared * C::step;
    C::Scalar* const plane = output + at * C::plane;
    for (int x = threadIdx.x; x < C::plane; x += blockDim.x) plane[x] = C::Scalar{};
  }
}
