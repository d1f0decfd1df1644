// Vectors of floats, in the compiler's own types: what one instruction set calls a register.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wf::WF_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define WF_INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t Vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t UnalignedInts __attribute__((vector_size(4 * LANES), aligned(4)));

WF_INLINE V load(const float *p) { return *reinterpret_cast<const Unaligned *>(p); }
WF_INLINE Vi load(const int32_t *p) { return *reinterpret_cast<const UnalignedInts *>(p); }
WF_INLINE void store(float *p, V v) { *reinterpret_cast<Unaligned *>(p) = v; }
WF_INLINE V all(float x) { return x - V{}; }
WF_INLINE Vi all(int32_t x) { return x - Vi{}; }

WF_INLINE Vi lane_numbers() {
  Vi v;
  for (int i = 0; i < LANES; i++) v[i] = i;
  return v;
}

// a where the lane's number is below `end`, else 0.
WF_INLINE V before_lane(int32_t end, V a) { return lane_numbers() < all(end) ? a : V{}; }

// b if one of them is NaN.
WF_INLINE V max(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

WF_INLINE float sum(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float s[LANES];
  store(s, v);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
#endif
}

WF_INLINE float largest(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float s[LANES];
  store(s, v);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] = s[i] > s[i + n] ? s[i] : s[i + n];
  return s[0];
#endif
}

// 2^x for x <= 127; NaN of NaN. Error below 2 units in the last place; what is below 2^-126 may be 0.
WF_INLINE V exp2(V x) {
#if defined(__AVX512F__)
  const V r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x − ⌊x⌋; 0 of −∞
  V p = all(2.1702255e-4f);
  p = p * r + 1.2439687e-3f;
  p = p * r + 9.6788406e-3f;
  p = p * r + 5.5483341e-2f;
  p = p * r + 2.4022983e-1f;
  p = p * r + 6.9314700e-1f;
  p = p * r + 1.0f;
  return _mm512_scalef_ps(p, x);  // p · 2^⌊x⌋
#else
  const V shift = all(0x1.8p23f), clamped = max(all(-127.0f), x), t = clamped + shift, r = clamped - (t - shift);
  V p = all(1.5353362e-4f);
  p = p * r + 1.3398874e-3f;
  p = p * r + 9.6184373e-3f;
  p = p * r + 5.5503324e-2f;
  p = p * r + 2.4022648e-1f;
  p = p * r + 6.9314720e-1f;
  p = p * r + 1.0f;
  const Vi power = (Vi(t) << 23) + (127 << 23);  // of −127: 0
  return p * V(power);
#endif
}

// v[i] = table[at[i]], 0 <= at < LANES.
WF_INLINE V pick(V table, Vi at) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(__m512i(at), table);
#elif defined(__AVX2__)
  return _mm256_permutevar8x32_ps(table, __m256i(at));
#else
  V v;
  for (int i = 0; i < LANES; i++) v[i] = table[at[i]];
  return v;
#endif
}

// Lanes of a, then of b, by number; GCC has Clang's name for it from 12 on.
#if defined(__clang__)
#define WF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define WF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Vi{__VA_ARGS__})
#endif

// v[i] = x[i + by], zero where there is none.
template <int by>
WF_INLINE V shift(V x) {
#if defined(__AVX512F__)
  return WF_SHUFFLE(x, V{}, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, by + 8, by + 9, by + 10,
                    by + 11, by + 12, by + 13, by + 14, by + 15);
#elif defined(__AVX2__)
  return WF_SHUFFLE(x, V{}, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7);
#else
  return WF_SHUFFLE(x, V{}, by, by + 1, by + 2, by + 3);
#endif
}

#if defined(__AVX512F__)
#define WF_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define WF_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define WF_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define WF_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define WF_LOW 0, 4, 1, 5
#define WF_HIGH 2, 6, 3, 7
#endif

// A square of LANES vectors becomes its transpose: interleaving halves log2(LANES) times.
WF_INLINE void transpose(V (&rows)[LANES]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {
    V next[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = WF_SHUFFLE(rows[i], rows[i + LANES / 2], WF_LOW);
      next[2 * i + 1] = WF_SHUFFLE(rows[i], rows[i + LANES / 2], WF_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}
#undef WF_LOW
#undef WF_HIGH
#undef WF_SHUFFLE

constexpr int64_t whole(int64_t n, int64_t step = LANES) { return (n + step - 1) / step * step; }
WF_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
WF_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace wf::WF_ISA
