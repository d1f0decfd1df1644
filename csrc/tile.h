// What a few queries and a block of keys have to do with lookups.
#pragma once
#include "lookup.h"
#include "rows.h"

namespace wf::WF_ISA {

constexpr int MOST_LOOKUPS = WF_MOST_LOOKUPS;

// Some rows of keys, and all queries' view of them.
struct Block {
  int64_t index, first, count;  // tokens
  int64_t prefix;               // how many of them are prefix tokens
  int64_t row, rows;            // rows of patches
};

// Rows of keys on which no lookup changes its line.
struct Stretch {
  int32_t row, rows;  // row: counted from the block's first
  int32_t line[MOST_LOOKUPS];
};

// A row of queries before a block of keys.
struct Stretches {
  // row −1: none yet; rows: of the block; count: of stretches
  int64_t row, block, rows, count;
  int32_t low[MOST_LOOKUPS], high[MOST_LOOKUPS];  // buckets in use
  int8_t order[MOST_LOOKUPS];  // 1, −1: buckets of one stretch follow (precede) those of the stretch before; 0: neither
  Stretch *list;
  int32_t *offsets;  // [lookups][rows of the block]: where a row's line starts: its smallest bucket, or place if shared

  const int32_t *offset(int64_t f, int64_t rows) const { return offsets + f * rows; }
};

// Lookups that are read together: those of the logits, or those of the values.
struct Group {
  int64_t count = 0, by_query = 0, shared = 0;  // first those by query (or of values), then shared, then by key
  Lookup lookup[MOST_LOOKUPS];
  const WfLookup *given[MOST_LOOKUPS];

  explicit operator bool() const { return count; }
  bool is_by_query(int64_t f) const { return f < by_query; }
  bool is_shared(int64_t f) const { return by_query <= f && f < by_query + shared; }
};

struct Problem {
  const WfAttention &a;
  int64_t queries, keys, width, key_rows, key_prefix, block_rows, blocks;
  Group logits, values;

  // `most`: keys that are worked on at a time, about: whole rows of patches.
  Problem(const WfAttention &attention, int64_t most, Arena &arena, bool counting)
      : a(attention), queries(tokens(a.queries)), keys(tokens(a.keys)) {
    const bool looks = a.lookups;  // whether anything depends on where keys are
    width = looks ? a.keys.width : 1;
    key_prefix = looks ? a.keys.prefix : 0;
    key_rows = looks ? a.keys.frames * a.keys.height : keys;
    blocks = smaller(key_rows, (keys + most - 1) / most);
    block_rows = (key_rows + blocks - 1) / blocks;
    blocks = (key_rows + block_rows - 1) / block_rows;
    constexpr int64_t ORDER[] = {WF_BY_QUERY, WF_SHARED, WF_BY_KEY, WF_VALUES};
    for (int64_t kind : ORDER)
      for (int64_t n = 0; n < a.lookups; n++) {
        if (a.lookup[n].kind != kind) continue;
        Group &group = kind == WF_VALUES ? values : logits;
        group.given[group.count] = a.lookup + n;
        group.lookup[group.count++] = prepare(a, a.lookup[n], arena, counting);
        group.by_query += kind == WF_BY_QUERY || kind == WF_VALUES, group.shared += kind == WF_SHARED;
      }
  }

  static int64_t tokens(const WfGrid &grid) { return grid.prefix + grid.frames * grid.height * grid.width; }

  Block block(int64_t t) const {
    Block b{t, 0, 0, t ? 0 : key_prefix, t * block_rows, 0};
    b.rows = smaller(block_rows, key_rows - b.row);
    b.first = t ? key_prefix + b.row * width : 0;
    b.count = b.prefix + b.rows * width;
    return b;
  }
  int64_t most_keys() const { return key_prefix + block_rows * width; }  // of a block
};

// Remembers the stretches of the last few rows of queries.
class StretchFinder {
 public:
  StretchFinder(const Problem &p, const Group &group, Arena &arena) : problem_(p), group_(group) {
    if (!group) return;
    const int64_t query_rows = p.a.queries.frames * p.a.queries.height;
    count_ = larger(TILE + 2, smaller(query_rows, ROOM / p.block_rows));
    recent_ = arena.take<Stretches>(count_);
    auto *lists = arena.take<Stretch>(count_ * p.block_rows);
    auto *offsets = arena.take<int32_t>(count_ * p.block_rows * group.count);
    for (int64_t n = 0; recent_ && n < count_; n++) {
      recent_[n].row = -1, recent_[n].list = lists + n * p.block_rows;
      recent_[n].offsets = offsets + n * p.block_rows * group.count;
    }
  }

  const Stretches &operator()(int64_t query_row, const Block &block) {
    Stretches &found = recent_[query_row % count_];
    if (found.row == query_row && found.block == block.index) return found;
    found.row = query_row, found.block = block.index, found.rows = block.rows, found.count = 0;
    for (int64_t f = 0; f < group_.count; f++) find_lines(found, f, query_row, block);
    merge(found, block);
    for (int64_t f = 0; f < group_.count; f++) describe(found, f);
    return found;
  }

 private:
  static constexpr int64_t ROOM = 2048;  // stretches

  void find_lines(Stretches &found, int64_t f, int64_t query_row, const Block &block) const {
    const RowOffsets offset(problem_.a, *group_.given[f]);
    const Lookup &lookup = group_.lookup[f];
    for (int64_t y = 0; y < block.rows; y++) {
      const int32_t line = found.list[y].line[f] = lookup.line[offset(query_row, block.row + y)];
      found.offsets[f * problem_.block_rows + y] =
          group_.is_shared(f) ? int32_t(line * lookup.stride()) : lookup.low[line];
    }
  }

  void merge(Stretches &found, const Block &block) const {
    for (int64_t y = 0; y < block.rows; y++) {
      Stretch &here = found.list[y];
      bool same = found.count;
      for (int64_t f = 0; f < group_.count; f++) same = same && found.list[found.count - 1].line[f] == here.line[f];
      if (same) {
        found.list[found.count - 1].rows++;
      } else {
        here.row = int32_t(y), here.rows = 1;
        found.list[found.count++] = here;
      }
    }
  }

  void describe(Stretches &found, int64_t f) const {
    const Lookup &lookup = group_.lookup[f];
    bool up = true, down = true;
    for (int64_t n = 0; n < found.count; n++) {
      const int32_t line = found.list[n].line[f], low = lookup.low[line], high = lookup.high[line];
      found.low[f] = n ? int32_t(smaller(found.low[f], low)) : low;
      found.high[f] = n ? int32_t(larger(found.high[f], high)) : high;
      if (!n) continue;
      const int32_t before = found.list[n - 1].line[f];
      up = up && low > lookup.high[before], down = down && high < lookup.low[before];
    }
    found.order[f] = up ? 1 : down ? -1 : 0;
  }

  const Problem &problem_;
  const Group &group_;
  int64_t count_ = 0;
  Stretches *recent_ = nullptr;
};

// Where query i lies.
struct Place {
  bool prefix;
  int64_t row, x;
  Place() = default;
  Place(const WfGrid &grid, int64_t i)
      : prefix(i < grid.prefix), row((i - grid.prefix) / grid.width), x((i - grid.prefix) % grid.width) {}
};

// ---- One query's row of logits before q·k: the sum of a group's lookups.

// Where LANES keys of a row start: the last vector ends with the row, if the row is long enough.
WF_INLINE int64_t chunk_start(int64_t chunk, int64_t width) {
  return width < LANES ? 0 : smaller(chunk, width - LANES);
}

// What keys say, laid out as queries see it: for each row of keys, the line that the present row of queries sees, for
// each column of queries. Most rows of queries see what the row before saw.
class KeyLines {
 public:
  static constexpr int64_t ROOM = 1 << 18;  // floats; longer rows are read anew for each query

  KeyLines() = default;
  KeyLines(const Problem &p, Arena &arena)
      : width_(p.width), columns_(p.a.queries.width), rows_(p.block_rows), room_(whole(p.width)) {
    if (columns_ * room_ * rows_ > ROOM) return;
    lines_ = arena.take<int32_t>(rows_);
    laid_ = arena.take<float>(rows_ * whole(columns_) * room_);
    fits_ = true;
  }

  bool fit() const { return fits_; }
  void forget() {
    row_ = -1;
    for (int64_t y = 0; fits_ && y < rows_; y++) lines_[y] = -1;
  }

  // Keys' scores are [keys][stride], from the block's first patch on.
  void show(const Lookup &lookup, int64_t f, const Stretches &stretches, const float *scores, int64_t stride) {
    if (!fits_ || row_ == stretches.row) return;
    row_ = stretches.row;
    for (int64_t n = 0; n < stretches.count; n++) {
      const Stretch &stretch = stretches.list[n];
      for (int64_t y = stretch.row; y < stretch.row + stretch.rows; y++)
        if (lines_[y] != stretch.line[f]) lay(lookup, scores + y * width_ * stride, stride, stretch.line[f], y);
    }
  }

  // The scores [width] of row y for queries in column x, and how far it is to those of the next row.
  const float *at(int64_t y, int64_t x) const { return laid_ + (y * whole(columns_) + x) * room_; }
  int64_t step() const { return whole(columns_) * room_; }

 private:
  void lay(const Lookup &lookup, const float *scores, int64_t stride, int32_t line, int64_t y) {
    lines_[y] = line;
    float *to = laid_ + y * step();
    for (int64_t k = 0; k < width_; k += LANES)
      for (int64_t q = 0; q < columns_; q += LANES) {
        V square[LANES];  // what lies behind the row's end is not wanted, but read: the loop has one length
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++)
          square[n] = lookup.read(scores + (k + n) * stride, line, larger(lookup.slice(k + n) + q, 0));
        transpose(square);
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) store(to + (q + n) * room_ + k, square[n]);
      }
  }

  int64_t width_, columns_, rows_, room_, row_ = -1;
  bool fits_ = false;
  int32_t *lines_;
  float *laid_;
};

// The transpose of KeyLines: sums over queries in a column, until a row of queries comes that sees another line.
class KeyLineSums {
 public:
  KeyLineSums() = default;
  KeyLineSums(const Problem &p, Arena &arena)
      : width_(p.width), columns_(p.a.queries.width), rows_(p.block_rows), room_(whole(p.width)) {
    if (columns_ * room_ * rows_ > KeyLines::ROOM) return;
    lines_ = arena.take<int32_t>(rows_);
    sums_ = arena.take<float>(rows_ * whole(columns_) * room_);
    of_keys_ = arena.take<float>(LANES * whole(columns_));
    fits_ = true;
  }

  void forget() {
    row_ = -1;
    for (int64_t y = 0; fits_ && y < rows_; y++) lines_[y] = -1;
  }

  // Adds ds, of a query in column x, to weights [keys][stride]; both from the block's first patch on.
  void operator()(const Lookup &lookup, int64_t f, const Stretches &stretches, int64_t x, const float *ds,
                  float *weights, int64_t stride) {
    if (!fits_) return spread(lookup, f, stretches, x, ds, weights, stride);
    if (row_ != stretches.row) turn_to(lookup, f, stretches, weights, stride);
    const int64_t step = whole(columns_) * room_;
    for (int64_t k = 0; k < width_; k += LANES) {
      float *sums = sums_ + x * room_ + k;
      for (int64_t y = 0; y < stretches.rows; y++, sums += step) store(sums, load(sums) + load(ds + y * width_ + k));
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
        std::memset(sums_ + y * whole(columns_) * room_, 0, size_t(whole(columns_) * room_) * 4);
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
    const float *sums = sums_ + y * whole(columns_) * room_;
    for (int64_t k = 0; k < width_; k += LANES) {
      for (int64_t q = 0; q < columns_; q += LANES) {
        V square[LANES];
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) square[n] = load(sums + (q + n) * room_ + k);
        transpose(square);
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) store(of_keys_ + n * whole(columns_) + q, square[n]);
      }
      for (int64_t n = 0; n < smaller(LANES, width_ - k); n++)
        sum_line(lookup, line, lookup.slice(k + n), of_keys_ + n * whole(columns_),
                 weights + (y * width_ + k + n) * stride);
    }
  }

  void sum_line(const Lookup &lookup, int32_t line, int64_t t, const float *sums, float *weights) const {
    if (!lookup.onehot) {
      for (int64_t q = 0; q < columns_; q++) weights[*lookup.at(line, t + q)] += sums[q];
      return;
    }
    const float *onehot = lookup.onehots(line, t);
    V even{}, odd{};
    for (int64_t q = 0; q + 1 < columns_; q += 2) {
      even += load(onehot + q * LANES) * sums[q];
      odd += load(onehot + (q + 1) * LANES) * sums[q + 1];
    }
    if (columns_ % 2) even += load(onehot + (columns_ - 1) * LANES) * sums[columns_ - 1];
    float *at = weights + lookup.low[line];
    store(at, load(at) + even + odd);
  }

  int64_t width_, columns_, rows_, room_, row_ = -1;
  bool fits_ = false;
  int32_t *lines_;
  float *sums_, *of_keys_;
};

// Where a group finds what it adds.
struct Sources {
  float *scores[MOST_LOOKUPS];  // by query: [TILE][room]. Shared: [lines][stride], then that of prefix tokens.
                                // By key: [keys of the block][room]
  KeyLines key_lines[MOST_LOOKUPS];

  const float *of_token(const Group &group, int64_t f, int64_t n) const {
    return scores[f] + n * group.lookup[f].room();
  }
};

// Of pairs with a prefix token: the same for all keys, but for lookups by key.
inline void fill_prefix(const Group &group, const Sources &from, int64_t m, int64_t count, float *s) {
  if (!count) return;
  float same = 0;
  for (int64_t f = 0; f < group.by_query + group.shared; f++) {
    const Lookup &lookup = group.lookup[f];
    if (lookup.prefix < 0) continue;
    same +=
        group.is_shared(f) ? from.scores[f][lookup.lines * lookup.stride()] : from.of_token(group, f, m)[lookup.prefix];
  }
  for (int64_t j = 0; j < count; j++) s[j] = same;
  for (int64_t f = group.by_query + group.shared; f < group.count; f++) {
    const Lookup &lookup = group.lookup[f];
    for (int64_t j = 0; lookup.prefix >= 0 && j < count; j++) s[j] += from.of_token(group, f, j)[lookup.prefix];
  }
}

// What LANES keys of row y of the block say to a query in column x.
inline V read_by_keys(const Group &group, const Sources &from, const Stretch &stretch, int64_t y, int64_t x, int64_t x0,
                      const Block &block, int64_t width) {
  V v{};
  for (int64_t f = group.by_query + group.shared; f < group.count; f++) {
    const Lookup &lookup = group.lookup[f];
    if (from.key_lines[f].fit()) {
      v += load(from.key_lines[f].at(y, x) + x0);
      continue;
    }
    const float *scores = from.of_token(group, f, block.prefix + y * width + x0);
    for (int64_t n = 0; n < smaller(LANES, width - x0); n++)
      v[n] += scores[n * lookup.room() + *lookup.at(stretch.line[f], lookup.slice(x0 + n) + x)];
  }
  return v;
}

// One row of a block after the other, LANES keys of each, where lines by query differ by constants: all are read by the
// same permutation.
template <int by_query, bool shared, bool by_key>
inline void fill_rows(const Group &group, const Sources &from, int64_t m, const Stretches &stretches, int64_t x,
                      int64_t x0, const Block &block, int64_t rows_room, int64_t width, float *s) {
  const float *first[2] = {};
  Vi at[2] = {};
  const int32_t *offsets[2] = {};
#pragma GCC unroll 2
  for (int f = 0; f < by_query; f++) {
    const Lookup &lookup = group.lookup[f];
    const int64_t t = lookup.slice(x) + x0;
    first[f] = from.of_token(group, f, m) + lookup.base[t] - lookup.low[0];
    at[f] = load(lookup.at(0, t)) - all(lookup.base[t]);
    offsets[f] = stretches.offset(f, rows_room);
  }
  const float *lines = nullptr, *laid = nullptr;
  const int32_t *line_offsets = nullptr;
  int64_t step = 0;
  if constexpr (shared)
    lines = from.scores[by_query] + group.lookup[by_query].slice(x) + x0,
    line_offsets = stretches.offset(by_query, rows_room);
  if constexpr (by_key)
    laid = from.key_lines[by_query + shared].at(0, x) + x0, step = from.key_lines[by_query + shared].step();
  for (int64_t y = 0; y < block.rows; y++, s += width, laid += step) {
    V v{};
#pragma GCC unroll 2
    for (int f = 0; f < by_query; f++) v += pick(load(first[f] + offsets[f][y]), at[f]);
    if constexpr (shared) v += load(lines + line_offsets[y]);
    if constexpr (by_key) v += load(laid);
    store(s, v);
  }
}

// The same for any lookups.
inline void fill_any(const Group &group, const Sources &from, int64_t m, const Stretches &stretches, int64_t x,
                     int64_t x0, const Block &block, int64_t, int64_t width, float *s) {
  for (int64_t n = 0; n < stretches.count; n++) {
    const Stretch &stretch = stretches.list[n];
    V same{};
    for (int64_t f = 0; f < group.by_query; f++)
      same += group.lookup[f].read(from.of_token(group, f, m), stretch.line[f], group.lookup[f].slice(x) + x0);
    for (int64_t f = group.by_query; f < group.by_query + group.shared; f++)
      same += load(from.scores[f] + stretch.line[f] * group.lookup[f].stride() + group.lookup[f].slice(x) + x0);
    for (int64_t y = stretch.row; y < stretch.row + stretch.rows; y++)
      store(s + y * width, same + read_by_keys(group, from, stretch, y, x, x0, block, width));
  }
}

using Filler = void (*)(const Group &, const Sources &, int64_t, const Stretches &, int64_t, int64_t, const Block &,
                        int64_t, int64_t, float *);

inline Filler filler(const Group &group, const Sources &from, int64_t x, int64_t x0) {
  constexpr Filler FILLERS[3][2][2] = {
      {{fill_any, fill_rows<0, false, true>}, {fill_rows<0, true, false>, fill_rows<0, true, true>}},
      {{fill_rows<1, false, false>, fill_rows<1, false, true>}, {fill_rows<1, true, false>, fill_rows<1, true, true>}},
      {{fill_rows<2, false, false>, fill_rows<2, false, true>}, {fill_rows<2, true, false>, fill_rows<2, true, true>}}};
  const int64_t by_key = group.count - group.by_query - group.shared;
  if (group.by_query > 2 || group.shared > 1 || by_key > 1) return fill_any;
  if (by_key && !from.key_lines[group.count - 1].fit()) return fill_any;
  for (int64_t f = 0; f < group.by_query; f++)
    if (!group.lookup[f].alike || group.lookup[f].base[group.lookup[f].slice(x) + x0] < 0) return fill_any;
  return FILLERS[group.by_query][group.shared][by_key];
}

// Of query m of the tile, in column x. Vectors are stored whole and in order: what spills over the end of a row, the
// next row overwrites.
inline void fill(const Group &group, Sources &from, int64_t m, const Stretches &stretches, int64_t x,
                 const Block &block, int64_t rows_room, int64_t width, float *s) {
  fill_prefix(group, from, m, block.prefix, s);
  for (int64_t f = group.by_query + group.shared; f < group.count; f++)
    from.key_lines[f].show(group.lookup[f], f, stretches, from.of_token(group, f, block.prefix),
                           group.lookup[f].room());
  for (int64_t chunk = 0; chunk < width; chunk += LANES) {
    const int64_t x0 = chunk_start(chunk, width);
    filler(group, from, x, x0)(group, from, m, stretches, x, x0, block, rows_room, width, s + block.prefix + x0);
  }
}

// ---- The transpose: from one query's row of weights to sums over buckets.

// sums[stretch][x] = Σ over the stretch's rows. Lanes past the width hold what is not wanted.
inline void sum_rows(const Stretches &stretches, const float *s, int64_t width, float *sums) {
  const int64_t room = whole(width);
  for (int64_t x0 = 0; x0 < width; x0 += LANES)
    for (int64_t n = 0; n < stretches.count; n++) {
      const Stretch &stretch = stretches.list[n];
      const float *row = s + stretch.row * width + x0;
      V v = load(row);
      for (int32_t y = 1; y < stretch.rows; y++) v += load(row + y * width);
      store(sums + n * room + x0, v);
    }
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
                           const float *s, int32_t low, int32_t high, float *weights) {
  const NeighbourSums sum(lookup, lookup.slice(x));
  NeighbourSums more[MOST_CHUNKS];
  for (int64_t x0 = LANES; x0 < width; x0 += LANES) more[x0 / LANES] = NeighbourSums(lookup, lookup.slice(x) + x0);
  for (int64_t b = low; b <= high; b += LANES) store(weights + b, V{});
  const int8_t order = stretches.order[f];
  for (int64_t n = 0; n < stretches.count; n++) {
    const Stretch &stretch = stretches.list[order < 0 ? stretches.count - 1 - n : n];
    const auto column = [&](int64_t x0) {
      const float *row = s + stretch.row * width + x0;
      V v = load(row);
      for (int32_t y = 1; y < stretch.rows; y++) v += load(row + y * width);
      return before_lane(int32_t(smaller(width - x0, LANES)), v);
    };
    V v = sum(column(0));
    for (int64_t x0 = LANES; x0 < width; x0 += LANES) v += more[x0 / LANES](column(x0));
    float *at = weights + lookup.low[stretch.line[f]];
    store(at, order ? v : load(at) + v);
  }
}

// weights[bucket] = Σ of sums[stretch][x] over where lookup f has that bucket, for low <= bucket <= high, which may be
// more than the stretches have. `sums` and `lines` have room for 8 more rows.
inline void sum_buckets(const Group &group, int64_t f, const Stretches &stretches, int64_t x, int64_t width,
                        const float *sums, int32_t low, int32_t high, float *lines, float *weights) {
  const Lookup &lookup = group.lookup[f];
  const int64_t room = whole(width), t = lookup.slice(x);
  for (int64_t b = low; b <= high; b += LANES) store(weights + b, V{});
  if (!lookup.onehot) {
    for (int64_t n = 0; n < stretches.count; n++) {
      const int32_t *bucket = lookup.at(stretches.list[n].line[f], t);
      for (int64_t k = 0; k < width; k++) weights[bucket[k]] += sums[n * room + k];
    }
    return;
  }
  if (lookup.alike) {
    const float *onehot = lookup.onehots(0, t);
    int64_t n = 0;
    for (; stretches.count - n > TILE; n += 8)
      product_panel<1, SET, ROWS, 8>(sums + n * room, room, onehot, LANES, lines + n * LANES, LANES, width);
    if (n < stretches.count)
      product_panel<1, SET, ROWS>(sums + n * room, room, onehot, LANES, lines + n * LANES, LANES, width);
  } else {
    for (int64_t n = 0; n < stretches.count; n++) {
      const float *onehot = lookup.onehots(stretches.list[n].line[f], t);
      V v{};
      for (int64_t k = 0; k < width; k++) v += sums[n * room + k] * load(onehot + k * LANES);
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

  // Of lookup f: weights[m][bucket] = Σ_j s[m][j] over keys in that bucket, for low <= bucket <= high and the prefix's.
  // `prefix_queries`: whether to sum those too, whose keys all share the prefix's bucket.
  void operator()(int64_t f, const Stretches *const *stretches, const Place *place, int64_t count, const Block &block,
                  const float *s, int64_t row, int32_t low, int32_t high, bool prefix_queries, float *weights,
                  int64_t room) const {
    const int64_t prefix = group_.lookup[f].prefix;
    for (int64_t m = 0; m < count; m++, s += row, weights += room) {
      if (place[m].prefix) {
        for (int64_t n = low; n <= high; n++) weights[n] = 0;
      } else if (group_.lookup[f].first && p_.width <= MOST_CHUNKS * LANES) {
        sum_neighbours(group_.lookup[f], f, *stretches[m], place[m].x, p_.width, s + block.prefix, low, high, weights);
      } else {
        sum_rows(*stretches[m], s + block.prefix, p_.width, rows_);
        sum_buckets(group_, f, *stretches[m], place[m].x, p_.width, rows_, low, high, lines_, weights);
      }
      if (prefix < 0) continue;
      const int64_t end = !place[m].prefix ? block.prefix : prefix_queries ? block.count : 0;
      float sum = 0;
      for (int64_t j = 0; j < end; j++) sum += s[j];
      weights[prefix] = sum;
    }
  }

 private:
  const Problem &p_;
  const Group &group_;
  float *rows_ = nullptr, *lines_ = nullptr;
};

// The rows of queries of a tile before a block of keys, and the buckets they have there.
struct View {
  const Stretches *stretches[TILE];

  void look(StretchFinder &find, const Place *place, int64_t count, const Block &block) {
    for (int64_t m = 0; m < count; m++) stretches[m] = place[m].prefix ? nullptr : &find(place[m].row, block);
  }

  // high < low if there are none.
  void buckets(int64_t f, int64_t count, int32_t *low, int32_t *high) const {
    *low = INT32_MAX, *high = -1;
    for (int64_t m = 0; m < count; m++) {
      if (!stretches[m]) continue;
      *low = int32_t(smaller(*low, stretches[m]->low[f])), *high = int32_t(larger(*high, stretches[m]->high[f]));
    }
  }
};

// c[m] += weights[m]·table, of buckets low ... high and of the prefix's.
inline void add_rows(const Lookup &lookup, int64_t head, const float *weights, int64_t room, int64_t count, int32_t low,
                     int32_t high, float *c, int64_t features) {
  const float *table = lookup.tall + head * lookup.tall_head;
  if (low <= high)
    product<ADD>(weights + low, room, table + low * features, features, c, features, high - low + 1, features);
  if (lookup.prefix < 0) return;
  for (int64_t m = 0; m < count; m++) {
    const float weight = weights[m * room + lookup.prefix];
    if (weight == 0) continue;
    for (int64_t d = 0; d < features; d += LANES) {
      float *at = c + m * features + d;
      store(at, load(at) + load(table + lookup.prefix * features + d) * weight);
    }
  }
}

}  // namespace wf::WF_ISA
