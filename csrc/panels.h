// The right side of products by queries: tokens, and behind them the columns of tables that the same queries read.
#pragma once
#include "problem.h"
#include "rows.h"

namespace wf::WF_ISA {

class Panels {
 public:
  Panels() = default;
  // `tables`: the first so many of the group. They are read in the panel that tokens do not fill, which costs less than
  // products of their own.
  Panels(int64_t most, int64_t features, const Group &group, int64_t tables, Arena &arena)
      : features_(features), tables_(tables), group_(&group) {
    for (int64_t f = 0; f < tables; f++) columns_ += group.lookup[f].buckets;
    panels_ = arena.take<float>(whole(most + columns_, PANEL) * features);
    if (tables) scores_ = arena.take<float>(TILE * room(), PANEL);
  }

  bool has(int64_t f) const { return f < tables_; }  // the table of lookup f

  // Where `read_tables` leaves the scores of lookup f: [TILE][room].
  float *scores(int64_t f) const {
    int64_t column = 0;
    for (int64_t n = 0; n < f; n++) column += group_->lookup[n].buckets;
    return scores_ ? scores_ + column : nullptr;
  }
  int64_t room() const { return PANEL + whole(columns_); }

  // See read_transposed; tables are those of `head`.
  template <class T>
  void read(const T *x, int64_t token, int64_t first, int64_t count, const Turner *turn, float factor, int64_t head) {
    read_transposed(x, token, first, count, features_, turn, factor, panels_);
    rest_ = tables_ ? count % PANEL : 0, whole_ = count - rest_;
    int64_t column = count;
    for (int64_t f = 0; f < tables_; f++) {
      const Lookup &lookup = group_->lookup[f];
      write(lookup.wide + head * lookup.wide_head + 1, lookup.width, lookup.buckets, column);
      column += lookup.buckets;
    }
  }

  // scores[m][bucket] = a_m·table[:, bucket], of all buckets, and what a_m says to the tokens beside them.
  void read_tables(const float *a, int64_t lda) const {
    if (tables_)
      product_panels<SET>(a, lda, panels_ + whole_ * features_, scores_ - rest_, room(), features_, rest_ + columns_);
  }

  // s (+)= a·tokens, after read_tables.
  template <Result result>
  void multiply(const float *a, int64_t lda, float *s, int64_t row) const {
    product_panels<result>(a, lda, panels_, s, row, features_, whole_);
    for (int64_t m = 0; rest_ && m < TILE; m++)
      for (int64_t j = 0; j < rest_; j += LANES) {
        float *at = s + m * row + whole_ + j;
        store(at, load(at) + load(scores_ + m * room() - rest_ + j));
      }
  }

 private:
  // `count` columns of a table, from `column` on.
  void write(const float *table, int64_t width, int64_t count, int64_t column) {
    for (int64_t n = 0, some; n < count; n += some) {
      const int64_t at = column + n;
      some = smaller(PANEL - at % PANEL, count - n);
      float *to = panels_ + at / PANEL * PANEL * features_ + at % PANEL;
      for (int64_t d = 0; d < features_; d++) std::memcpy(to + d * PANEL, table + d * width + n, size_t(some) * 4);
    }
  }

  int64_t features_ = 0, tables_ = 0, columns_ = 0;
  int64_t whole_ = 0, rest_ = 0;  // tokens in whole panels, and those behind
  const Group *group_ = nullptr;
  float *panels_ = nullptr, *scores_ = nullptr;
};

}  // namespace wf::WF_ISA
