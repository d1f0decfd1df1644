// Rows of tokens, between the caller's memory and the kernel's: floats, turned.
#pragma once
#include "vector.h"
#include "whereformer.h"

namespace wf::WF_ISA {

struct bfloat16 {
  uint16_t bits;
};

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

WF_INLINE V load(const bfloat16 *p) {
  const Words bits = __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Words) << 16;
  return V(bits);
}

// To the nearest, ties to even; NaN stays NaN.
WF_INLINE void store(bfloat16 *p, V v) {
  const Words bits = Words(v);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (bits >> 16) | 0x40;
  const Words chosen = v == v ? rounded : nan;
  *reinterpret_cast<Halves *>(p) = __builtin_convertvector(chosen, Halves);
}

WF_INLINE float widen(float x) { return x; }
WF_INLINE float widen(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
WF_INLINE void narrow(float *p, float x) { *p = x; }
WF_INLINE void narrow(bfloat16 *p, float x) {
  bfloat16 lanes[LANES];
  store(lanes, all(x));
  *p = lanes[0];
}

// out[0 ... whole(count)) = x · factor, zeros behind the end.
template <class T>
WF_INLINE void read_row(const T *x, int64_t count, float factor, float *out) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) store(out + d, load(x + d) * factor);
  if (d == count) return;
  store(out + d, V{});
  for (; d < count; d++) out[d] = widen(x[d]) * factor;
}

enum Result { SET, ADD };

template <Result result, class T>
WF_INLINE void write_row(const float *x, int64_t count, float factor, T *out) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES)
    store(out + d, result == ADD ? load(out + d) + load(x + d) * factor : load(x + d) * factor);
  for (; d < count; d++) narrow(out + d, result == ADD ? widen(out[d]) + x[d] * factor : x[d] * factor);
}

// How tokens on one side turn; a prefix token does not.
struct Turner {
  const float *cos, *sin;  // of this batch and head; null: nothing turns
  int64_t prefix, pairs;
  bool half;

  Turner(const WfAttention &a, const WfTurn &turn, const WfGrid &grid, int64_t b, int64_t h)
      : cos(a.pairs ? turn.cos + b * turn.batch + h * turn.head : nullptr),
        sin(a.pairs ? turn.sin + b * turn.batch + h * turn.head : nullptr), prefix(grid.prefix), pairs(a.pairs),
        half(a.half) {}

  explicit operator bool() const { return cos; }

  // x, a row of token i, in place; `sign` −1 is the transpose, as gradients need it.
  void operator()(float *x, int64_t i, float sign = 1) const {
    if (!cos || i < prefix) return;
    const float *c = cos + (i - prefix) * pairs, *s = sin + (i - prefix) * pairs;
    float *y = half ? x + pairs : x + 1;
    const int64_t step = half ? 1 : 2;
    for (int64_t n = 0; n < pairs; n++) {
      const float x1 = x[n * step], x2 = y[n * step];
      x[n * step] = x1 * c[n] - sign * x2 * s[n];
      y[n * step] = sign * x1 * s[n] + x2 * c[n];
    }
  }
};

// to[j][i] = x[i][j] · factor, j < columns, i < rows; both up to whole vectors.
inline void turn_over(const float *x, int64_t ldx, int64_t columns, int64_t rows, float factor, float *to,
                      int64_t ldt) {
  for (int64_t j = 0; j < columns; j += LANES)
    for (int64_t i = 0; i < rows; i += LANES) {
      V square[LANES];
#pragma GCC unroll 16
      for (int n = 0; n < LANES; n++) square[n] = load(x + (i + n) * ldx + j) * factor;
      transpose(square);
#pragma GCC unroll 16
      for (int n = 0; n < LANES; n++) store(to + (j + n) * ldt + i, square[n]);
    }
}

enum Use { READ, WRITE };

// Asks for tokens that will be used soon: rows lie far apart, the processor does not guess.
template <Use use = READ, class T>
WF_INLINE void prefetch_rows(const T *x, int64_t token, int64_t first, int64_t count, int64_t features) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t i = first; i < first + count; i++)
    for (int64_t d = 0; d < features; d += LINE) __builtin_prefetch(x + i * token + d, use == WRITE, 2);
}

// The tokens first ... first + count of one head, turned and scaled: [count, whole(features)].
template <class T>
void read_rows(const T *x, int64_t token, int64_t first, int64_t count, int64_t features, const Turner *turn,
               float factor, float *out) {
  const int64_t row = whole(features);
  for (int64_t i = 0; i < count; i++, out += row) {
    read_row(x + (first + i) * token, features, factor, out);
    if (turn) (*turn)(out, first + i);
  }
}

}  // namespace wf::WF_ISA
