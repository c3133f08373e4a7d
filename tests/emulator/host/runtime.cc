// Runs a launch on one CPU core. Every CUDA thread is a fiber; a fiber runs until it has to wait.
#include "runtime.h"

#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fiber.h"
#include "buffers.h"
#include "sm90.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Shared shared;
int cluster_rank;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

struct Copy {
  unsigned char* target;
  unsigned char data[16];
  int bytes;
  int group;
};

struct Thread {
  unsigned char* stack;
  void* stack_pointer;
  void* fake_stack = nullptr;  // ASan's handle of this fiber
  bool exited = false;

  // Set while the thread waits.
  Site site = {};
  bool (*ready)(const void*) = nullptr;
  const void* context = nullptr;

  // Its operands in a warp-wide operation, and the result.
  unsigned mask = 0;
  unsigned long long value = 0;
  int source = 0;
  Exchange result = {};

  std::vector<Copy> copies;
  int groups = 0;

  bool waited = false;  // has called wait_for_earlier_launch, or go_beside_earlier_launch
};

// A barrier.sync or barrier.arrive barrier of some of the block's threads.
struct NamedBarrier {
  int threads = 0;  // arrivals in each round
  std::set<const Thread*> come;
  unsigned generation = 0;
};

// A thread block of the cluster. The blocks of a cluster run together.
struct Block {
  unsigned number;  // linear index in the grid
  Shared shared;
  std::vector<Thread> threads;
  std::vector<unsigned> exchanging;  // for each warp, a mask of the lanes in a warp-wide operation
  bool begun, ended;

  // State of __syncthreads.
  Site barrier_site;
  unsigned barrier_arrived, barrier_generation = 0;

  std::map<int, NamedBarrier> named_barriers;
};

decltype(emulator_run_thread)* run_thread;
std::vector<Argument> arguments;
std::vector<Block> cluster;
Block* block = nullptr;  // the block whose threads run
Thread* running = nullptr;
bool reverse;
bool early;   // programmatic dependent launch: the launch before it may not have ended
bool waited;  // some thread of the grid has waited for that launch

// State of cluster_barrier, which counts threads of all blocks.
unsigned cluster_arrived, cluster_generation;

// State of wait_long.
unsigned long_waits, long_generation;

// The stack that the scheduler runs on.
void* scheduler_stack_pointer;
const void* scheduler_stack;
size_t scheduler_stack_bytes;

// The pointers are nearly always equal, and ASan's strcmp would take far longer than the rest of an
// exchange.
bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }

void print_place() {
  fprintf(stderr, "in block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
  if (running) fprintf(stderr, ", thread %u", threadIdx.x);
  fprintf(stderr, "\n");
}

void switch_to_scheduler(void** fake_stack) {
  __sanitizer_start_switch_fiber(fake_stack, scheduler_stack, scheduler_stack_bytes);
  emulator_switch(&running->stack_pointer, scheduler_stack_pointer);
}

// The first function of a fiber. It never returns, so ASan, which clears a frame's poison on
// return, must not poison its frame.
__attribute__((no_sanitize("address"))) void start() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  run_thread(arguments.data(), static_cast<int>(arguments.size()));
  if (!running->copies.empty()) fail("the thread exits without waiting for its copies");
  sm90_exit_thread();
  running->exited = true;
  switch_to_scheduler(nullptr);
}

void resume(Thread& thread) {
  void* fake_stack;
  show_tensors(!early || thread.waited);
  running = &thread;
  threadIdx = {static_cast<unsigned>(&thread - block->threads.data()), 0, 0};
  __sanitizer_start_switch_fiber(&fake_stack, thread.stack, kStackBytes);
  emulator_switch(&scheduler_stack_pointer, thread.stack_pointer);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  running = nullptr;
}

// The i-th of n indices in the order of this run.
int in_order(int i, int n) { return reverse ? n - 1 - i : i; }

// Makes a block the running one: sets all variables that belong to a block.
void enter(Block& one) {
  const unsigned row = one.number / gridDim.x;
  block = &one;
  blockIdx = {one.number % gridDim.x, row % gridDim.y, row / gridDim.y};
  cluster_rank = static_cast<int>(&one - cluster.data());
  shared = one.shared;
}

// Calls visit() for each block of the cluster in order. Returns whether any call returned true.
template <class Visit>
bool in_each_block(const Visit& visit) {
  const int blocks = static_cast<int>(cluster.size());
  bool any = false;
  for (int i = 0; i < blocks; ++i) {
    enter(cluster[in_order(i, blocks)]);
    any |= visit();
  }
  return any;
}

// Resumes once every thread of a warp that can proceed. Returns whether there was any.
bool run_warp(int warp) {
  bool any = false;
  for (int i = 0; i < kWarp; ++i) {
    const size_t index = warp * kWarp + in_order(i, kWarp);
    if (index >= block->threads.size()) continue;
    Thread& thread = block->threads[index];
    if (thread.exited || (thread.ready && !thread.ready(thread.context))) continue;
    thread.ready = nullptr;
    resume(thread);
    any = true;
  }
  return any;
}

std::string state(const Thread& thread) {
  if (thread.exited) return "exited";
  return std::string("waits in ") + thread.site.function + ", " + thread.site.file + ":" +
         std::to_string(thread.site.line);
}

// The states of the block's threads, one line for each range of threads in the same state.
std::string states() {
  const std::vector<Thread>& threads = block->threads;
  const std::string of = cluster.size() > 1 ? " of block " + std::to_string(cluster_rank) : "";
  std::string text;
  for (size_t i = 0, first = 0; i < threads.size(); ++i) {
    if (i + 1 < threads.size() && state(threads[i]) == state(threads[i + 1])) continue;
    text += "\n  threads " + std::to_string(first) + " to " + std::to_string(i) + of + ": " +
            state(threads[i]);
    first = i + 1;
  }
  return text + sm90_describe_barriers();
}

[[noreturn]] void fail_stuck() {
  std::string text;
  for (Block& one : cluster) {
    enter(one);
    text += states();
  }
  fail("deadlock: no thread can proceed%s", text.c_str());
}

// Called when no thread can proceed: completes asynchronous operations. Returns whether there were
// any. Copies complete before the rest, so that threads which wait only for copies proceed first.
bool finish_something() {
  show_tensors(true);
  if (in_each_block(sm90_advance)) return true;
  if (long_waits == 0) return false;
  long_waits = 0;
  ++long_generation;
  return true;
}

// Whether all lanes in a thread's mask have called the same function with the same mask.
bool agree(const Thread* warp, const Thread& self) {
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(self.mask >> lane & 1)) continue;
    const Thread& other = warp[lane];
    if (other.mask != self.mask) return false;
    if (!same(other.site.function, self.site.function)) return false;
  }
  return true;
}

// Gives each lane in the mask its result.
void deliver(Thread* warp, unsigned mask) {
  unsigned ballot = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (mask >> lane & 1) ballot |= static_cast<unsigned>(warp[lane].value != 0) << lane;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const int source = warp[lane].source;
    warp[lane].result = {mask >> source & 1 ? warp[source].value : ~0ull, ballot};
  }
}

void begin_block() {
  sm90_begin_block();
  memset(shared.begin, kPoison, shared.bytes);
  block->begun = block->ended = false;
  block->barrier_arrived = 0;
  block->exchanging.assign((block->threads.size() + kWarp - 1) / kWarp, 0);
  for (Thread& thread : block->threads) {
    unsigned char* const stack = thread.stack;
    thread = {};
    thread.stack = stack;
    auto** const saved = reinterpret_cast<void**>(stack + kStackBytes) - kSavedWords;
    memset(saved, 0, kSavedWords * sizeof *saved);
    saved[kReturnAddress] = reinterpret_cast<void*>(start);
    thread.stack_pointer = saved;
  }
}

void end_block() {
  block->ended = true;
  for (const auto& [number, barrier] : block->named_barriers) {
    if (!barrier.come.empty())
      fail("some threads arrived at barrier %d, but the block ended before it had all its threads",
           number);
  }
  block->named_barriers.clear();
  show_tensors(true);
  if (early && std::none_of(block->threads.begin(), block->threads.end(),
                            [](const Thread& thread) { return thread.waited; })) {
    fail(
        "an early launch, but no thread of the block calls wait_for_earlier_launch or goes beside");
  }
  sm90_end_block();
}

size_t count_exited() {
  return std::count_if(block->threads.begin(), block->threads.end(),
                       [](const Thread& thread) { return thread.exited; });
}

// Runs each warp as far as it gets before the next one, and all of them again after a barrier. So
// between two barriers, the warp that runs first in one order runs last in the other. Returns
// whether any thread ran, or can proceed after a barrier.
bool run_warps() {
  const int warps = static_cast<int>(block->exchanging.size());
  bool any = false;
  block->begun = true;
  for (int i = 0; i < warps; ++i) {
    while (run_warp(in_order(i, warps))) any = true;
  }
  if (block->barrier_arrived == block->threads.size()) {
    block->barrier_arrived = 0;
    ++block->barrier_generation;
    any = true;
  }
  return any;
}

// Runs a block of a cluster as far as it gets. Returns whether any thread ran.
bool run_block() {
  if (block->ended) return false;
  bool any = false;
  while (run_warps()) any = true;
  if (count_exited() == block->threads.size()) end_block();
  return any;
}

// Releases the threads at the cluster barrier if all threads that have not exited wait there.
// Returns whether it released any.
bool pass_cluster_barrier() {
  size_t awaited = 0;
  for (Block& one : cluster) {
    enter(one);
    awaited += one.threads.size() - count_exited();
  }
  if (awaited == 0 || cluster_arrived < awaited) return false;
  cluster_arrived = 0;
  ++cluster_generation;
  return true;
}

void run_cluster() {
  cluster_arrived = 0;
  for (Block& one : cluster) {
    enter(one);
    begin_block();
  }
  while (in_each_block(run_block) || pass_cluster_barrier() || finish_something()) {
  }
  for (const Block& one : cluster) {
    if (!one.ended) fail_stuck();
  }
}

unsigned char* new_stack() {
  const size_t page = sysconf(_SC_PAGESIZE);
  void* const stack = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE)) fail("no memory for stacks");
  return static_cast<unsigned char*>(stack) + page;
}

void run_grid() {
  const int size = static_cast<int>(cluster.size());
  for (Block& one : cluster) {
    one.shared = {allocate("shared memory", shared.bytes, 0, false), shared.bytes};
    one.threads.resize(blockDim.x);
    for (Thread& thread : one.threads) thread.stack = new_stack();
  }
  const int clusters = static_cast<int>(gridDim.x * gridDim.y * gridDim.z) / size;
  for (int i = 0; i < clusters; ++i) {
    const int first = in_order(i, clusters) * size;
    for (int rank = 0; rank < size; ++rank) cluster[rank].number = first + rank;
    run_cluster();
  }
}

}  // namespace

void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  fprintf(stderr, "ERROR: ");
  vfprintf(stderr, format, values);
  fprintf(stderr, "\n");
  va_end(values);
  print_place();
  if (running) __sanitizer_print_stack_trace();
  _exit(1);
}

void wait(Site site, bool (*ready)(const void*), const void* context) {
  running->site = site;
  running->ready = ready;
  running->context = context;
  switch_to_scheduler(&running->fake_stack);
  __sanitizer_finish_switch_fiber(running->fake_stack, nullptr, nullptr);
}

void wait_long(Site site) {
  ++long_waits;
  const unsigned generation = long_generation;
  wait(site, [=] { return long_generation != generation; });
}

void barrier(Site site) {
  Block& own = *block;
  const Site& first = own.barrier_site;
  if (own.barrier_arrived == 0) own.barrier_site = site;
  if (site.line != first.line || !same(site.file, first.file)) {
    fail("barrier divergence: other threads wait in %s, %s:%d", first.function, first.file,
         first.line);
  }
  ++own.barrier_arrived;
  const unsigned generation = own.barrier_generation;
  wait(site, [&own, generation] { return own.barrier_generation != generation; });
}

void cluster_barrier(Site site) {
  ++cluster_arrived;
  const unsigned generation = cluster_generation;
  wait(site, [=] { return cluster_generation != generation; });
}

const void* in_block(Site site, const void* address, int rank) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared.begin;
  if (offset < 0 || offset >= ptrdiff_t(shared.bytes)) {
    fail("%s: %p does not lie in shared memory", site.function, address);
  }
  if (rank < 0 || rank >= static_cast<int>(cluster.size())) {
    fail("%s: block %d of a cluster of %zu", site.function, rank, cluster.size());
  }
  const Block& other = cluster[rank];
  if (!other.begun) fail("%s: block %d of the cluster may not have begun", site.function, rank);
  if (other.ended) fail("%s: block %d of the cluster has ended", site.function, rank);
  return other.shared.begin + offset;
}

void named_barrier(Site site, int number, int count, bool waits) {
  if (number < 1 || number > 15 || count % kWarp ||
      count > static_cast<int>(block->threads.size())) {
    fail("barrier %d of %d threads: barriers are 1 to 15, for whole warps of the block", number,
         count);
  }
  NamedBarrier& barrier = block->named_barriers[number];
  if (barrier.come.empty()) barrier.threads = count;
  if (barrier.threads != count) {
    fail("barrier %d for %d threads, but others arrived at it for %d", number, count,
         barrier.threads);
  }
  if (!barrier.come.insert(running).second)
    fail("the thread arrives at barrier %d twice in a round", number);
  const unsigned generation = barrier.generation;
  if (static_cast<int>(barrier.come.size()) == count) {
    barrier.come.clear();
    ++barrier.generation;
  }
  if (waits) wait(site, [&barrier, generation] { return barrier.generation != generation; });
}

Exchange exchange(Site site, unsigned mask, unsigned long long value, int source) {
  Thread& self = *running;
  std::vector<Thread>& threads = block->threads;
  Thread* const warp = threads.data() + threadIdx.x / kWarp * kWarp;
  const size_t lanes = threads.data() + threads.size() - warp;
  const unsigned own = 1u << (&self - warp);
  if (!(mask & own)) fail("the thread is not in its own mask %08x", mask);
  if (lanes < kWarp && mask >> lanes) fail("mask %08x names threads beyond the block", mask);
  self.site = site;
  self.mask = mask;
  self.value = value;
  self.source = source;

  unsigned& waiting = block->exchanging[threadIdx.x / kWarp];
  waiting |= own;
  if ((waiting & mask) == mask && agree(warp, self)) {
    deliver(warp, mask);
    waiting &= ~mask;
  }
  wait(site, [&waiting, own] { return !(waiting & own); });
  return self.result;
}

void go_beside_earlier_launch(Site site) {
  if (!early) return;
  running->waited = true;
  wait_long(site);
}

void wait_for_earlier_launch(Site site) {
  if (!early) return;
  running->waited = true;
  waited = true;
  wait_long(site);
}

void copy_async(void* shared, const void* global, int bytes, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % bytes) fail("copy_async to a misaligned address");
  if (reinterpret_cast<uintptr_t>(global) % bytes) fail("copy_async from a misaligned address");
  Copy copy = {static_cast<unsigned char*>(shared), {}, bytes, running->groups};
  if (valid) memcpy(copy.data, global, bytes);
  memset(shared, kPoison, bytes);
  running->copies.push_back(copy);
}

void copy_async_commit() { ++running->groups; }

void copy_async_wait(int pending) {
  std::vector<Copy>& copies = running->copies;
  auto copy = copies.begin();
  for (; copy != copies.end() && copy->group < running->groups - pending; ++copy) {
    memcpy(copy->target, copy->data, copy->bytes);
  }
  copies.erase(copies.begin(), copy);
}

void take_copies(void (*take)(void* context, void* shared, const void* data, int bytes),
                 void* context) {
  for (const Copy& copy : running->copies) take(context, copy.target, copy.data, copy.bytes);
  running->copies.clear();
}

}  // namespace emulator

extern "C" {

const char* __asan_default_options() { return "detect_leaks=0"; }
const char* __ubsan_default_options() { return "print_stacktrace=1"; }

void __asan_on_error() {
  emulator::print_place();
  if (!emulator::are_tensors_shown()) {
    fprintf(stderr, "in an early launch, before wait_for_earlier_launch\n");
  }
  emulator::print_address(static_cast<unsigned char*>(__asan_get_report_address()));
}

void __ubsan_on_report() { emulator::print_place(); }

}  // extern "C"

namespace emulator {
namespace {

decltype(emulator_run_thread)* load_kernel(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW);
  void* const entry = handle ? dlsym(handle, "emulator_run_thread") : nullptr;
  if (!entry) fail("%s", dlerror());
  return reinterpret_cast<decltype(emulator_run_thread)*>(entry);
}

// Parses "null", or name:bytes:offset for a tensor whose address is `offset` bytes after a multiple
// of 1024.
bool read_tensor(const char* text, unsigned char** address) {
  char name[64];
  ptrdiff_t bytes, offset;
  if (!strcmp(text, "null")) {
    *address = nullptr;
  } else if (sscanf(text, "%63[^:]:%td:%td", name, &bytes, &offset) == 3) {
    *address = find_or_read(name, bytes, offset);
  } else {
    return false;
  }
  return true;
}

// Parses an int, a tensor, or a tensor map: "map", the tensor and the map's numbers, with blanks in
// between.
Argument read_argument(const std::string& text) {
  unsigned char* address;
  if (text.compare(0, 4, "map ") == 0) {
    const size_t end = text.find(' ', 4);
    if (end == text.npos || !read_tensor(text.substr(4, end - 4).c_str(), &address)) {
      fail("not a tensor map: %s", text.c_str());
    }
    return read_tensor_map(address, text.c_str() + end);
  }
  if (read_tensor(text.c_str(), &address)) return address;
  return atoi(text.c_str());
}

}  // namespace
}  // namespace emulator

// Arguments: the kernel's library, the order (forward or reverse), the grid, the block, the bytes
// of shared memory, whether it is an early launch (PDL), the blocks of a cluster, then the kernel's
// arguments. The contents of the tensors come from stdin and go to stdout, each tensor once, in the
// order of the arguments.
int main(int argc, char** argv) {
  using namespace emulator;
  if (argc < 10) fail("too few arguments");
  run_thread = load_kernel(argv[1]);
  reverse = !strcmp(argv[2], "reverse");
  gridDim = {unsigned(atoi(argv[3])), unsigned(atoi(argv[4])), unsigned(atoi(argv[5]))};
  blockDim = {unsigned(atoi(argv[6])), 1, 1};
  shared.bytes = atoi(argv[7]);
  early = atoi(argv[8]);
  const int blocks = atoi(argv[9]);
  if (!gridDim.x || !gridDim.y || !gridDim.z || gridDim.y > 65535 || gridDim.z > 65535 ||
      !blockDim.x || blockDim.x > 1024 || shared.bytes > 227 * 1024) {
    fail("CUDA refuses such a launch");
  }
  if (blocks < 1 || blocks > kMostClusterBlocks || gridDim.x % blocks) {
    fail("CUDA refuses clusters of %d blocks in a grid of %u", blocks, gridDim.x);
  }
  cluster.resize(blocks);
  for (int i = 10; i < argc; ++i) arguments.push_back(read_argument(argv[i]));
  run_grid();
  if (early && !waited) fail("an early launch, but no block waits for the launch before");
  write_tensors();
  return fflush(stdout);
}
