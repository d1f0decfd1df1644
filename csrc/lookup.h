// Buckets along lines of keys.
//
// A query at (y, x) and the keys of one row y' see buckets map[y - y'][x - x'], x' = 0, 1, ...: a slice of one line of
// the map, in which t counts x' - x. (A key that reads sees a row of queries in the same way.) Lines that hold the same buckets are one line: the product mapping of iRPE has seven, however large the
// image. Along a line, buckets change slowly, so LANES neighbours lie within LANES buckets and are read by one
// permutation; the sums of weights over buckets are the transpose of that reading.
#pragma once
#include "memory.h"
#include "product.h"
#include "whereformer.h"

namespace wf::WF_ISA {

struct Lookup {
  int64_t kind, buckets, width, prefix, head;  // width: of a row of `wide`; head: 0 if all heads share the table
  int64_t lines, span;   // lines that differ; places in a line
  int64_t step;          // how far the slice moves from a query to its right neighbour: −1, or 0 if absolute
  int64_t start;         // the slice of a query in the first column starts here
  bool given;            // scores come with the tokens, not from a table

  const int32_t *line;     // [row offsets] -> line
  const int32_t *buckets_at;  // [lines][span + LANES]
  const int32_t *base;     // [lines][span]: the smallest of LANES buckets from here; −1: they are too far apart
  const int32_t *low, *high;  // [lines]: smallest and largest bucket
  const float *onehot;     // [lines or 1][span][LANES]: one at bucket − low; null where a line has more than LANES buckets
  const int32_t *first;    // if alike and every bucket's keys are neighbours: [span][LANES]: the first of LANES keys from
                           // here that has bucket low + n, or −1; else null
  bool alike;              // lines differ by a constant: one set of `onehot` serves all

  // Packed tables [1 or heads]
  const float *wide;       // [features, width]: the prefix's bucket, or zeros, then all buckets
  const float *tall;       // [whole(buckets, TILE), whole(features)]
  int64_t wide_head, tall_head;

  int64_t room() const { return width + LANES; }  // for scores of, or weights on, all buckets
  int64_t stride() const { return span + LANES; }
  int64_t slice(int64_t x) const { return start + step * x; }
  const int32_t *at(int64_t n, int64_t t) const { return buckets_at + n * stride() + t; }
  const float *onehots(int64_t n, int64_t t) const { return onehot + ((alike ? 0 : n * span) + t) * LANES; }

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
        heights(l.absolute ? a.keys.height : a.queries.height + a.keys.height - 1),
        absolute(l.absolute), mirrored(l.mirrored), queries(a.queries), keys(a.keys) {}

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

// Makes a caller's lookup ready. Runs twice, see Arena; what it has written the second time, it reads.
inline Lookup prepare(const WfAttention &a, const WfLookup &l, Arena &arena, bool counting) {
  Lookup k{};
  const RowOffsets offsets(a, l);
  k.kind = l.kind, k.buckets = l.buckets, k.width = whole(l.buckets + 1), k.prefix = l.prefix, k.head = l.head;
  k.given = l.kind != WF_SHARED && !l.table;
  k.span = l.absolute ? a.keys.width : a.queries.width + a.keys.width - 1;
  k.step = l.absolute ? 0 : -1;
  k.start = l.absolute ? 0 : (l.kind == WF_BY_KEY ? a.keys.width : a.queries.width) - 1;
  const bool forward = l.absolute || bool(l.mirrored) != (l.kind == WF_BY_KEY);  // whether the map counts as t does
  const int64_t most = offsets.count();  // of lines
  auto *line = arena.take<int32_t>(most);
  auto *buckets_at = arena.take<int32_t>(most * k.stride());
  auto *base = arena.take<int32_t>(most * k.span);
  auto *low = arena.take<int32_t>(most), *high = arena.take<int32_t>(most);
  k.line = line, k.buckets_at = buckets_at, k.base = base, k.low = low, k.high = high;
  if (!counting) {
    for (int64_t r = 0; r < most; r++) {
      int32_t *fresh = buckets_at + k.lines * k.stride();
      for (int64_t t = 0; t < k.span; t++) fresh[t] = l.map[r * k.span + (forward ? t : k.span - 1 - t)];
      for (int i = 0; i < LANES; i++) fresh[k.span + i] = fresh[k.span - 1];
      const auto same_as = [&](int64_t n) {
        return n >= 0 && !std::memcmp(buckets_at + n * k.stride(), fresh, size_t(k.stride()) * 4);
      };
      const int64_t last = k.lines - 1, opposite = most - 1 - r < r ? line[most - 1 - r] : -1;
      line[r] = int32_t(same_as(last) ? last : same_as(opposite) ? opposite : k.lines);
      if (line[r] < k.lines) continue;
      const int64_t n = k.lines++;
      low[n] = high[n] = fresh[0];
      for (int64_t t = 0; t < k.span; t++) {
        low[n] = int32_t(smaller(low[n], fresh[t])), high[n] = int32_t(larger(high[n], fresh[t]));
        int32_t least = fresh[t], most_here = fresh[t];
        for (int i = 1; i < LANES; i++)
          least = int32_t(smaller(least, fresh[t + i])), most_here = int32_t(larger(most_here, fresh[t + i]));
        base[n * k.span + t] = most_here - least < LANES ? least : -1;
      }
    }
  }
  // One-hot rows, if no line is wider than a vector.
  bool thin = true;
  k.alike = true;
  for (int64_t n = 0; n < k.lines; n++) {
    thin &= high[n] - low[n] < LANES;
    for (int64_t t = 0; t < k.span; t++)
      k.alike &= buckets_at[n * k.stride() + t] - low[n] == buckets_at[t] - low[0];
  }
  if (counting) k.alike = false, k.lines = most;
  bool unbroken = !counting && thin && k.alike && k.kind != WF_SHARED;
  for (int64_t t = 0; unbroken && t < k.span; t++)
    for (int i = 0; i < LANES; i++)
      for (int n = 0; n + 1 < i; n++)
        unbroken &= k.at(0, t)[i] != k.at(0, t)[n] || k.at(0, t)[i] == k.at(0, t)[i - 1];
  if (counting || unbroken) {
    auto *first = arena.take<int32_t>(k.span * LANES);
    k.first = first;
    for (int64_t t = 0; !counting && t < k.span; t++) {
      for (int i = 0; i < LANES; i++) first[t * LANES + i] = -1;
      for (int i = LANES; i-- > 0;) first[t * LANES + k.at(0, t)[i] - low[0]] = i;
    }
  }
  if (thin && k.kind != WF_SHARED) {
    const int64_t sets = k.alike ? 1 : k.lines;
    auto *onehot = arena.take<float>(sets * k.span * LANES);
    k.onehot = onehot;
    if (!counting)
      for (int64_t n = 0; n < sets; n++)
        for (int64_t t = 0; t < k.span; t++) {
          float *row = onehot + (n * k.span + t) * LANES;
          for (int i = 0; i < LANES; i++) row[i] = 0;
          row[buckets_at[n * k.stride() + t] - low[n]] = 1;
        }
  }
  // Tables.
  const int64_t heads = l.head ? a.heads : 1, features = l.kind == WF_VALUES ? a.value_features : a.features;
  if (l.table) {
    k.wide_head = l.head ? features * k.width + LANES : 0;
    k.tall_head = l.head ? whole(k.buckets, TILE) * whole(features) : 0;
    auto *wide = arena.take<float>(heads * (features * k.width + LANES));
    auto *tall = arena.take<float>(heads * whole(k.buckets, TILE) * whole(features));
    k.wide = wide, k.tall = tall;
    if (!counting)
      for (int64_t h = 0; h < heads; h++) {
        const bool by_bucket = l.kind == WF_VALUES;
        const float *table = l.table + h * l.head;
        float *w = wide + h * k.wide_head, *t = tall + h * k.tall_head;
        std::memset(w, 0, size_t(features * k.width + LANES) * 4);
        std::memset(t, 0, size_t(whole(k.buckets, TILE) * whole(features)) * 4);
        for (int64_t n = 0; n < k.buckets; n++)
          for (int64_t d = 0; d < features; d++)
            w[d * k.width + 1 + n] = t[n * whole(features) + d] =
                by_bucket ? table[n * features + d] : table[d * k.buckets + n];
        for (int64_t d = 0; k.prefix >= 0 && d < features; d++) w[d * k.width] = t[k.prefix * whole(features) + d];
      }
  }
  return k;
}

}  // namespace wf::WF_ISA
