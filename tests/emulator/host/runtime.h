// What the host twins of device functions ask of the runtime.
//
// Device code sees this header, so it includes no standard ones: under NVRTC there are none either.
#pragma once
#include "tensor_map.h"

struct uint3 {
  unsigned x, y, z;
};
using dim3 = uint3;

// Those of the thread that runs; the scheduler sets them at every switch.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

// What memory holds before it is written: NaN in every floating-point type.
constexpr unsigned char kPoison = 0xff;

// A call in device code, for messages. As a default argument, here() names the caller's line.
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

// Lets other threads run until ready() is true. Whatever makes a thread wait ends up here, so that
// the runtime can tell who waits for what when nobody can go on.
void wait(Site site, bool (*ready)(const void*), const void* context);

template <class Ready>
void wait(Site site, const Ready& ready) {
  wait(site, [](const void* context) { return (*static_cast<const Ready*>(context))(); }, &ready);
}

// Waits until no thread of the block can go on: as long as an operation of the hardware might take.
void wait_long(Site site);

// Waits for all threads of the block, at the same site.
void barrier(Site site);

// Waits for all threads of the cluster's blocks that have not exited.
void cluster_barrier(Site site);

// Comes to a barrier of so many threads, and waits for the others or not.
void named_barrier(Site site, int number, int threads, bool waits);

// What one lane gets from a warp-wide operation.
struct Exchange {
  unsigned long long value;  // what lane `source` passed, poison if it takes no part
  unsigned ballot;           // the lanes that passed anything but 0
};

// Waits until the lanes in `mask` have called the same function with the same mask.
Exchange exchange(Site site, unsigned mask, unsigned long long value, int source);

// The shared memory of the block that runs, and the block's number in its cluster; the scheduler
// sets them too.
struct Shared {
  unsigned char* begin;
  unsigned bytes;
};
extern Shared shared;
extern int cluster_rank;

constexpr int kMostClusterBlocks = 8;  // on every GPU

// Where an address in shared memory lies in another block of the cluster, which is under way.
const void* in_block(Site site, const void* address, int rank);

// Whether an address lies in a tensor, or so close to one that ASan knows.
bool is_near_tensor(const void* address);

// In an early launch no tensor may be accessed by a thread that has not called this.
void wait_for_earlier_launch(Site site);

// Copies of `bytes` that land in shared memory at copy_async_wait and not before; until then the
// target is poisoned. Nothing is read from `global` unless `valid`: zeros land.
void copy_async(void* shared, const void* global, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

// Hands over the thread's copies that have not landed, one by one, to somebody who will land them.
void take_copies(void (*take)(void* context, void* shared, const void* data, int bytes),
                 void* context);

// An argument of a launch, converted to the type of the entry's parameter: a pointer, an int or a
// map.
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

// The entry of the kernel, as one thread. The driver defines it, next to the kernel, in a library
// of its own.
extern "C" [[gnu::externally_visible]] void emulator_run_thread(const emulator::Argument* arguments,
                                                                int count);
