// What products by queries read: the tokens of a block, and behind them the tables of a group, as if they were more.
#pragma once
#include "fill.h"

namespace wf::WF_ISA {

// Row i: token first + i, turned and scaled, then the tables' rows.
template <class T>
struct Rows {
  const T *x;
  int64_t token, first, count, features;
  const Turner *turn;
  float factor;
  const Group *group;
  int64_t head;

  const float *operator()(int64_t i, float *room) const {
    if (i >= count) return group->row(i - count, head);
    read_row(x + (first + i) * token, features, factor, room);
    if (turn) (*turn)(room, first + i);
    return room;
  }
};

// Tokens as columns, and tables behind them.
class Panels {
 public:
  Panels() = default;
  // `tables`: whether those of the group are read here.
  Panels(int64_t most, int64_t features, const Group &group, bool tables, Arena &arena)
      : features_(features), tables_(tables ? group.rows() : 0), group_(&group),
        right_(features, most + tables_, arena) {}

  bool has(int64_t f) const { return tables_ && group_->has_rows(f); }  // the table of lookup f

  // Of the tokens first ... first + count, see Rows; tables are those of `head`.
  template <class T>
  void read(const T *x, int64_t token, int64_t first, int64_t count, const Turner *turn, float factor, int64_t head) {
    columns_ = count + tables_;
    right_.read_transposed(features_, columns_, Rows<T>{x, token, first, count, features_, turn, factor, group_, head});
  }

  // s[m] = a_m·token of each token, then a_m·table[bucket] of each bucket.
  void multiply_by(const Left &a, float *s, int64_t row) const { multiply<SET>(a, right_, 0, columns_, s, row); }

  // The former alone.
  void multiply_tokens_by(const Left &a, float *s, int64_t row) const {
    multiply<SET>(a, right_, 0, columns_ - tables_, s, row);
  }

  // Where lookups find the latter.
  void show(Sources &from, float *s, int64_t row) const {
    for (int64_t f = 0; f < group_->count; f++)
      if (has(f)) from.scores[f] = s + columns_ - tables_ + group_->first_row(f), from.room[f] = row;
  }

 private:
  int64_t features_ = 0, tables_ = 0, columns_ = 0;
  const Group *group_ = nullptr;
  Right right_;
};

// The tables of a head as columns of their own, where they are not beside tokens.
class TableColumns {
 public:
  TableColumns() = default;
  TableColumns(const Group &group, int64_t features, const Panels &panels, Arena &arena)
      : features_(features), group_(&group) {
    for (int64_t f = 0; f < group.count; f++) {
      wanted_[f] = group.has_rows(f) && !panels.has(f);
      if (wanted_[f]) columns_[f] = Right(features, group.lookup[f].buckets, arena);
    }
  }

  void read(int64_t head) {
    for (int64_t f = 0; f < group_->count; f++)
      if (wanted_[f])
        columns_[f].read_transposed(features_, group_->lookup[f].buckets,
                                    [&](int64_t n, float *) { return group_->lookup[f].table_row(head, n); });
  }

  // scores[m][bucket] = x_m·table[bucket], for low <= bucket <= high at least and, if asked for, the prefix's.
  void multiply_table(int64_t f, const Left &x, int64_t low, int64_t high, bool with_prefix, float *scores,
                      int64_t room) const {
    const int64_t prefix = group_->lookup[f].prefix;
    if (with_prefix && prefix >= 0) low = low > high ? prefix : smaller(low, prefix), high = larger(high, prefix);
    low -= low % STEP;
    if (low <= high) multiply<SET>(x, columns_[f], low, high - low + 1, scores + low, room);
  }

 private:
  int64_t features_ = 0;
  const Group *group_ = nullptr;
  bool wanted_[MOST_LOOKUPS] = {};
  Right columns_[MOST_LOOKUPS];
};

}  // namespace wf::WF_ISA
