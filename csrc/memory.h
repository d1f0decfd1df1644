// Scratch memory: one block, given out piece by piece.
#pragma once
#include <cstdlib>
#include <new>

#include "vector.h"

namespace wf::WF_ISA {

constexpr int64_t CACHE_LINE = 64;

// Counts with `base` null, gives out once it has memory: run the same code twice.
class Arena {
 public:
  explicit Arena(char *base = nullptr) : base_(base) {}

  // `before`: how many more may be used in front.
  template <class T>
  T *take(int64_t count, int64_t before = 0) {
    T *piece = base_ ? reinterpret_cast<T *>(base_ + used_) + before : nullptr;
    used_ += whole((before + count) * int64_t(sizeof(T)) + PAD, CACHE_LINE);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t PAD = 4 * LANES;  // whole vectors may be read and written past the end
  char *base_;
  int64_t used_ = 0;
};

class Memory {
 public:
  explicit Memory(int64_t bytes)
      : start_(static_cast<char *>(std::aligned_alloc(CACHE_LINE, size_t(whole(bytes + 1, CACHE_LINE))))) {
    if (!start_) throw std::bad_alloc();
  }
  ~Memory() { std::free(start_); }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  char *start() const { return start_; }

 private:
  char *start_;
};

}  // namespace wf::WF_ISA
