// The right side of products by queries: tokens, and behind them the columns of a table that the same queries read.
#pragma once
#include "lookup.h"
#include "rows.h"

namespace wf::WF_ISA {

class Panels {
 public:
  Panels() = default;
  // `table`: read in the panel that tokens do not fill, which costs less than a product of its own; or null.
  Panels(int64_t most, int64_t features, const Lookup *table, Arena &arena) : features_(features), table_(table) {
    panels_ = arena.take<float>(whole(most + (table ? table->buckets : 0), PANEL) * features);
  }

  // Room that the scores of a query need.
  static int64_t room(const Lookup &lookup) { return PANEL + lookup.room(); }

  // See read_transposed; `head` is the table's.
  template <class T>
  void read(const T *x, int64_t token, int64_t first, int64_t count, const Turner *turn, float factor, int64_t head) {
    read_transposed(x, token, first, count, features_, turn, factor, panels_);
    whole_ = count, rest_ = 0;
    if (!table_) return;
    rest_ = count % PANEL, whole_ = count - rest_;
    const float *columns = table_->wide + head * table_->wide_head + 1;
    for (int64_t n = 0, some; n < table_->buckets; n += some) {
      const int64_t at = count + n;
      some = smaller(PANEL - at % PANEL, table_->buckets - n);
      float *to = panels_ + at / PANEL * PANEL * features_ + at % PANEL;
      for (int64_t d = 0; d < features_; d++)
        std::memcpy(to + d * PANEL, columns + d * table_->width + n, size_t(some) * 4);
    }
  }

  // scores[m][bucket] = a_m·table[:, bucket], of all buckets; `room` apart, with PANEL numbers free before each.
  void read_table(const float *a, int64_t lda, float *scores, int64_t room) const {
    product_panels<SET>(a, lda, panels_ + whole_ * features_, scores - rest_, room, features_, rest_ + table_->buckets);
  }

  // s (+)= a·tokens; what read_table found of them comes with its scores.
  template <Result result>
  void multiply(const float *a, int64_t lda, const float *scores, int64_t room, float *s, int64_t row) const {
    product_panels<result>(a, lda, panels_, s, row, features_, whole_);
    for (int64_t m = 0; rest_ && m < TILE; m++)
      for (int64_t j = 0; j < rest_; j += LANES) {
        float *at = s + m * row + whole_ + j;
        store(at, load(at) + load(scores + m * room - rest_ + j));
      }
  }

  explicit operator bool() const { return table_; }  // whether there is a table

 private:
  int64_t features_, whole_, rest_;  // tokens in whole panels, and those behind
  const Lookup *table_ = nullptr;
  float *panels_;
};

}  // namespace wf::WF_ISA
