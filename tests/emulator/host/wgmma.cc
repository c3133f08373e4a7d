// wgmma. Each takes as long as hardware might take: it completes when no thread can proceed without
// it. It is an error if its operands change before that.
#include <cstdint>
#include <cstring>

#include "in_flight.h"
#include "sm90.h"

namespace emulator {

namespace {

constexpr int kPattern = 1024;  // bytes after which every swizzle repeats

struct Wgmma {
  Site site;
  Scalar scalar;
  float* accumulators;
  int columns;
  Operand left, right;
  Rows rows;  // the left matrix, if rows.registers is not null
  bool accumulate;
  unsigned long long fingerprint;
  int group;
};

// The true values of a thread's accumulators, which are poisoned while a wgmma is in flight.
struct Accumulators {
  float* address;
  int count;
  int pending;  // wgmmas in flight that add to these
  float values[128];
};

struct Thread {
  std::vector<Wgmma> wgmmas;
  std::vector<Accumulators> accumulators;
  int groups = 0;
  bool fenced = false;
  unsigned long long history = 0;  // hash of the instructions that its warpgroup executes
};

// The threads of each block of the cluster.
std::vector<Thread> blocks[kMostClusterBlocks];

Thread& self() { return blocks[cluster_rank][threadIdx.x]; }

// Where a matrix ends in shared memory, its whole last piece included.
int end_of_matrix(const Operand& operand, int start, int rows) {
  if (operand.order == Order::kCores) {
    return start + operand.leading + (rows / 8 - 1) * operand.stride + 128;
  }
  if (operand.order == Order::kSwizzled) {
    return start / kPattern * kPattern + (rows / 8 - 1) * operand.stride + kPattern;
  }
  const int pieces = (2 * rows - 1) / operand.span;
  return start + operand.stride + pieces * operand.leading + 8 * operand.span;
}

// The swizzle is a function of the address: a matrix across K may begin at any row of the pattern
// (tests/gpu/test_swizzled.py). A matrix along K begins where TMA has the pattern begin, at a
// multiple of 1024 bytes, or later in its first row of 128 bytes, which is all that kernels need.
void check_swizzled(const Operand& operand, int start) {
  if (operand.order == Order::kMnMajor) {
    if (start % operand.span || operand.stride % operand.span || operand.leading % operand.span) {
      fail("wgmma reads rows of %d bytes from byte %d of shared memory, with offsets %d and %d",
           operand.span, start, operand.leading, operand.stride);
    }
    return;
  }
  const int latest = operand.span - kRowBytes;
  if (start % kPattern > latest) {
    fail(
        "wgmma reads a swizzled matrix from byte %d of shared memory, at most %d after a multiple "
        "of %d",
        start, latest, kPattern);
  }
  if (operand.span != 128 || operand.stride % kPattern) {
    fail("wgmma reads a swizzled matrix with offsets %d and %d, not multiples of %d",
         operand.leading, operand.stride, kPattern);
  }
}

Order order_of(Matrix matrix) {
  const bool swizzled = matrix.descriptor >> 62 > 0;
  if (matrix.mn_major && !swizzled) {
    fail("wgmma reads an MN-major matrix that is not swizzled");
  }
  if (matrix.mn_major) return Order::kMnMajor;
  return swizzled ? Order::kSwizzled : Order::kCores;
}

Operand operand(Matrix matrix, int rows) {
  constexpr unsigned long long kFields = 0xc000'3fff'3fff'3fff;
  const unsigned long long fields = matrix.descriptor;
  if (fields & ~kFields) fail("%016llx does not describe a matrix in shared memory", fields);
  const int start = static_cast<int>(fields & 0x3fff) << 4;
  const int leading = static_cast<int>(fields >> 16 & 0x3fff) << 4;
  const int stride = static_cast<int>(fields >> 32 & 0x3fff) << 4;
  constexpr int kSpans[] = {0, 128, 64, 32};
  const Operand operand = {order_of(matrix), shared.begin + start, leading, stride,
                           kSpans[fields >> 62]};
  if (operand.order != Order::kCores) check_swizzled(operand, start);
  const int end = end_of_matrix(operand, start, rows);
  if (end > static_cast<int>(shared.bytes)) {
    fail("wgmma reads a matrix of %d rows from byte %d to byte %d of shared memory, which has %u",
         rows, start, end, shared.bytes);
  }
  return operand;
}

// The accumulators at an address; if no wgmma in flight uses them, takes them over and poisons
// them.
Accumulators& take_accumulators(Thread& thread, float* address, int count) {
  for (Accumulators& accumulators : thread.accumulators) {
    if (accumulators.address == address && accumulators.count == count) return accumulators;
    if (accumulators.address < address + count &&
        address < accumulators.address + accumulators.count) {
      fail("wgmma adds to only a part of the accumulators of another one in flight");
    }
  }
  thread.accumulators.push_back({address, count, 0, {}});
  Accumulators& accumulators = thread.accumulators.back();
  memcpy(accumulators.values, address, count * sizeof *address);
  memset(address, kPoison, count * sizeof *address);
  return accumulators;
}

void give_back_accumulators(Thread& thread, Accumulators& accumulators, const Site& site) {
  if (!is_poison(accumulators.address, accumulators.count * sizeof *accumulators.address)) {
    fail("the accumulators were written during a wgmma, %s:%d", site.file, site.line);
  }
  memcpy(accumulators.address, accumulators.values,
         accumulators.count * sizeof *accumulators.address);
  thread.accumulators.erase(thread.accumulators.begin() +
                            (&accumulators - thread.accumulators.data()));
}

Fragment& read_fragment(const Wgmma& wgmma) {
  static Fragment fragment;
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup);
  if (wgmma.rows.registers) {
    memcpy(fragment.left, wgmma.rows.words, sizeof fragment.left);
  } else {
    gather_left(fragment, wgmma.left, thread);
  }
  gather_right(fragment, wgmma.right, wgmma.columns, thread);
  return fragment;
}

void finish(Thread& thread, const Wgmma& wgmma) {
  const Fragment& fragment = read_fragment(wgmma);
  if (fingerprint(fragment, wgmma.columns) != wgmma.fingerprint) {
    fail("shared memory changed during a wgmma, %s:%d", wgmma.site.file, wgmma.site.line);
  }
  const Rows& rows = wgmma.rows;
  if (rows.registers && memcmp(rows.registers, rows.held, sizeof rows.held)) {
    fail("registers changed during a wgmma, %s:%d", wgmma.site.file, wgmma.site.line);
  }
  Accumulators& accumulators = take_accumulators(thread, wgmma.accumulators, wgmma.columns / 2);
  if (!wgmma.accumulate) std::fill_n(accumulators.values, accumulators.count, 0.0f);
  multiply(wgmma.scalar, fragment, wgmma.columns, accumulators.values);
  if (--accumulators.pending == 0) give_back_accumulators(thread, accumulators, wgmma.site);
}

void matrix_in_unison(Matrix matrix) {
  in_unison(matrix.descriptor);
  in_unison(int(matrix.mn_major));
}

void start(Wgmma wgmma, Matrix right) {
  Thread& thread = self();
  const unsigned group_end = threadIdx.x / kWarpgroup * kWarpgroup + kWarpgroup;
  if (group_end > blockDim.x) {
    fail("wgmma by thread %u in a block of %u: no whole warpgroup", threadIdx.x, blockDim.x);
  }
  if (!thread.fenced) fail("wgmma without a wgmma_fence since the last wgmma_wait");
  in_unison(static_cast<unsigned long long>(wgmma.scalar) << 32 | wgmma.columns << 1 |
            int(wgmma.accumulate));
  matrix_in_unison(right);
  wgmma.fingerprint = fingerprint(read_fragment(wgmma), wgmma.columns);
  ++take_accumulators(thread, wgmma.accumulators, wgmma.columns / 2).pending;
  thread.wgmmas.push_back(wgmma);
}

void check_unison() {
  const std::vector<Thread>& threads = blocks[cluster_rank];
  for (size_t i = 0; i < threads.size(); ++i) {
    const size_t first = i / kWarpgroup * kWarpgroup;
    if (threads[i].history != threads[first].history) {
      fail("threads %zu and %zu of a warpgroup executed different wgmma or setmaxnreg", first, i);
    }
  }
}

}  // namespace

void wgmma(Site site, Scalar scalar, float* accumulators, int columns, Matrix left, Matrix right,
           bool accumulate) {
  matrix_in_unison(left);
  const Operand rows = operand(left, 64), others = operand(right, columns);
  const int group = self().groups;
  start({site, scalar, accumulators, columns, rows, others, {}, accumulate, 0, group}, right);
}

void wgmma(Site site, Scalar scalar, float* accumulators, int columns, const Rows& left,
           Matrix right, bool accumulate) {
  const Operand others = operand(right, columns);
  const int group = self().groups;
  start({site, scalar, accumulators, columns, {}, others, left, accumulate, 0, group}, right);
}

void wgmma_fence() {
  self().fenced = true;
  in_unison(1);
}

void wgmma_commit() {
  ++self().groups;
  in_unison(2);
}

void wgmma_wait(Site site, int pending) {
  Thread& thread = self();
  thread.fenced = false;
  in_unison(3 + pending);
  const size_t done = count_done(thread.wgmmas, thread.groups, pending);
  if (done == 0) return;
  wait_long(site);
  for (size_t i = 0; i < done; ++i) finish(thread, thread.wgmmas[i]);
  thread.wgmmas.erase(thread.wgmmas.begin(), thread.wgmmas.begin() + done);
  exchange(site, ~0u, 0, 0);  // the lanes of a warp wait together
}

void in_unison(unsigned long long what) {
  unsigned long long& history = self().history;
  history = (history ^ what) * 0x9e3779b97f4a7c15u + 1;
  history ^= history >> 29;
}

void wgmma_begin_block() { blocks[cluster_rank].assign(blockDim.x, {}); }

void wgmma_exit_thread() {
  if (!self().wgmmas.empty()) fail("the thread exits without waiting for its wgmma");
}

void wgmma_end_block() { check_unison(); }

}  // namespace emulator
