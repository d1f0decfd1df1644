// Scratch memory: one block, given out piece by piece.
#pragma once
#include <cstdlib>
#include <new>
#include <utility>

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

// What a thread has given back, up to a few pieces: fresh from the system, memory takes longer to touch for the first
// time than a call takes to work on it.
class Kept {
 public:
  struct Piece {
    char *start = nullptr;
    int64_t bytes = 0;
  };

  Kept() = default;
  Kept(const Kept &) = delete;
  Kept &operator=(const Kept &) = delete;
  ~Kept() {
    for (const Piece &piece : pieces_) std::free(piece.start);
  }

  // One that is large enough, but not much too large; or none.
  Piece take(int64_t bytes) {
    for (Piece &piece : pieces_)
      if (piece.bytes >= bytes && piece.bytes / 2 <= bytes) return std::exchange(piece, Piece());
    return Piece();
  }

  // The oldest makes room.
  void give(Piece piece) {
    std::free(std::exchange(pieces_[next_], piece).start);
    next_ = (next_ + 1) % MOST;
  }

 private:
  static constexpr int MOST = 4;
  Piece pieces_[MOST];
  int next_ = 0;
};

// Of a call: kept for later ones on the same thread, if it is neither little nor too much for the threads that work on
// it.
class Memory {
 public:
  Memory(int64_t bytes, int64_t threads) : keep_(bytes >= LEAST_KEPT && bytes <= threads * MOST_KEPT) {
    bytes = whole(bytes + 1, CACHE_LINE);
    if (keep_) piece_ = kept().take(bytes);
    if (piece_.start) return;
    piece_ = {static_cast<char *>(std::aligned_alloc(CACHE_LINE, size_t(bytes))), bytes};
    if (!piece_.start) throw std::bad_alloc();
  }
  ~Memory() { keep_ ? kept().give(piece_) : std::free(piece_.start); }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  char *start() const { return piece_.start; }

 private:
  static constexpr int64_t LEAST_KEPT = 1 << 16;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t MOST_KEPT = -1;  // each call finds what nobody has written
#else
  static constexpr int64_t MOST_KEPT = 1 << 23;
#endif
  static Kept &kept() {
    static thread_local Kept of_thread;
    return of_thread;
  }

  bool keep_;
  Kept::Piece piece_;
};

}  // namespace wf::WF_ISA
