// Products on tiles of 16 x 16 floats (Intel's AMX), which come of products of bfloat16s, summed in float.
//
// A float is, exactly, the sum of three bfloat16s, x = x0 + x1 + x2, each at most 2^-8 of the one before. Of the nine
// products of two floats' parts, six are made; the other three are below 2^-23 of the whole, a float's own rounding.
// What is not finite becomes NaN.
#pragma once
#include "memory.h"
#include "rows.h"

namespace wf::WF_ISA {

constexpr int SIDE = 16;                     // rows of a tile; words, too: each of two bfloat16s, or one float
constexpr int TILE = 2 * SIDE;               // queries that are worked on at a time: rows of C
constexpr int GROUP = TILE;                  // queries whose sums over queries are made at once
constexpr int FEW = SIDE;                    // rows whose sums take less time without tiles, about
constexpr int ROWS = 4;                      // rows that fit registers
constexpr int PANEL = 2 * SIDE;              // columns of C
constexpr int STEP = PANEL;                  // from which columns on a product may be taken: multiples
constexpr int DEPTH = 2 * SIDE;              // features that one instruction contracts: two in each word
constexpr int PARTS = 3;                     // bfloat16s in a float
constexpr int BUCKETS = TILE;                // whole tiles, and whole vectors
constexpr int64_t CHUNK = 2 * DEPTH;         // columns of a left side that are split at once, in multiply_rows
constexpr int64_t FORWARD_BLOCK = 1024;      // keys that are worked on at a time, about: in parts they take more room
constexpr int64_t WORDS = SIDE * SIDE;       // of a tile
constexpr int64_t SLAB = PARTS * 2 * WORDS;  // of DEPTH features and two tiles' rows or columns: [part][tile]
static_assert(LANES == SIDE, "a tile's row is a register");

// Of each part the bits that remain are the next one's. Rounded on one side of a product, that with less to split, what
// is left out has no bias. Remainders have at most the upper half of their bits, as those below 2^-126 are zero while
// the kernel runs.
template <bool rounded>
WF_INLINE void split(V x, Words (&parts)[PARTS]) {
#pragma GCC unroll 2
  for (int n = 0; n < PARTS - 1; n++) {
    parts[n] = (rounded ? Words(x) + 0x8000 : Words(x)) & 0xffff0000;
    x -= V(parts[n]);
  }
  parts[PARTS - 1] = Words(x);
}

// words[part][i] = parts of a[i] and b[i], side by side.
template <bool rounded>
WF_INLINE void pair(V a, V b, Words (&words)[PARTS]) {
  Words low[PARTS], high[PARTS];
  split<rounded>(a, low), split<rounded>(b, high);
#pragma GCC unroll 3
  for (int n = 0; n < PARTS; n++) words[n] = low[n] >> 16 | high[n];
}

WF_INLINE void store(uint32_t *p, Words v) { store(reinterpret_cast<float *>(p), V(v)); }

// Words of a and b into the same row of a tile in each part.
template <bool rounded>
WF_INLINE void store_pair(V a, V b, uint32_t *to) {
  Words words[PARTS];
  pair<rounded>(a, b, words);
#pragma GCC unroll 3
  for (int n = 0; n < PARTS; n++) store(to + n * 2 * WORDS, words[n]);
}

// SIDE elements of SIDE rows, from element `at` on, as columns; no row: zeros.
WF_INLINE void load_columns(const float *const *rows, int64_t at, V (&columns)[SIDE]) {
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) columns[i] = rows[i] ? load(rows[i] + at) : V{};
  transpose(columns);
}

template <bool rounded>
WF_INLINE void store_pairs(const V (&a)[SIDE], const V (&b)[SIDE], uint32_t *to) {
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) store_pair<rounded>(a[i], b[i], to + i * SIDE);
}

// The left side of a product, in slabs [TILE rows][depth / DEPTH].
class Left {
 public:
  Left() = default;
  Left(int64_t rows, int64_t depth, Arena &arena)
      : slabs_(arena.take<uint32_t>(whole(rows, TILE) * whole(depth, DEPTH) / (TILE * DEPTH) * SLAB)) {}
  Left(int64_t depth, Arena &arena) : Left(TILE, depth, arena) {}

  // Rows of a: [count, depth], with zeros up to whole(depth).
  void read(const float *a, int64_t lda, int64_t depth, int64_t count) {
    begin(count, depth);
    const int64_t end = whole(depth);
    for (int64_t m = 0; m < count; m++, a += lda) {
      uint32_t *to = slabs_ + m / TILE * steps_ * SLAB + m % TILE * SIDE;
      for (int64_t d = 0; d < depth; d += DEPTH, to += SLAB)
        store_pair<false>(load(a + d), d + SIDE < end ? load(a + d + SIDE) : V{}, to);
    }
  }

  // Columns of x: [depth, whole(count)], rounded.
  void read_transposed(const float *x, int64_t ldx, int64_t depth, int64_t count) {
    begin(count, depth);
    for (int64_t d = 0; d < depth; d += DEPTH) {
      const float *rows[DEPTH];
      for (int64_t i = 0; i < DEPTH; i++) rows[i] = d + i < depth ? x + (d + i) * ldx : nullptr;
      for (int64_t m = 0; m < count; m += SIDE) {
        V low[SIDE], high[SIDE];
        load_columns(rows, m, low), load_columns(rows + SIDE, m, high);
        store_pairs<true>(low, high, slabs_ + (m / TILE * steps_ + d / DEPTH) * SLAB + m / SIDE % 2 * WORDS);
      }
    }
  }

  int64_t rows() const { return rows_; }
  int64_t steps() const { return steps_; }
  const uint32_t *from(int64_t row) const { return slabs_ + row / TILE * steps_ * SLAB; }

 private:
  void begin(int64_t rows, int64_t depth) {
    _tile_dpbf16ps(0, 4, 6);  // of nothing: the unit rests between products, and wakes while rows are split
    rows_ = rows, steps_ = whole(depth, DEPTH) / DEPTH;
  }

  uint32_t *slabs_ = nullptr;
  int64_t rows_ = 0, steps_ = 0;
};

// The right side, [depth, columns], in slabs [PANEL columns][depth / DEPTH].
class Right {
 public:
  Right() = default;
  Right(int64_t depth, int64_t columns, Arena &arena)
      : slabs_(arena.take<uint32_t>(whole(depth, DEPTH) * whole(columns, PANEL) / (DEPTH * PANEL) * SLAB)),
        room_(arena.take<float>(DEPTH * whole(larger(depth, columns)))) {}

  // row(i, room) is row i, whole(columns) floats, in `room` or where it lies. `rounded`: else the left side must be.
  template <bool rounded = true, class Row>
  void read(int64_t depth, int64_t columns, Row row) {
    steps_ = whole(depth, DEPTH) / DEPTH;
    for (int64_t d = 0; d < depth; d += DEPTH) {
      const float *rows[DEPTH];
      for (int64_t i = 0; i < DEPTH; i++) rows[i] = d + i < depth ? row(d + i, room_ + i * whole(columns)) : nullptr;
      for (int64_t i = 0; i < SIDE; i++) {
        const float *low = rows[i], *high = rows[i + SIDE];
        uint32_t *to = slabs_ + d / DEPTH * SLAB + i * SIDE;
        for (int64_t n = 0; n < columns; n += SIDE)
          store_pair<rounded>(low ? load(low + n) : V{}, high ? load(high + n) : V{},
                              to + n / PANEL * steps_ * SLAB + n / SIDE % 2 * WORDS);
      }
    }
  }

  // The same, row(i, room) being column i: whole(depth) floats.
  template <class Row>
  void read_transposed(int64_t depth, int64_t columns, Row row) {
    steps_ = whole(depth, DEPTH) / DEPTH;
    const int64_t end = whole(depth);
    for (int64_t n = 0; n < columns; n += SIDE) {
      const float *rows[SIDE];
      for (int64_t i = 0; i < SIDE; i++) rows[i] = n + i < columns ? row(n + i, room_ + i * end) : nullptr;
      uint32_t *to = slabs_ + n / PANEL * steps_ * SLAB + n / SIDE % 2 * WORDS;
      for (int64_t d = 0; d < depth; d += DEPTH, to += SLAB) {
        V low[SIDE], high[SIDE] = {};
        load_columns(rows, d, low);
        if (d + SIDE < depth) load_columns(rows, d + SIDE, high);
        store_pairs<true>(low, high, to);
      }
    }
  }

  int64_t steps() const { return steps_; }
  const uint32_t *from(int64_t column) const { return slabs_ + column / PANEL * steps_ * SLAB; }

 private:
  uint32_t *slabs_ = nullptr;
  float *room_ = nullptr;
  int64_t steps_ = 0;
};

// Tiles 0 and 1 are C's first rows, 2 and 3 those below; 4 and 5 A's rows, 6 and 7 B's columns.
template <int rows>
WF_INLINE void load_left(const uint32_t *slab, int part) {
  _tile_loadd(4, slab + part * 2 * WORDS, 64);
  if constexpr (rows == 2) _tile_loadd(5, slab + part * 2 * WORDS + WORDS, 64);
}

template <int columns>
WF_INLINE void load_right(const uint32_t *slab, int part) {
  _tile_loadd(6, slab + part * 2 * WORDS, 64);
  if constexpr (columns == 2) _tile_loadd(7, slab + part * 2 * WORDS + WORDS, 64);
}

template <int rows, int columns>
WF_INLINE void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (columns == 2) _tile_dpbf16ps(1, 4, 7);
  if constexpr (rows == 2) _tile_dpbf16ps(2, 5, 6);
  if constexpr (rows == 2 && columns == 2) _tile_dpbf16ps(3, 5, 7);
}

// C [rows, columns] in tiles, of slabs a and b.
template <Result result, int rows, int columns>
inline void product(const uint32_t *a, const uint32_t *b, int64_t steps, float *c, int64_t ldc) {
  const int64_t row = ldc * 4;
  asm volatile("" ::: "memory");  // not every compiler knows that loading a tile reads memory
  if constexpr (result == ADD) {
    _tile_loadd(0, c, row);
    if constexpr (columns == 2) _tile_loadd(1, c + SIDE, row);
    if constexpr (rows == 2) _tile_loadd(2, c + SIDE * ldc, row);
    if constexpr (rows == 2 && columns == 2) _tile_loadd(3, c + SIDE * ldc + SIDE, row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t n = 0; n < steps; n++, a += SLAB, b += SLAB) {  // each pair of parts changes one side
    load_left<rows>(a, 0), load_right<columns>(b, 2), add_products<rows, columns>();
    load_right<columns>(b, 1), add_products<rows, columns>();
    load_left<rows>(a, 1), add_products<rows, columns>();
    load_right<columns>(b, 0), add_products<rows, columns>();
    load_left<rows>(a, 2), add_products<rows, columns>();
    load_left<rows>(a, 0), add_products<rows, columns>();
  }
  _tile_stored(0, c, row);
  if constexpr (columns == 2) _tile_stored(1, c + SIDE, row);
  if constexpr (rows == 2) _tile_stored(2, c + SIDE * ldc, row);
  if constexpr (rows == 2 && columns == 2) _tile_stored(3, c + SIDE * ldc + SIDE, row);
}

// c (+)= a·b, of `columns` columns of b from `first` on. C has room for whole tiles.
template <Result result>
inline void multiply(const Left &a, const Right &b, int64_t first, int64_t columns, float *c, int64_t ldc,
                     int64_t step = 0) {
  for (int64_t n = 0; n < columns; n += PANEL)
    for (int64_t m = 0; m < a.rows(); m += TILE) {
      const uint32_t *left = a.from(m), *right = b.from(first + n) + step * SLAB;
      float *to = c + m * ldc + n;
      const bool low = a.rows() - m > SIDE, wide = columns - n > SIDE;
      if (low && wide)
        product<result, 2, 2>(left, right, a.steps(), to, ldc);
      else if (low)
        product<result, 2, 1>(left, right, a.steps(), to, ldc);
      else if (wide)
        product<result, 1, 2>(left, right, a.steps(), to, ldc);
      else
        product<result, 1, 1>(left, right, a.steps(), to, ldc);
    }
}

// c (+)= rows of a [count, depth] · b, some columns of `a` at a time: they stay near between being split and being
// used.
template <Result result>
inline void multiply_rows(const float *a, int64_t lda, int64_t depth, int64_t count, Left &room, const Right &b,
                          int64_t columns, float *c, int64_t ldc) {
  for (int64_t d = 0; d < depth; d += CHUNK) {
    room.read(a + d, lda, smaller(CHUNK, depth - d), count);
    if (result == ADD || d)
      multiply<ADD>(room, b, 0, columns, c, ldc, d / DEPTH);
    else
      multiply<SET>(room, b, 0, columns, c, ldc);
  }
}

// Sums over queries: [columns, features], Σ_m weights[m, column] rows[m]. They are kept transposed: rows are few, and
// cheaper to turn than weights.
class Sums {
 public:
  Sums() = default;
  Sums(int64_t columns, int64_t features, Arena &arena)
      : features_(features), left_(features, GROUP, arena), right_(GROUP, PANEL, arena),
        transposed_(arena.take<float>(whole(features, TILE) * (whole(columns, PANEL) + LANES))),
        sums_(arena.take<float>(whole(columns, TILE) * whole(features))) {}

  void clear(int64_t columns) { columns_ = columns, empty_ = true; }

  // Of the first columns (at first, of all of them), and at most GROUP rows [count, whole(features)].
  void add(const float *weights, int64_t row, const float *rows, int64_t count, int64_t columns) {
    empty_ ? add<SET>(weights, row, rows, count, columns) : add<ADD>(weights, row, rows, count, columns);
    empty_ = false;
  }

  // All of them: [columns, whole(features)].
  float *finish() {
    for (int64_t d = 0; d < features_; d += LANES)
      for (int64_t n = 0; n < columns_; n += LANES) {
        V square[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) square[i] = load(transposed_ + (d + i) * room() + n);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) store(sums_ + (n + i) * whole(features_) + d, square[i]);
      }
    return sums_;
  }

 private:
  template <Result result>
  void add(const float *weights, int64_t row, const float *rows, int64_t count, int64_t columns) {
    if (count <= FEW) return add_few<result>(weights, row, rows, count, columns);
    left_.read_transposed(rows, whole(features_), count, features_);
    for (int64_t n = 0; n < columns; n += PANEL) {  // a panel stays near between being made and being used
      const int64_t some = smaller(PANEL, columns - n);
      right_.read<false>(count, some, [&](int64_t i, float *) { return weights + i * row + n; });
      multiply<result>(left_, right_, 0, some, transposed_ + n, room());
    }
  }

  // In registers: tiles contract DEPTH rows at a time, however few there are.
  template <Result result>
  void add_few(const float *weights, int64_t row, const float *rows, int64_t count, int64_t columns) {
    const int64_t features = whole(features_);
    for (int64_t d = 0; d < features; d += SIDE)
      for (int64_t n = 0; n < columns; n += LANES) {
        float *to = transposed_ + d * room() + n;
        V sums[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) sums[i] = result == ADD ? load(to + i * room()) : V{};
        for (int64_t m = 0; m < count; m++) {
          const V some = load(weights + m * row + n);
#pragma GCC unroll 16
          for (int i = 0; i < SIDE; i++) sums[i] += rows[m * features + d + i] * some;
        }
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) store(to + i * room(), sums[i]);
      }
  }

  int64_t room() const { return whole(columns_, PANEL) + LANES; }  // an odd number of cache lines: rows do not collide

  int64_t features_ = 0, columns_ = 0;
  bool empty_ = true;
  Left left_;
  Right right_;
  float *transposed_ = nullptr, *sums_ = nullptr;
};

// The tiles' shape, while it lives; then it is as it was for whoever uses them otherwise. And numbers below 2^-126 are
// zero, as they are to tiles.
class Products {
 public:
  Products() : mode_(_mm_getcsr()) {
    _mm_setcsr(mode_ | 0x8040);  // flush to zero, denormals are zero
    asm volatile("sttilecfg %0" : "=m"(before_));
    Shape shape{};
    shape.palette = 1;
    for (int n = 0; n < 8; n++) shape.bytes[n] = 4 * SIDE, shape.rows[n] = SIDE;
    load(shape);
  }
  ~Products() {
    load(before_);
    _mm_setcsr(mode_);
  }
  Products(const Products &) = delete;
  Products &operator=(const Products &) = delete;

 private:
  struct Shape {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Shape) == 64, "as the instruction wants it");
  // By itself, as GCC's own takes the first 8 bytes for all that is read.
  static void load(const Shape &shape) { asm volatile("ldtilecfg %0" ::"m"(shape)); }

  Shape before_;
  unsigned mode_;
};

}  // namespace wf::WF_ISA
