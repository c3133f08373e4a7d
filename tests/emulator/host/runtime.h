// The part of the runtime that the host twins of device functions call.
//
// Device code includes this header. It includes no standard headers because NVRTC has none.
#pragma once
#include "tensor_map.h"

struct uint3 {
  unsigned x, y, z;
};
using dim3 = uint3;

// The scheduler sets these for the running thread at every switch.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

// Every byte of memory that nothing has written yet: NaN in every floating-point type.
constexpr unsigned char kPoison = 0xff;

// A call in device code, named in messages. As a default argument, here() gives the caller's line.
struct Site {
  const char* function;
  const char* file;
  int line;
};

inline Site here(const char* function, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  return {function, file, line};
}

// Ends the program with a message that names the block and the thread.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// Lets other threads run until ready() is true. Every wait of a thread goes through here, so that
// in a deadlock the runtime can list what each thread waits for.
void wait(Site site, bool (*ready)(const void*), const void* context);

template <class Ready>
void wait(Site site, const Ready& ready) {
  wait(site, [](const void* context) { return (*static_cast<const Ready*>(context))(); }, &ready);
}

// Waits until no other thread of the block can proceed: the longest that hardware might take.
void wait_long(Site site);

// Waits until all threads of the block have called this at the same site.
void barrier(Site site);

// Waits until all threads of the cluster that have not exited have called this.
void cluster_barrier(Site site);

// Arrives at a named barrier of `threads` threads, and waits for the others if `waits`.
void named_barrier(Site site, int number, int threads, bool waits);

// The result of a warp-wide operation for one lane.
struct Exchange {
  unsigned long long
      value;        // the value of lane `source`, or poison if that lane is not in the mask
  unsigned ballot;  // bit mask of the lanes whose value is not 0
};

// Waits until the lanes in `mask` have called the same function with the same mask.
Exchange exchange(Site site, unsigned mask, unsigned long long value, int source);

// The running block's shared memory and its rank in the cluster, which the scheduler sets.
struct Shared {
  unsigned char* begin;
  unsigned bytes;
};
extern Shared shared;
extern int cluster_rank;

constexpr int kMostClusterBlocks = 8;  // CUDA's portable cluster size

// Maps an address in shared memory to the same place in another running block of the cluster.
const void* in_block(Site site, const void* address, int rank);

// Whether an address lies in a tensor, or in the poisoned zones around one, which ASan reports.
bool is_near_tensor(const void* address);

// In an early launch (PDL), a thread must call this before it accesses any tensor.
void wait_for_earlier_launch(Site site);
// Or this, if what its block accesses has nothing to do with the launch before; then some block has
// to wait nevertheless.
void go_beside_earlier_launch(Site site);

// Copies `bytes`, which land in shared memory only at copy_async_wait; until then the target is
// poisoned. Unless `valid`, zeros land and nothing is read from `global`.
void copy_async(void* shared, const void* global, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

// Passes each of the thread's copies that have not landed to `take`, which takes charge of it.
void take_copies(void (*take)(void* context, void* shared, const void* data, int bytes),
                 void* context);

// An argument of a launch, which converts to the type of the kernel's parameter: a pointer, an int
// or a tensor map.
class Argument {
 public:
  Argument(void* address) : kind_(kTensor), address_(address) {}
  Argument(int value) : kind_(kInt), value_(value) {}
  Argument(const TensorMap& map) : kind_(kMap), map_(map) {}

  template <class T>
  operator T*() const {
    check(kTensor);
    return static_cast<T*>(address_);
  }
  operator int() const {
    check(kInt);
    return value_;
  }
  operator TensorMap() const {
    check(kMap);
    return map_;
  }
  template <class T>
  operator T() const = delete;

 private:
  enum Kind { kTensor, kInt, kMap };

  void check(Kind wanted) const {
    constexpr const char* kNames[] = {"tensor", "int", "map"};
    if (kind_ != wanted) fail("argument: %s passed for %s", kNames[kind_], kNames[wanted]);
  }

  Kind kind_;
  void* address_ = nullptr;
  int value_ = 0;
  TensorMap map_ = {};
};

template <class... Parameters>
struct Call {
  Call(void (*entry)(Parameters...), Parameters... arguments) { entry(arguments...); }
};

template <class... Parameters>
void call(void (*entry)(Parameters...), const Argument* arguments, int count) {
  if (count != sizeof...(Parameters)) {
    fail("%d arguments for %d parameters", count, static_cast<int>(sizeof...(Parameters)));
  }
  // Braces, unlike parentheses, evaluate from left to right.
  Call<Parameters...>{entry, static_cast<Parameters>(*arguments++)...};
}

}  // namespace emulator

// Runs the kernel as one thread. The driver defines it in the kernel's own shared library.
extern "C" [[gnu::externally_visible]] void emulator_run_thread(const emulator::Argument* arguments,
                                                                int count);
