// Requests of memory ahead of its use, a few cache lines at a time, while a kernel multiplies.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace fastconv::cpu {

// Runs of neighbouring bytes, apart along up to three axes, the outermost first.
class Ahead {
 public:
  enum Use { kRead, kWritten };

  struct Along {
    int64_t count, stride;  // in bytes
  };

  Ahead() = default;

  // The lines will be requested in about so many shares.
  Ahead(Use use, const void* first, std::array<Along, 3> axes, int64_t run, int64_t shares)
      : use_(use), line_(static_cast<const char*>(first)), axes_(axes), run_(run) {
    for (int i = 2; i >= 0 && axes_[i].stride == run_; --i) {  // runs that follow one another
      run_ *= axes_[i].count;
      axes_[i].count = 1;
    }
    left_ = (run_ + kLine - 1) / kLine;
    for (const Along& axis : axes_) left_ *= axis.count;
    share_ = (left_ + shares - 1) / shares;
  }

  // Requests the next share.
  void next() {
    const int64_t some = std::min(share_, left_);
    left_ -= some;
    for (int64_t i = 0; i < some; ++i) {
      if (use_ == kWritten) {
        __builtin_prefetch(line_ + within_, 1);
      } else {
        __builtin_prefetch(line_ + within_, 0, 2);  // the L1 cache has no room for it yet
      }
      within_ += kLine;
      if (within_ >= run_) next_run();
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  void next_run() {
    within_ = 0;
    for (int i = 2; i >= 0; --i) {
      line_ += axes_[i].stride;
      if (++at_[i] < axes_[i].count) return;
      line_ -= axes_[i].count * axes_[i].stride;
      at_[i] = 0;
    }
  }

  Use use_ = kRead;
  const char* line_ = nullptr;  // the first of a run
  std::array<Along, 3> axes_{};
  std::array<int64_t, 3> at_{};
  int64_t run_ = 0, within_ = 0;
  int64_t share_ = 0, left_ = 0;  // in lines
};

}  // namespace fastconv::cpu
