// The transpose of filling: from weights on keys to sums over buckets.
#pragma once
#include "fill.h"
#include "product.h"

namespace wf::WF_ISA {

// LANES columns of the sum over a stretch's rows, from the column on at which s starts.
WF_INLINE V sum_stretch(const Stretch &stretch, const float *s, int64_t width) {
  const float *row = s + stretch.row * width;
  V v = load(row);
  for (int32_t y = 1; y < stretch.rows; y++) v += load(row + y * width);
  return v;
}

// sums[stretch][x] = Σ over the stretch's rows. Lanes past the width hold what is not wanted.
inline void sum_rows(const Stretches &stretches, const float *s, int64_t width, float *sums) {
  const int64_t room = whole(width);
  for (int64_t x0 = 0; x0 < width; x0 += LANES)
    for (int64_t n = 0; n < stretches.count; n++)
      store(sums + n * room + x0, sum_stretch(stretches.list[n], s + x0, width));
}

// From LANES weights to sums over buckets, where every bucket's keys are neighbours: log2(LANES) times, each key adds
// the key beside it, twice as far each time, if that has the same bucket.
class NeighbourSums {
 public:
  NeighbourSums() = default;
  NeighbourSums(const Lookup &lookup, int64_t t) : first_(load(lookup.first + t * LANES)) {
    const V buckets = __builtin_convertvector(load(lookup.at(0, t)) + 1, V);  // 0 is no bucket
    same_[0] = buckets == shift<1>(buckets), same_[1] = buckets == shift<2>(buckets);
    // % LANES: what is not wanted must compile all the same
    if constexpr (LANES > 4) same_[2] = buckets == shift<4 % LANES>(buckets);
    if constexpr (LANES > 8) same_[3] = buckets == shift<8 % LANES>(buckets);
  }

  // Sums over buckets low, low + 1, ...
  WF_INLINE V operator()(V v) const {
    v = same_[0] ? v + shift<1>(v) : v;
    v = same_[1] ? v + shift<2>(v) : v;
    if constexpr (LANES > 4) v = same_[2] ? v + shift<4 % LANES>(v) : v;
    if constexpr (LANES > 8) v = same_[3] ? v + shift<8 % LANES>(v) : v;
    return first_ >= 0 ? pick(v, first_ & (LANES - 1)) : V{};
  }

 private:
  Vi same_[4], first_;
};

constexpr int64_t MOST_CHUNKS = 8;

// As sum_rows and sum_buckets together, where few vectors hold a row of keys.
inline void sum_neighbours(const Lookup &lookup, int64_t f, const Stretches &stretches, int64_t x, int64_t width,
                           const float *s, float *weights) {
  const NeighbourSums sum(lookup, lookup.slice(x));
  NeighbourSums more[MOST_CHUNKS];
  for (int64_t x0 = LANES; x0 < width; x0 += LANES) more[x0 / LANES] = NeighbourSums(lookup, lookup.slice(x) + x0);
  for (int64_t b = 0; b < lookup.buckets; b += LANES) store(weights + b, V{});
  const int8_t order = stretches.order[f];
  for (int64_t n = 0; n < stretches.count; n++) {
    const Stretch &stretch = stretches.list[order < 0 ? stretches.count - 1 - n : n];
    const auto column = [&](int64_t x0) {
      return before_lane(int32_t(smaller(width - x0, LANES)), sum_stretch(stretch, s + x0, width));
    };
    V v = sum(column(0));
    for (int64_t x0 = LANES; x0 < width; x0 += LANES) v += more[x0 / LANES](column(x0));
    float *at = weights + lookup.low[stretch.line[f]];
    store(at, order ? v : load(at) + v);
  }
}

// x in the lane of its bucket, zeros elsewhere, also if x is no number.
WF_INLINE V put(float x, const int32_t *onehot) { return V(Vi(all(x)) & load(onehot)); }

// Rows of sums, each into its buckets.
template <int rows>
inline void collapse(const float *sums, int64_t room, const int32_t *onehot, float *lines, int64_t width) {
  V of_line[rows] = {};
  for (int64_t k = 0; k < width; k++)
#pragma GCC unroll 8
    for (int n = 0; n < rows; n++) of_line[n] += put(sums[n * room + k], onehot + k * LANES);
#pragma GCC unroll 8
  for (int n = 0; n < rows; n++) store(lines + n * LANES, of_line[n]);
}

// weights[bucket] = Σ of sums[stretch][x] over where lookup f has that bucket. `sums` and `lines` have room for 8 more
// rows.
inline void sum_buckets(const Group &group, int64_t f, const Stretches &stretches, int64_t x, int64_t width,
                        const float *sums, float *lines, float *weights) {
  const Lookup &lookup = group.lookup[f];
  const int64_t room = whole(width), t = lookup.slice(x);
  for (int64_t b = 0; b < lookup.buckets; b += LANES) store(weights + b, V{});
  if (!lookup.onehot) {
    for (int64_t n = 0; n < stretches.count; n++) {
      const int32_t *bucket = lookup.at(stretches.list[n].line[f], t);
      for (int64_t k = 0; k < width; k++) weights[bucket[k]] += sums[n * room + k];
    }
    return;
  }
  if (lookup.alike) {
    const int32_t *onehot = lookup.onehots(0, t);
    int64_t n = 0;
    for (; stretches.count - n > 6; n += 8) collapse<8>(sums + n * room, room, onehot, lines + n * LANES, width);
    if (n < stretches.count) collapse<6>(sums + n * room, room, onehot, lines + n * LANES, width);
  } else {
    for (int64_t n = 0; n < stretches.count; n++) {
      const int32_t *onehot = lookup.onehots(stretches.list[n].line[f], t);
      V v{};
      for (int64_t k = 0; k < width; k++) v += put(sums[n * room + k], onehot + k * LANES);
      store(lines + n * LANES, v);
    }
  }
  for (int64_t n = 0; n < stretches.count; n++) {
    const int64_t m = stretches.order[f] < 0 ? stretches.count - 1 - n : n;
    float *at = weights + lookup.low[stretches.list[m].line[f]];
    const V v = load(lines + m * LANES);
    store(at, stretches.order[f] ? v : load(at) + v);
  }
}

// The weights of each bucket, for TILE queries and a block of keys.
class BucketSums {
 public:
  BucketSums(const Problem &p, const Group &group, Arena &arena) : p_(p), group_(group) {
    if (!group) return;
    rows_ = arena.take<float>((p.block_rows + 8) * whole(p.width));
    lines_ = arena.take<float>((p.block_rows + 8) * LANES);
  }

  // Of lookup f: weights[m][bucket] = Σ_j s[m][j] over keys in that bucket.
  // `prefix_queries`: whether to sum those too, whose keys all share the prefix's bucket.
  void operator()(int64_t f, const Stretches *const *stretches, const Place *place, int64_t count, const Block &block,
                  const float *s, int64_t row, bool prefix_queries, float *weights, int64_t room) const {
    const Lookup &lookup = group_.lookup[f];
    const int64_t prefix = lookup.prefix;
    for (int64_t m = 0; m < count; m++, s += row, weights += room) {
      if (place[m].prefix) {
        for (int64_t n = 0; n < lookup.buckets; n += LANES) store(weights + n, V{});
      } else if (lookup.first && p_.width <= MOST_CHUNKS * LANES) {
        sum_neighbours(lookup, f, *stretches[m], place[m].x, p_.width, s + block.prefix, weights);
      } else {
        sum_rows(*stretches[m], s + block.prefix, p_.width, rows_);
        sum_buckets(group_, f, *stretches[m], place[m].x, p_.width, rows_, lines_, weights);
      }
      if (prefix < 0) continue;
      const int64_t end = !place[m].prefix ? block.prefix : prefix_queries ? block.count : 0;
      float sum = 0;
      for (int64_t j = 0; j < end; j++) sum += s[j];
      weights[prefix] = sum;
    }
  }

  // Of all lookups that have tables, behind the weights of keys, and zeros behind them.
  void behind_keys(const Stretches *const *stretches, const Place *place, int64_t count, const Block &block, float *s,
                   int64_t row, bool prefix_queries) const {
    const int64_t rows = group_.rows();
    for (int64_t f = 0; f < group_.count; f++)
      if (group_.has_rows(f))
        (*this)(f, stretches, place, count, block, s, row, prefix_queries, s + block.count + group_.first_row(f), row);
    for (int64_t m = 0; rows && m < count; m++)
      for (int64_t n = 0; n < 2 * LANES; n += LANES) store(s + m * row + block.count + rows + n, V{});
  }

 private:
  const Problem &p_;
  const Group &group_;
  float *rows_ = nullptr, *lines_ = nullptr;
};

// The transpose of KeyLines: sums over queries in a column, until a row of queries comes that sees another line.
class KeyLineSums : public ByColumns {
 public:
  KeyLineSums() = default;
  KeyLineSums(const Problem &p, const Lookup &lookup, Arena &arena) : ByColumns(p, arena) {
    if (!fits_) return;
    of_keys_ = arena.take<float>(LANES * whole(columns_));
    if (!lookup.first || columns_ > MOST_CHUNKS * LANES) return;
    neighbours_ = arena.take<NeighbourSums>(width_ * chunks());
    for (int64_t k = 0; neighbours_ && k < width_; k++)
      for (int64_t n = 0; n < chunks(); n++)
        neighbours_[k * chunks() + n] = NeighbourSums(lookup, lookup.slice(k) + n * LANES);
  }

  // Adds ds, of a query in column x, to weights [keys][stride]; both from the block's first patch on.
  void operator()(const Lookup &lookup, int64_t f, const Stretches &stretches, int64_t x, const float *ds,
                  float *weights, int64_t stride) {
    if (!fits_) return spread(lookup, f, stretches, x, ds, weights, stride);
    if (row_ != stretches.row) turn_to(lookup, f, stretches, weights, stride);
    for (int64_t k = 0; k < width_; k += LANES) {
      float *sums = place(0, x) + k;
      for (int64_t y = 0; y < stretches.rows; y++, sums += room_) store(sums, load(sums) + load(ds + y * width_ + k));
    }
  }

  void flush(const Lookup &lookup, float *weights, int64_t stride) {
    for (int64_t y = 0; fits_ && y < rows_; y++) flush(lookup, y, weights, stride);
  }

 private:
  void turn_to(const Lookup &lookup, int64_t f, const Stretches &stretches, float *weights, int64_t stride) {
    row_ = stretches.row;
    for (int64_t n = 0; n < stretches.count; n++) {
      const Stretch &stretch = stretches.list[n];
      for (int64_t y = stretch.row; y < stretch.row + stretch.rows; y++) {
        if (lines_[y] == stretch.line[f]) continue;
        flush(lookup, y, weights, stride);
        for (int64_t q = 0; q < whole(columns_); q++) std::memset(place(y, q), 0, size_t(room_) * 4);
        lines_[y] = stretch.line[f];
      }
    }
  }

  void spread(const Lookup &lookup, int64_t f, const Stretches &stretches, int64_t x, const float *ds, float *weights,
              int64_t stride) const {
    for (int64_t n = 0; n < stretches.count; n++) {
      const Stretch &stretch = stretches.list[n];
      for (int64_t y = stretch.row; y < stretch.row + stretch.rows; y++)
        for (int64_t k = 0; k < width_; k++)
          weights[(y * width_ + k) * stride + *lookup.at(stretch.line[f], lookup.slice(k) + x)] += ds[y * width_ + k];
    }
  }

  void flush(const Lookup &lookup, int64_t y, float *weights, int64_t stride) const {
    const int32_t line = lines_[y];
    if (line < 0) return;
    for (int64_t k = 0; k < width_; k += LANES) {
      for (int64_t q = 0; q < columns_; q += LANES) {
        V square[LANES];
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) square[n] = load(place(y, q + n) + k);
        transpose(square);
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) store(of_keys_ + n * whole(columns_) + q, square[n]);
      }
      for (int64_t n = 0; n < smaller(LANES, width_ - k); n++)
        sum_line(lookup, line, k + n, of_keys_ + n * whole(columns_), weights + (y * width_ + k + n) * stride);
    }
  }

  int64_t chunks() const { return whole(columns_) / LANES; }

  // What queries in all columns give the key in column k.
  void sum_line(const Lookup &lookup, int32_t line, int64_t k, const float *sums, float *weights) const {
    const int64_t t = lookup.slice(k);
    if (neighbours_) {
      V v{};
      for (int64_t n = 0; n < chunks(); n++)
        v += neighbours_[k * chunks() + n](before_lane(int32_t(columns_ - n * LANES), load(sums + n * LANES)));
      float *at = weights + lookup.low[line];
      store(at, load(at) + v);
      return;
    }
    if (!lookup.onehot) {
      for (int64_t q = 0; q < columns_; q++) weights[*lookup.at(line, t + q)] += sums[q];
      return;
    }
    const int32_t *onehot = lookup.onehots(line, t);
    V even{}, odd{};
    for (int64_t q = 0; q + 1 < columns_; q += 2) {
      even += put(sums[q], onehot + q * LANES);
      odd += put(sums[q + 1], onehot + (q + 1) * LANES);
    }
    if (columns_ % 2) even += put(sums[columns_ - 1], onehot + (columns_ - 1) * LANES);
    float *at = weights + lookup.low[line];
    store(at, load(at) + even + odd);
  }

  float *of_keys_;
  NeighbourSums *neighbours_ = nullptr;  // [keys' columns][chunks]
};

}  // namespace wf::WF_ISA
