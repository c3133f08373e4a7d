// One call, below autograd: allocates the results, and launches what computes them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_ops.h>
#include <c10/core/DeviceGuard.h>

#include "packed.h"

namespace fastconv::host {

struct Results {
  Tensor first, bias_grad;
  // What batch normalization needs of the result, from so many parts of it.
  at::DataPtr statistics{};
  int64_t shares = 0;
};

inline Tensor empty(at::IntArrayRef shape, const Tensor& like,
                    std::optional<at::MemoryFormat> format = std::nullopt) {
  // This is what at::empty calls in the end.
  const auto device = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(device), c10::fromIntArrayRefSlow(shape), like.scalar_type(),
      at::kStrided, like.device(), false, format);
}

// Allocates a workspace by the allocator of a tensor's memory, which costs less than a new tensor.
inline at::DataPtr workspace(int64_t bytes, const Tensor& beside) {
  return bytes ? beside.storage().allocator()->allocate(bytes) : at::DataPtr();
}

inline Results run(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Precision precision = precision_of(call);
  const auto entry = find(call, precision);
  Tensor first = call.first, second = call.second, third = call.third, residual = call.residual;
  const c10::OptionalDeviceGuard on(first.is_cuda() ? std::optional(first.device()) : std::nullopt);
  Results results{empty(entry->shape, first, entry->format), {}};
  if (call.bias_grad) results.bias_grad = empty(entry->bias_elements, first);
  if (entry->fill) entry->fill(call, precision, results.first, results.bias_grad);
  if (entry->launches.empty()) return results;
  if (entry->shares) {
    constexpr int64_t kBytes = 3 * sizeof(float);  // of a share, for each channel
    results.statistics = workspace(entry->shares * entry->shape[1] * kBytes, results.first);
    results.shares = entry->shares;
  }
  if (entry->copied[0]) first = first.contiguous();
  if (entry->copied[1]) second = second.contiguous();
  if (third.defined()) third = third.contiguous();
  if (residual.defined()) residual = residual.contiguous(entry->format);
  void* stream = stream_of(first.device());
  const Place place{entry.get(), address_of(second), stream};
  const bool keeps = call.frozen && entry->packs && !entry->copied[1] && !is_captured(stream);
  const uint32_t version = keeps ? Store::version_of(second) : 0;  // read before packing
  const auto kept = keeps ? store.find(place, second, version) : nullptr;
  at::DataPtr scratch = kept ? at::DataPtr() : workspace(entry->scratch_bytes, results.first);
  const uintptr_t from = address_of(first), by = address_of(second), to = address_of(results.first),
                  working = uintptr_t(kept ? kept->memory.get() : scratch.get());
  const auto [first_region, second_region] = entry->regions;
  const uintptr_t copied = working + first_region, other = working + second_region;
  using All = std::array<uintptr_t, kTensors>;
  const All addresses =
      call.pass == kWeightGrad
          ? All{from, by, to, address_of(results.bias_grad), working, copied, other}
          : All{from,
                by,
                address_of(third),
                address_of(residual),
                to,
                working,
                copied,
                other,
                uintptr_t(results.statistics.get())};
  start_all(*entry, kept ? entry->packs : 0, addresses, stream);
  if (keeps && !kept) {
    Packed packed{entry, second.storage().getWeakStorageImpl(), version, std::move(scratch)};
    store.keep(place, std::make_shared<const Packed>(std::move(packed)), call.frozen);
  }
  return results;
}

}  // namespace fastconv::host
