#include "mma.h"

#include <cstdint>
#include <cstring>

namespace emulator {

namespace {

constexpr int kLanes = 32, kMatrixRows = 8, kMatrixRowBytes = 16;

// The operands of each lane of a warp.
struct Lane {
  const unsigned char* row;
  unsigned left[4], right[2];
};
Lane lanes_of_warps[kMostClusterBlocks][1024 / kLanes][kLanes];

// All lanes store their operands, then all read the operands they need, then all proceed.
template <class Put, class Read>
void together(Site site, const Put& put, const Read& read) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  Lane* const lanes = lanes_of_warps[cluster_rank][threadIdx.x / kLanes];
  put(lanes[lane]);
  exchange(site, ~0u, 0, lane);
  read(lanes, lane);
  exchange(site, ~0u, 0, lane);
}

void check_row(Site site, const unsigned char* row) {
  const auto offset = row - shared.begin;
  if (offset < 0 || offset + kMatrixRowBytes > shared.bytes) {
    fail("%s: a row of 16 bytes at byte %lld of shared memory, which has %u", site.function,
         static_cast<long long>(offset), shared.bytes);
  }
  if (offset % kMatrixRowBytes) {
    fail("%s: a row at byte %lld, not a multiple of 16", site.function,
         static_cast<long long>(offset));
  }
}

}  // namespace

void load_matrices(Site site, unsigned (&fragments)[4], const void* row, bool transposed) {
  const auto read = [&](const Lane* lanes, int lane) {
    const int group = lane / 4, place = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const Lane* const rows = lanes + i * kMatrixRows;
      unsigned char* const target = reinterpret_cast<unsigned char*>(fragments + i);
      if (!transposed) {
        memcpy(target, rows[group].row + 4 * place, 4);
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        memcpy(target + 2 * half, rows[2 * place + half].row + 2 * group, 2);
      }
    }
  };
  const auto* const address = static_cast<const unsigned char*>(row);
  check_row(site, address);
  together(site, [&](Lane& mine) { mine.row = address; }, read);
}

void store_matrices(Site site, void* row, const unsigned (&fragments)[4], bool transposed) {
  auto* const target = static_cast<unsigned char*>(row);
  const auto read = [&](const Lane* lanes, int lane) {
    const int matrix = lane / kMatrixRows, mine = lane % kMatrixRows;
    for (int other = 0; other < kMatrixRows; ++other) {
      const int from = transposed ? other : mine, place = transposed ? mine : other;
      const unsigned& pair = lanes[4 * from + place / 2].left[matrix];
      memcpy(target + 2 * other, reinterpret_cast<const unsigned char*>(&pair) + 2 * (place % 2),
             2);
    }
  };
  check_row(site, target);
  together(site, [&](Lane& mine) { memcpy(mine.left, fragments, sizeof mine.left); }, read);
}

void gather_rows(Site site, unsigned (&rows)[2][kRowBytes / 4], const unsigned (&fragments)[4]) {
  const auto read = [&](const Lane* lanes, int lane) {
    const Lane* const quad = lanes + lane / 4 * 4;
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 4; ++i) rows[k % 2][k / 2 * 4 + i] = quad[i].left[k];
    }
  };
  together(site, [&](Lane& mine) { memcpy(mine.left, fragments, sizeof mine.left); }, read);
}

void mma(Site site, Scalar scalar, float* accumulators, const unsigned* left,
         const unsigned* right) {
  Fragment fragment;
  const auto put = [&](Lane& mine) {
    memcpy(mine.left, left, sizeof mine.left);
    memcpy(mine.right, right, sizeof mine.right);
  };
  const auto read = [&](const Lane* lanes, int lane) {
    const int group = lane / 4, place = lane % 4;
    for (int word = 0; word < kRowBytes / 4; ++word) {
      const int half = word / 4;  // half of a row of 32 bytes
      for (int below = 0; below < 2; ++below) {
        const Lane& from = lanes[4 * group + word % 4];
        memcpy(fragment.left[below] + 4 * word, &from.left[2 * half + below], 4);
        const Lane& column = lanes[4 * (2 * place + below) + word % 4];
        memcpy(fragment.right[below] + 4 * word, &column.right[half], 4);
      }
    }
  };
  together(site, put, read);
  multiply(scalar, fragment, 8, accumulators);
}

}  // namespace emulator
