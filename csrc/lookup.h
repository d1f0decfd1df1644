// Buckets along lines of keys.
//
// A query at (y, x) and the keys of one row y' see buckets map[y - y'][x - x'], x' = 0, 1, ...: a slice of one line of
// the map, in which t counts x' - x. (A key that reads sees a row of queries in the same way.) Lines that hold the same
// buckets are one line: the product mapping of iRPE has seven, however large the image. Along a line, buckets change
// slowly, so LANES neighbours lie within LANES buckets and are read by one permutation; the sums of weights over
// buckets are the transpose of that reading.
#pragma once
#include "memory.h"
#include "product.h"
#include "whereformer.h"

namespace wf::WF_ISA {

constexpr bool BY_NEIGHBOURS = LANES > 8;  // whether weights may be summed so: in shorter vectors masks take less

struct Lookup {
  int64_t kind, buckets, prefix, head;  // head: 0 if all heads share the table
  int64_t lines, span;                  // lines that differ; places in a line
  int64_t step;    // how far the slice moves from a query to its right neighbour: −1, or 0 if absolute
  int64_t start;   // the slice of a query in the first column starts here
  float scale;     // of the packed table, relative to the caller's
  bool given;      // scores come with the tokens, not from a table
  bool by_bucket;  // the caller's table is [buckets, features], not [features, buckets]

  const int32_t *line;        // [row offsets] -> line
  const int32_t *buckets_at;  // [lines][span + LANES]
  const int32_t *base;        // [lines][span]: the smallest of LANES buckets from here; −1: they are too far apart
  const int32_t *low, *high;  // [lines]: smallest and largest bucket
  const int32_t *onehot;      // [lines or 1][span][LANES]: all bits at bucket − low, elsewhere none; null where a line
                              // has more than LANES buckets
  const int32_t *first;       // if alike and every bucket's keys are neighbours: [span][LANES]: the first of LANES keys
                              // from here that has bucket low + n, or −1; else null; see BY_NEIGHBOURS
  bool alike;                 // lines differ by a constant: one set of `onehot` serves all

  const float *table;  // [1 or heads][whole(buckets, TILE), row], times scale
  int64_t row, table_head;

  const float *table_row(int64_t h, int64_t bucket) const { return table + h * table_head + bucket * row; }
  int64_t room() const { return whole(buckets) + LANES; }  // for scores of, or weights on, all buckets
  int64_t stride() const { return span + LANES; }
  int64_t slice(int64_t x) const { return start + step * x; }
  const int32_t *at(int64_t n, int64_t t) const { return buckets_at + n * stride() + t; }
  const int32_t *onehots(int64_t n, int64_t t) const { return onehot + ((alike ? 0 : n * span) + t) * LANES; }

  // `scores` of one token, for LANES others, from place t of line n on.
  WF_INLINE V read(const float *scores, int64_t n, int64_t t) const {
    const int32_t least = base[n * span + t];
    const int32_t *bucket = at(n, t);
    if (least >= 0) return pick(load(scores + least), load(bucket) - all(least));
    V v;
    for (int i = 0; i < LANES; i++) v[i] = scores[bucket[i]];
    return v;
  }
};

// How many rows of patches there are, and which offset two of them have.
struct RowOffsets {
  int64_t frames, heights;  // of the map
  bool absolute, mirrored;
  WfGrid queries, keys;

  RowOffsets(const WfAttention &a, const WfLookup &l)
      : frames(l.absolute ? a.keys.frames : a.queries.frames + a.keys.frames - 1),
        heights(l.absolute ? a.keys.height : a.queries.height + a.keys.height - 1), absolute(l.absolute),
        mirrored(l.mirrored), queries(a.queries), keys(a.keys) {}

  int64_t count() const { return frames * heights; }
  // The offsets of one row of keys and all rows of queries, of an image, are neighbours: from here on.
  int64_t first_of_key(int64_t key_row) const { return mirrored ? key_row : keys.height - 1 - key_row; }
  int64_t operator()(int64_t query_row, int64_t key_row) const {
    if (absolute) return key_row;
    const int64_t tq = query_row / queries.height, yq = query_row % queries.height;
    const int64_t tk = key_row / keys.height, yk = key_row % keys.height;
    return mirrored ? (tk - tq + queries.frames - 1) * heights + yk - yq + queries.height - 1
                    : (tq - tk + keys.frames - 1) * heights + yq - yk + keys.height - 1;
  }
};

// What follows makes a caller's lookup ready. It runs twice, see Arena; what it has written the second time, it reads.

// The lines, of at most `rows` that the map has; `forward`: whether the map counts as t does.
inline void find_lines(const WfLookup &l, int64_t rows, bool forward, Arena &arena, bool counting, Lookup &k) {
  auto *line = arena.take<int32_t>(rows);
  auto *buckets_at = arena.take<int32_t>(rows * k.stride());
  auto *base = arena.take<int32_t>(rows * k.span);
  auto *low = arena.take<int32_t>(rows), *high = arena.take<int32_t>(rows);
  k.line = line, k.buckets_at = buckets_at, k.base = base, k.low = low, k.high = high;
  k.lines = counting ? rows : 0;
  for (int64_t r = 0; !counting && r < rows; r++) {
    int32_t *fresh = buckets_at + k.lines * k.stride();
    for (int64_t t = 0; t < k.span; t++) fresh[t] = l.map[r * k.span + (forward ? t : k.span - 1 - t)];
    for (int i = 0; i < LANES; i++) fresh[k.span + i] = fresh[k.span - 1];
    const auto same_as = [&](int64_t n) {
      return n >= 0 && !std::memcmp(buckets_at + n * k.stride(), fresh, size_t(k.stride()) * 4);
    };
    const int64_t last = k.lines - 1, opposite = rows - 1 - r < r ? line[rows - 1 - r] : -1;
    line[r] = int32_t(same_as(last) ? last : same_as(opposite) ? opposite : k.lines);
    if (line[r] < k.lines) continue;
    const int64_t n = k.lines++;
    low[n] = high[n] = fresh[0];
    for (int64_t t = 0; t < k.span; t++) {
      low[n] = fresh[t] < low[n] ? fresh[t] : low[n], high[n] = fresh[t] > high[n] ? fresh[t] : high[n];
      int32_t least = fresh[t], most = fresh[t];
#pragma GCC unroll 16
      for (int i = 1; i < LANES; i++)
        least = fresh[t + i] < least ? fresh[t + i] : least, most = fresh[t + i] > most ? fresh[t + i] : most;
      base[n * k.span + t] = most - least < LANES ? least : -1;
    }
  }
}

// Whether no line has more than LANES buckets.
inline bool are_thin(const Lookup &k) {
  for (int64_t n = 0; n < k.lines; n++)
    if (k.high[n] - k.low[n] >= LANES) return false;
  return true;
}

// Whether all lines differ by constants.
inline bool are_alike(const Lookup &k) {
  for (int64_t n = 1; n < k.lines; n++)
    for (int64_t t = 0; t < k.span; t++)
      if (*k.at(n, t) - k.low[n] != *k.at(0, t) - k.low[0]) return false;
  return true;
}

// Whether, of LANES places from any place on, those in one bucket are neighbours.
inline bool is_unbroken(const Lookup &k) {
  for (int64_t t = 0; t < k.span; t++) {
    const int32_t *bucket = k.at(0, t);
    uint32_t left = 0;  // buckets that have had their keys
    for (int i = 1; i < LANES; i++) {
      if (bucket[i] == bucket[i - 1]) continue;
      left |= 1u << (bucket[i - 1] - k.low[0]);
      if (left >> (bucket[i] - k.low[0]) & 1) return false;
    }
  }
  return true;
}

inline void find_first(Arena &arena, bool counting, Lookup &k) {
  auto *first = arena.take<int32_t>(k.span * LANES);
  k.first = first;
  for (int64_t t = 0; !counting && t < k.span; t++) {
    for (int i = 0; i < LANES; i++) first[t * LANES + i] = -1;
    for (int i = LANES; i-- > 0;) first[t * LANES + k.at(0, t)[i] - k.low[0]] = i;
  }
}

inline void make_onehots(Arena &arena, bool counting, Lookup &k) {
  const int64_t sets = k.alike ? 1 : k.lines;
  auto *onehot = arena.take<int32_t>(sets * k.span * LANES);
  k.onehot = onehot;
  for (int64_t n = 0; !counting && n < sets; n++)
    for (int64_t t = 0; t < k.span; t++) {
      int32_t *row = onehot + (n * k.span + t) * LANES;
      for (int i = 0; i < LANES; i++) row[i] = 0;
      row[*k.at(n, t) - k.low[n]] = -1;
    }
}

inline void pack_table(const WfAttention &a, const WfLookup &l, Arena &arena, bool counting, Lookup &k) {
  const int64_t heads = l.head ? a.heads : 1, features = l.kind == WF_VALUES ? a.value_features : a.features;
  const int64_t of_bucket = k.by_bucket ? features : 1, of_feature = k.by_bucket ? 1 : k.buckets;
  k.row = whole(features);
  const int64_t size = whole(k.buckets, TILE) * k.row;
  auto *to = arena.take<float>(heads * size);
  k.table = to, k.table_head = l.head ? size : 0;
  if (counting) return;
  std::memset(to, 0, size_t(heads * size) * 4);
  for (int64_t h = 0; h < heads; h++, to += size) {
    const float *from = l.table + h * l.head;
    for (int64_t n = 0; n < k.buckets; n++)
      for (int64_t d = 0; d < features; d++) to[n * k.row + d] = from[n * of_bucket + d * of_feature] * k.scale;
  }
}

inline Lookup prepare(const WfAttention &a, const WfLookup &l, bool backward, Arena &arena, bool counting) {
  Lookup k{};
  k.kind = l.kind, k.buckets = l.buckets, k.prefix = l.prefix, k.head = l.head;
  k.scale = float(l.scale);
  k.given = l.kind != WF_SHARED && !l.table, k.by_bucket = l.kind == WF_VALUES || l.by_bucket;
  k.span = l.absolute ? a.keys.width : a.queries.width + a.keys.width - 1;
  k.step = l.absolute ? 0 : -1;
  k.start = l.absolute ? 0 : (l.kind == WF_BY_KEY ? a.keys.width : a.queries.width) - 1;
  const bool forward = l.absolute || bool(l.mirrored) != (l.kind == WF_BY_KEY);
  find_lines(l, RowOffsets(a, l).count(), forward, arena, counting, k);
  k.alike = !counting && are_alike(k);                                         // counting supposes what takes most room
  const bool sums = l.kind == WF_VALUES || (backward && l.kind != WF_SHARED);  // whether over buckets
  if (sums && (counting || are_thin(k))) {
    if (BY_NEIGHBOURS && (counting || (k.alike && is_unbroken(k)))) find_first(arena, counting, k);
    make_onehots(arena, counting, k);
  }
  if (l.table) pack_table(a, l, arena, counting, k);
  return k;
}

}  // namespace wf::WF_ISA
