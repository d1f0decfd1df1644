// C (+)= A B, a few rows at a time, with all of C in registers.
#pragma once
#include "vector.h"

namespace wf::WF_ISA {

constexpr int TILE = 6;                    // rows of C
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors in a row of C
constexpr int PANEL = WIDE * LANES;        // columns of C

constexpr int64_t AHEAD = 12;  // rows of B asked for before they are used

enum Result { SET, ADD };
enum Left { ROWS, COLUMNS };  // A[m, k] is a[m lda + k], or a[k lda + m]

// A and B, or some columns of A and as many rows of B.
struct Part {
  const float *a;
  int64_t lda;
  const float *b;
  int64_t ldb, depth;
};

template <int vectors, Left left, int rows>
WF_INLINE void add_product(const Part &part, V (&sums)[rows][vectors]) {
  const float *a = part.a, *b = part.b;
  const int64_t lda = part.lda, ldb = part.ldb, depth = part.depth;
  const float *last = a + 3 * lda;
  asm("" : "+r"(last));  // two pointers, not one and five offsets: those would not fit the registers
  for (int64_t k = 0; k < depth; k++, b += ldb) {
    V right[vectors];
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) right[z] = load(b + z * LANES);
    if constexpr (left == ROWS) {  // by columns, B is a group of queries, and near
#pragma GCC unroll 4
      for (int z = 0; z < vectors; z++) __builtin_prefetch(b + AHEAD * ldb + z * LANES);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      const V x = all(left == COLUMNS ? a[k * lda + m] : m < 3 ? a[m * lda + k] : last[(m - 3) * lda + k]);
#pragma GCC unroll 4
      for (int z = 0; z < vectors; z++) sums[m][z] += x * right[z];
    }
  }
}

template <int vectors, Result result, Left left, int rows = TILE>
WF_INLINE void product_panel(const Part *parts, int64_t count, int64_t column, float *c, int64_t ldc) {
  V sums[rows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) sums[m][z] = result == ADD ? load(c + m * ldc + z * LANES) : V{};
  for (int64_t n = 0; n < count; n++) {
    Part part = parts[n];
    part.b += column;
    add_product<vectors, left, rows>(part, sums);
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) store(c + m * ldc + z * LANES, sums[m][z]);
}

// C [TILE, columns], columns rounded up to whole vectors; B [depth, columns]. Of several parts, the sum.
template <Result result, Left left = ROWS>
inline void product(const Part *parts, int64_t count, float *c, int64_t ldc, int64_t columns) {
  int64_t done = 0;
  for (; columns - done > PANEL - LANES; done += PANEL)
    product_panel<WIDE, result, left>(parts, count, done, c + done, ldc);
  if (columns <= done) return;
  switch ((columns - done + LANES - 1) / LANES) {
    case 1: return product_panel<1, result, left>(parts, count, done, c + done, ldc);
    case 2: return product_panel<(WIDE > 2 ? 2 : 1), result, left>(parts, count, done, c + done, ldc);
    default: return product_panel<(WIDE > 3 ? 3 : 1), result, left>(parts, count, done, c + done, ldc);
  }
}

template <Result result, Left left = ROWS>
inline void product(const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
                    int64_t columns) {
  const Part part{a, lda, b, ldb, depth};
  product<result, left>(&part, 1, c, ldc, columns);
}

// B in panels: [columns / PANEL][depth, PANEL].
template <Result result>
inline void product_panels(const float *a, int64_t lda, const float *b, float *c, int64_t ldc, int64_t depth,
                           int64_t columns) {
  for (; columns > 0; columns -= PANEL, b += PANEL * depth, c += PANEL)
    product<result>(a, lda, b, PANEL, c, ldc, depth, smaller(columns, PANEL));
}

}  // namespace wf::WF_ISA
