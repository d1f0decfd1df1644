// One query's row of logits before q·k: the sum of a group's lookups.
#pragma once
#include "problem.h"

namespace wf::WF_ISA {

// Where LANES keys of a row start: the last vector ends with the row, if the row is long enough.
WF_INLINE int64_t chunk_start(int64_t chunk, int64_t width) {
  return width < LANES ? 0 : smaller(chunk, width - LANES);
}

// A number for each column of queries, row of keys and column of keys, on the line that the present row of queries
// sees. Most rows of queries see what the row before saw. What one query reads is in one piece.
class ByColumns {
 public:
  ByColumns() = default;
  ByColumns(const Problem &p, Arena &arena)
      : width_(p.width), columns_(p.a.queries.width), rows_(p.block_rows), room_(whole(p.width)) {
    if (columns_ * room_ * rows_ > ROOM) return;
    lines_ = arena.take<int32_t>(rows_);
    laid_ = arena.take<float>(whole(columns_) * step());
    fits_ = true;
  }

  void forget() {
    row_ = -1;
    for (int64_t y = 0; fits_ && y < rows_; y++) lines_[y] = -1;
  }

 protected:
  static constexpr int64_t ROOM = 1 << 18;  // floats; longer rows are read anew for each query

  // From one column of queries to the next.
  int64_t step() const { return rows_ * room_; }
  // Of row y of the keys, before queries in column x: [width].
  float *place(int64_t y, int64_t x) const { return laid_ + x * step() + y * room_; }

  int64_t width_, columns_, rows_, room_, row_ = -1;
  bool fits_ = false;
  int32_t *lines_;
  float *laid_;
};

// What keys say, laid out as queries see it.
class KeyLines : public ByColumns {
 public:
  using ByColumns::ByColumns;

  bool fit() const { return fits_; }
  int64_t row() const { return room_; }  // from one row of keys to the next

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

  // The scores [width] of row y for queries in column x.
  const float *at(int64_t y, int64_t x) const { return place(y, x); }

 private:
  void lay(const Lookup &lookup, const float *scores, int64_t stride, int32_t line, int64_t y) {
    lines_[y] = line;
    for (int64_t k = 0; k < width_; k += LANES)
      for (int64_t q = 0; q < columns_; q += LANES) {
        V square[LANES];  // what lies behind the row's end is not wanted, but read: the loop has one length
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++)
          square[n] = lookup.read(scores + (k + n) * stride, line, larger(lookup.slice(k + n) + q, 0));
        transpose(square);
#pragma GCC unroll 16
        for (int64_t n = 0; n < LANES; n++) store(place(y, q + n) + k, square[n]);
      }
  }
};

// Where a group finds what it adds.
struct Sources {
  float *scores[MOST_LOOKUPS];  // by query: [TILE][room]. Shared: [lines][stride], then that of prefix tokens.
                                // By key: [keys of the block][room]
  int64_t room[MOST_LOOKUPS];
  KeyLines key_lines[MOST_LOOKUPS];

  const float *of_token(int64_t f, int64_t n) const { return scores[f] + n * room[f]; }
};

// Of pairs with a prefix token: the same for all keys, but for lookups by key.
inline void fill_prefix(const Group &group, const Sources &from, int64_t m, int64_t count, float *s) {
  if (!count) return;
  float same = 0;
  for (int64_t f = 0; f < group.by_query + group.shared; f++) {
    const Lookup &lookup = group.lookup[f];
    if (lookup.prefix < 0) continue;
    same += group.is_shared(f) ? from.scores[f][lookup.lines * lookup.stride()] : from.of_token(f, m)[lookup.prefix];
  }
  for (int64_t j = 0; j < count; j++) s[j] = same;
  for (int64_t f = group.by_query + group.shared; f < group.count; f++) {
    const Lookup &lookup = group.lookup[f];
    for (int64_t j = 0; lookup.prefix >= 0 && j < count; j++) s[j] += from.of_token(f, j)[lookup.prefix];
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
    const float *scores = from.of_token(f, block.prefix + y * width + x0);
    for (int64_t n = 0; n < smaller(LANES, width - x0); n++)
      v[n] += scores[n * from.room[f] + *lookup.at(stretch.line[f], lookup.slice(x0 + n) + x)];
  }
  return v;
}

// One row of a block after the other, LANES keys of each, where lines by query differ by constants: all are read by the
// same permutation.
template <int by_query, bool shared, bool by_key>
inline void fill_rows(const Group &group, const Sources &from, int64_t m, const Stretches &stretches, int64_t x,
                      int64_t x0, const Block &block, int64_t width, float *s) {
  const float *first[2] = {};
  Vi at[2] = {};
  const int32_t *offsets[2] = {};
#pragma GCC unroll 2
  for (int f = 0; f < by_query; f++) {
    const Lookup &lookup = group.lookup[f];
    const int64_t t = lookup.slice(x) + x0;
    first[f] = from.of_token(f, m) + lookup.base[t] - lookup.low[0];
    at[f] = load(lookup.at(0, t)) - all(lookup.base[t]);
    offsets[f] = stretches.offset(f);
  }
  const float *lines = nullptr, *laid = nullptr;
  const int32_t *line_offsets = nullptr;
  int64_t step = 0;
  if constexpr (shared)
    lines = from.scores[by_query] + group.lookup[by_query].slice(x) + x0, line_offsets = stretches.offset(by_query);
  if constexpr (by_key)
    laid = from.key_lines[by_query + shared].at(0, x) + x0, step = from.key_lines[by_query + shared].row();
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
                     int64_t x0, const Block &block, int64_t width, float *s) {
  for (int64_t n = 0; n < stretches.count; n++) {
    const Stretch &stretch = stretches.list[n];
    V same{};
    for (int64_t f = 0; f < group.by_query; f++)
      same += group.lookup[f].read(from.of_token(f, m), stretch.line[f], group.lookup[f].slice(x) + x0);
    for (int64_t f = group.by_query; f < group.by_query + group.shared; f++)
      same += load(from.scores[f] + stretch.line[f] * group.lookup[f].stride() + group.lookup[f].slice(x) + x0);
    for (int64_t y = stretch.row; y < stretch.row + stretch.rows; y++)
      store(s + y * width, same + read_by_keys(group, from, stretch, y, x, x0, block, width));
  }
}

using Filler = void (*)(const Group &, const Sources &, int64_t, const Stretches &, int64_t, int64_t, const Block &,
                        int64_t, float *);

inline Filler filler(const Group &group, const Sources &from, int64_t x, int64_t x0) {
  static constexpr Filler FILLERS[3][2][2] = {
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
                 const Block &block, int64_t width, float *s) {
  fill_prefix(group, from, m, block.prefix, s);
  for (int64_t f = group.by_query + group.shared; f < group.count; f++)
    from.key_lines[f].show(group.lookup[f], f, stretches, from.of_token(f, block.prefix), from.room[f]);
  for (int64_t chunk = 0; chunk < width; chunk += LANES) {
    const int64_t x0 = chunk_start(chunk, width);
    filler(group, from, x, x0)(group, from, m, stretches, x, x0, block, width, s + block.prefix + x0);
  }
}

// Adds to rows of products, of queries m ... m + count of a tile, what a group says of them. `room` is for as many.
inline void add_lookups(const Group &group, Sources &from, const View &view, const Place *place, int64_t m,
                        int64_t count, const Block &block, int64_t width, float *s, float *room, int64_t row) {
  for (int64_t n = 0; n < count; n++) {
    if (place[m + n].prefix)
      fill_prefix(group, from, m + n, block.count, room + n * row);
    else
      fill(group, from, m + n, *view.stretches[m + n], place[m + n].x, block, width, room + n * row);
  }
  for (int64_t n = 0; n < count; n++, s += row, room += row)
    for (int64_t j = 0; j < block.count; j += LANES) store(s + j, load(s + j) + load(room + j));
}

}  // namespace wf::WF_ISA
