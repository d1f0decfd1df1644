// What products by queries read: the tokens of a block, and behind them the tables of a group, as if they were more.
#pragma once
#include "problem.h"

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

// Tokens as columns. Queries read the tables first: what these say goes into what tokens are added to. So tables share
// the last panel with the tokens that do not fill it, and these are read twice.
class Panels {
 public:
  Panels() = default;
  // `tables`: whether those of the group are read here.
  Panels(int64_t most, int64_t features, const Group &group, bool tables, Arena &arena)
      : features_(features), tables_(tables ? group.rows() : 0), group_(&group),
        right_(features, most + tables_, arena) {
    if (tables_) scores_ = arena.take<float>(TILE * room(), PANEL);
  }

  bool has(int64_t f) const { return tables_ && group_->has_rows(f); }  // the table of lookup f
  // Where `read_tables` leaves the scores of lookup f: [TILE][room].
  float *scores(int64_t f) const { return scores_ ? scores_ + group_->first_row(f) : nullptr; }
  int64_t room() const { return PANEL + whole(tables_); }

  // Of the tokens first ... first + count, see Rows; tables are those of `head`.
  template <class T>
  void read(const T *x, int64_t token, int64_t first, int64_t count, const Turner *turn, float factor, int64_t head) {
    rest_ = tables_ ? count % PANEL : 0, whole_ = count - rest_;
    right_.read_transposed(features_, count + tables_,
                           Rows<T>{x, token, first, count, features_, turn, factor, group_, head});
  }

  // scores[m][bucket] = a_m·table[bucket], of all buckets, and what a_m says to the tokens beside them.
  void read_tables(const Left &a) const {
    if (tables_) multiply<SET>(a, right_, whole_, rest_ + tables_, scores_ - rest_, room());
  }

  // s (+)= a·tokens, after read_tables.
  template <Result result>
  void multiply_tokens(const Left &a, float *s, int64_t row) const {
    multiply<result>(a, right_, 0, whole_, s, row);
    for (int64_t m = 0; rest_ && m < TILE; m++)
      for (int64_t j = 0; j < rest_; j += LANES) {
        float *at = s + m * row + whole_ + j;
        store(at, load(at) + load(scores_ + m * room() - rest_ + j));
      }
  }

 private:
  int64_t features_ = 0, tables_ = 0;
  int64_t whole_ = 0, rest_ = 0;  // tokens in whole panels, and those behind
  const Group *group_ = nullptr;
  Right right_;
  float *scores_ = nullptr;
};

// The tables of a head as columns of their own, where they are not beside tokens.
class TableColumns {
 public:
  TableColumns() = default;
  TableColumns(const Group &group, int64_t features, const Panels &panels, Arena &arena)
      : features_(features), group_(&group) {
    for (int64_t f = 0; f < group.count; f++) {
      wanted_[f] = group.lookup[f].table && !panels.has(f);
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
    if (with_prefix && prefix >= 0)
      low = low > high ? prefix : smaller(low, prefix), high = larger(high, prefix);
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
