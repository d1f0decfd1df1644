// Products in registers: C (+)= A B, a few rows at a time, with all of C in registers.
#pragma once
#include "memory.h"
#include "rows.h"

namespace wf::WF_ISA {

constexpr int ROWS = 6;                               // rows of C: as many as fit registers
constexpr int TILE = 2 * ROWS;                        // queries that are worked on at a time
constexpr int GROUP = 4 * TILE;                       // queries whose sums over queries are made at once
constexpr int WIDE = LANES == 16 ? 4 : 2;             // vectors in a row of C
constexpr int PANEL = WIDE * LANES;                   // columns of C
constexpr int BUCKETS = LANES == 4 ? 12 : 3 * LANES;  // whole tiles, and whole vectors
constexpr int64_t CHUNK = 0;                          // nothing of a left side needs room
constexpr int64_t FORWARD_BLOCK = 1152;               // keys that are worked on at a time, about
constexpr int64_t STEP = 1;                           // from which columns on a product may be taken: multiples

constexpr int64_t AHEAD = 12;                      // rows of B asked for before they are used
constexpr int VECTORS = CACHE_LINE / (4 * LANES);  // that come with one cache line

enum Side { BY_ROWS, BY_COLUMNS };  // A[m, k] is a[m lda + k], or a[k lda + m]

template <int vectors, Side side, int rows>
WF_INLINE void add_product(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth,
                           V (&sums)[rows][vectors]) {
  const float *last = a + 3 * lda;
  asm("" : "+r"(last));  // two pointers, not one and five offsets: those would not fit the registers
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k++, b += ldb) {
    V right[vectors];
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) right[z] = load(b + z * LANES);
    if constexpr (side == BY_ROWS) {  // by columns, B is a group of queries, and near
#pragma GCC unroll 4
      for (int z = 0; z < vectors; z += VECTORS) __builtin_prefetch(b + AHEAD * ldb + z * LANES);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      const V x = all(side == BY_COLUMNS ? a[k * lda + m] : m < 3 ? a[m * lda + k] : last[(m - 3) * lda + k]);
#pragma GCC unroll 4
      for (int z = 0; z < vectors; z++) sums[m][z] += x * right[z];
    }
  }
}

template <int vectors, Result result, Side side, int rows = ROWS>
WF_INLINE void product_panel(const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                             int64_t depth) {
  V sums[rows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) sums[m][z] = result == ADD ? load(c + m * ldc + z * LANES) : V{};
  add_product<vectors, side, rows>(a, lda, b, ldb, depth, sums);
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) store(c + m * ldc + z * LANES, sums[m][z]);
}

// C [ROWS, columns], columns rounded up to whole vectors, at most PANEL; B [depth, columns].
template <Result result, Side side = BY_ROWS>
inline void product(const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
                    int64_t columns) {
  switch ((columns + LANES - 1) / LANES) {
    case 1: return product_panel<1, result, side>(a, lda, b, ldb, c, ldc, depth);
    case 2: return product_panel<(WIDE > 2 ? 2 : WIDE), result, side>(a, lda, b, ldb, c, ldc, depth);
    case 3: return product_panel<(WIDE > 3 ? 3 : WIDE), result, side>(a, lda, b, ldb, c, ldc, depth);
    default: return product_panel<WIDE, result, side>(a, lda, b, ldb, c, ldc, depth);
  }
}

// The left side of a product: rows where they lie, up to a whole tile of them.
class Left {
 public:
  Left() = default;
  Left(int64_t, Arena &) {}
  void read(const float *a, int64_t lda, int64_t depth, int64_t count) {
    a_ = a, lda_ = lda, depth_ = depth, rows_ = count;
  }

  const float *from(int64_t row) const { return a_ + row * lda_; }
  int64_t row() const { return lda_; }
  int64_t depth() const { return depth_; }
  int64_t rows() const { return rows_; }

 private:
  const float *a_ = nullptr;
  int64_t lda_ = 0, depth_ = 0, rows_ = 0;
};

// The right side, [depth, columns]: row by row, or in panels of PANEL columns, [panel][depth, PANEL].
class Right {
 public:
  Right() = default;
  Right(int64_t depth, int64_t columns, Arena &arena)
      : b_(arena.take<float>(depth * whole(columns, PANEL))), room_(arena.take<float>(LANES * whole(depth))) {}

  // row(i, room) is row i, whole(columns) floats, in `room` or where it lies.
  template <class Row>
  void read(int64_t depth, int64_t columns, Row row) {
    row_ = whole(columns), panel_ = PANEL;
    for (int64_t i = 0; i < depth; i++) {
      float *to = b_ + i * row_;
      if (const float *found = row(i, to); found != to) std::memcpy(to, found, size_t(row_) * 4);
    }
  }

  // The same, row(i, room) being column i: whole(depth) floats.
  template <class Row>
  void read_transposed(int64_t depth, int64_t columns, Row row) {
    row_ = PANEL, panel_ = PANEL * depth;
    for (int64_t n = 0; n < columns; n += LANES) {
      const float *rows[LANES];
      for (int64_t i = 0; i < LANES; i++) rows[i] = n + i < columns ? row(n + i, room_ + i * whole(depth)) : nullptr;
      float *to = b_ + n / PANEL * panel_ + n % PANEL;
      for (int64_t d = 0; d < depth; d += LANES) {
        V square[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) square[i] = rows[i] ? load(rows[i] + d) : V{};
        transpose(square);
        if (d + LANES <= depth) {
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++) store(to + (d + i) * row_, square[i]);
        } else {
          for (int i = 0; i < depth - d; i++) store(to + (d + i) * row_, square[i]);
        }
      }
    }
  }

  const float *from(int64_t column) const { return b_ + column / PANEL * panel_ + column % PANEL; }
  int64_t row() const { return row_; }

 private:
  float *b_ = nullptr, *room_ = nullptr;
  int64_t row_ = 0, panel_ = 0;
};

// c (+)= a·b, of `columns` columns of b from `first` on.
template <Result result>
inline void multiply(const Left &a, const Right &b, int64_t first, int64_t columns, float *c, int64_t ldc) {
  for (int64_t n = first, some; n < first + columns; n += some) {
    some = smaller(PANEL - n % PANEL, first + columns - n);
    for (int64_t m = 0; m < a.rows(); m += ROWS)
      product<result>(a.from(m), a.row(), b.from(n), b.row(), c + m * ldc + n - first, ldc, a.depth(), some);
  }
}

// c (+)= rows of a · b.
template <Result result>
inline void multiply_rows(const float *a, int64_t lda, int64_t depth, int64_t count, Left &room, const Right &b,
                          int64_t columns, float *c, int64_t ldc) {
  room.read(a, lda, depth, count);
  multiply<result>(room, b, 0, columns, c, ldc);
}

// Sums over queries: [columns, features], Σ_m weights[m, column] rows[m].
class Sums {
 public:
  Sums() = default;
  Sums(int64_t columns, int64_t features, Arena &arena)
      : features_(whole(features)), sums_(arena.take<float>(whole(columns, TILE) * features_)) {}

  void clear(int64_t columns) { std::memset(sums_, 0, size_t(whole(columns, ROWS) * features_) * 4); }

  // Of the first columns, and at most GROUP rows [count, whole(features)].
  void add(const float *weights, int64_t row, const float *rows, int64_t count, int64_t columns) {
    for (int64_t n = 0; n < columns; n += ROWS)
      for (int64_t d = 0; d < features_; d += PANEL)
        product<ADD, BY_COLUMNS>(weights + n, row, rows + d, features_, sums_ + n * features_ + d, features_, count,
                                 smaller(PANEL, features_ - d));
  }

  // All of them: [columns, whole(features)].
  float *finish() { return sums_; }

 private:
  int64_t features_ = 0;
  float *sums_ = nullptr;
};

// What a thread needs before its first product.
struct Products {
  Products() {}
};

}  // namespace wf::WF_ISA
