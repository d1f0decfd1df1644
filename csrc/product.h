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

template <int vectors, Result result, Left left, int rows = TILE>
WF_INLINE void product_panel(const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                             int64_t depth) {
  V sums[rows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) sums[m][z] = result == ADD ? load(c + m * ldc + z * LANES) : V{};
  const float *last = a + 3 * lda;
  asm("" : "+r"(last));  // two pointers, not one and five offsets: those would not fit the registers
  for (int64_t k = 0; k < depth; k++, b += ldb) {
    V right[vectors];
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) right[z] = load(b + z * LANES);
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) __builtin_prefetch(b + AHEAD * ldb + z * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
      const V x = all(left == COLUMNS ? a[k * lda + m] : m < 3 ? a[m * lda + k] : last[(m - 3) * lda + k]);
#pragma GCC unroll 4
      for (int z = 0; z < vectors; z++) sums[m][z] += x * right[z];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int z = 0; z < vectors; z++) store(c + m * ldc + z * LANES, sums[m][z]);
}

// C [TILE, columns], columns rounded up to whole vectors; B [depth, columns].
template <Result result, Left left = ROWS>
inline void product(const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
                    int64_t columns) {
  for (; columns > PANEL - LANES; columns -= PANEL, b += PANEL, c += PANEL)
    product_panel<WIDE, result, left>(a, lda, b, ldb, c, ldc, depth);
  if (columns <= 0) return;
  switch ((columns + LANES - 1) / LANES) {
    case 1: return product_panel<1, result, left>(a, lda, b, ldb, c, ldc, depth);
    case 2: return product_panel<(WIDE > 2 ? 2 : 1), result, left>(a, lda, b, ldb, c, ldc, depth);
    default: return product_panel<(WIDE > 3 ? 3 : 1), result, left>(a, lda, b, ldb, c, ldc, depth);
  }
}

// B in panels: [columns / PANEL][depth, PANEL].
template <Result result>
inline void product_panels(const float *a, int64_t lda, const float *b, float *c, int64_t ldc, int64_t depth,
                           int64_t columns) {
  for (; columns > 0; columns -= PANEL, b += PANEL * depth, c += PANEL)
    product<result>(a, lda, b, PANEL, c, ldc, depth, smaller(columns, PANEL));
}

}  // namespace wf::WF_ISA
