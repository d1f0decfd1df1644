// Blocks of keys, rows of queries before them, and the lines of the lookups between the two.
#pragma once
#include "lookup.h"

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

  const int32_t *offset(int64_t f) const { return offsets + f * rows; }
};

// Lookups that are read together: those of the logits, or those of the values.
struct Group {
  int64_t count = 0, by_query = 0, shared = 0;  // first those by query (or of values), then shared, then by key
  Lookup lookup[MOST_LOOKUPS];
  const WfLookup *given[MOST_LOOKUPS];

  explicit operator bool() const { return count; }
  bool is_by_query(int64_t f) const { return f < by_query; }
  bool is_shared(int64_t f) const { return by_query <= f && f < by_query + shared; }

  // Tables that queries read (or of values) are more keys: their rows come one after another, behind those of keys.
  bool has_rows(int64_t f) const { return is_by_query(f) && !lookup[f].given; }
  int64_t rows() const { return first_row(count); }
  int64_t first_row(int64_t f) const {
    int64_t row = 0;
    for (int64_t n = 0; n < f; n++) row += has_rows(n) ? lookup[n].buckets : 0;
    return row;
  }
  const float *row(int64_t n, int64_t head) const {
    int64_t f = 0;
    for (; !has_rows(f) || n >= lookup[f].buckets; f++) n -= has_rows(f) ? lookup[f].buckets : 0;
    return lookup[f].table_row(head, n);
  }
};

struct Problem {
  const WfAttention &a;
  int64_t queries, keys, width, key_rows, key_prefix, block_rows, blocks;
  Group logits, values;

  // `most`: keys that are worked on at a time, about: whole rows of patches.
  Problem(const WfAttention &attention, int64_t most, bool backward, Arena &arena, bool counting)
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
        group.lookup[group.count++] = prepare(a, a.lookup[n], backward, arena, counting);
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
  // Whether tables are read by keys.
  bool keys_read() const {
    for (int64_t f = logits.by_query + logits.shared; f < logits.count; f++)
      if (!logits.lookup[f].given) return true;
    return false;
  }
  // Whether they are read by others than products of queries and keys are made of: turned ones.
  bool plain_keys_read() const { return a.pairs && keys_read(); }
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
      found.offsets[f * block.rows + y] = group_.is_shared(f) ? int32_t(line * lookup.stride()) : lookup.low[line];
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

  // Of the next token, i, without a division: these are slow.
  Place next(const WfGrid &grid, int64_t i) const {
    if (prefix) return Place(grid, i);
    Place place = *this;
    if (++place.x == grid.width) place.x = 0, place.row++;
    return place;
  }
};

// The rows of queries of a tile before a block of keys, and the buckets they have there.
struct View {
  const Stretches *stretches[TILE];

  void look(StretchFinder &find, const Place *place, int64_t count, const Block &block) {
    for (int64_t m = 0; m < count; m++) {
      const bool same = m && !place[m - 1].prefix && place[m].row == place[m - 1].row;
      stretches[m] = place[m].prefix ? nullptr : same ? stretches[m - 1] : &find(place[m].row, block);
    }
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

}  // namespace wf::WF_ISA
