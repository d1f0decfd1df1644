// Attention, forward: a block of keys, then all queries, a few at a time; softmax goes on from block to block.
#pragma once
#include "logits.h"
#include "sums.h"

namespace wf::WF_ISA {

template <class T>
class Forward {
 public:
  static constexpr bool BACKWARD = false;

  Forward(const Problem &p, Arena &arena)
      : p_(p), a_(p.a), logits_(p, arena), find_(p, p.values, arena), bucket_sums_(p, p.values, arena) {
    features_ = whole(a_.value_features);
    v_ = arena.take<float>(p.most_keys() * features_);
    s_ = arena.take<float>(TILE * logits_.row);
    o_ = arena.take<float>(TILE * features_);
    top_ = arena.take<float>(p.queries), total_ = arena.take<float>(p.queries);
    if (keeps_sums()) sums_ = arena.take<float>(p.queries * features_);
    for (int64_t f = 0; f < p.values.count; f++) weights_[f] = arena.take<float>(TILE * p.values.lookup[f].room());
  }

  // Queries first ... end of one head; `next` is the head that this thread reads afterwards, or null.
  void operator()(const Head<T> &head, int64_t first, int64_t end, const Head<T> *next) {
    logits_.start_head(head);
    for (int64_t t = 0; t < p_.blocks; t++) {
      const Block block = p_.block(t);
      logits_.start_block(head, block);
      read_rows(head.v, a_.v.token, block.first, block.count, a_.value_features, nullptr, 1, v_);
      const bool last = t == p_.blocks - 1;
      const Head<T> *then = last ? next : &head;
      const Block then_block = p_.block(last ? 0 : t + 1);
      Soon<T> keys(then ? then->k : nullptr, a_.k, a_.features, then_block, end - first);
      Soon<T> values(then ? then->v : nullptr, a_.v, a_.value_features, then_block, end - first);
      for (int64_t i = first; i < end; i += TILE) {
        prefetch_rows(head.q, a_.q.token, i + TILE, smaller(TILE, end - i - TILE), a_.features);
        tile(head, i, smaller(TILE, end - i), block, keys, values);
      }
    }
  }

 private:
  bool keeps_sums() const { return sizeof(T) < 4 && p_.blocks > 1; }

  void tile(const Head<T> &head, int64_t i, int64_t count, const Block &block, Soon<T> &keys, Soon<T> &values) {
    keys.prefetch(count);
    logits_(head, i, count, block, s_);
    T *out = Head<T>::at(a_.out, head.b, head.h) + i * a_.out.token;
    prefetch_rows<WRITE>(out, a_.out.token, 0, count, a_.value_features);
    float kept[TILE];
    softmax(i, count, block, kept);
    values.prefetch(count);
    for (int64_t m = 0; block.index && m < count; m++) {
      float *o = o_ + m * features_;
      if (keeps_sums())
        read_row(sums_ + (i + m) * features_, features_, kept[m], o);
      else
        read_row(out + m * a_.out.token, a_.value_features, kept[m], o);
    }
    Parts parts;
    parts.add(s_, logits_.row, v_, features_, block.count);
    add_values(head, count, block, parts);
    if (block.index)
      parts.multiply<ADD>(o_, features_, features_);
    else
      parts.multiply<SET>(o_, features_, features_);
    const bool last = block.index == p_.blocks - 1;
    for (int64_t m = 0; m < count; m++) {
      const float total = total_[i + m], *o = o_ + m * features_;
      if (keeps_sums() && !last)
        write_row<SET>(o, features_, 1, sums_ + (i + m) * features_);
      else
        write_row<SET>(o, a_.value_features, !last ? 1 : total == 0 ? 0 : 1 / total, out + m * a_.out.token);
      if (last && a_.lse) a_.lse[head.n * p_.queries + i + m] = total == 0 ? INFINITY : top_[i + m] + std::log2(total);
    }
  }

  // Σ_j weight[i, j] table[bucket(i, j)]
  void add_values(const Head<T> &head, int64_t count, const Block &block, Parts &parts) {
    if (!p_.values) return;
    view_.look(find_, logits_.place, count, block);
    for (int64_t f = 0; f < p_.values.count; f++) {
      const int64_t room = p_.values.lookup[f].room();
      int32_t low, high;
      view_.buckets(f, count, &low, &high);
      bucket_sums_(f, view_.stretches, logits_.place, count, block, s_, logits_.row, low, high, true, weights_[f],
                   room);
      parts.add_table(p_.values.lookup[f], head.h, weights_[f], low, high, features_);
    }
  }

  // Logits become weights, relative to the largest logit so far; kept: what earlier weights are worth now.
  void softmax(int64_t i, int64_t count, const Block &block, float *kept) {
    const int64_t row = logits_.row;
    V largest_here[TILE];
    for (V &v : largest_here) v = all(-INFINITY);
    for (int64_t j = 0; j < block.count; j += LANES)
#pragma GCC unroll 6
      for (int m = 0; m < TILE; m++) largest_here[m] = max(largest_here[m], load(s_ + m * row + j));
    V from[TILE];
#pragma GCC unroll 6
    for (int m = 0; m < TILE; m++) {
      const float before = block.index && m < count ? top_[i + m] : -INFINITY, here = largest(largest_here[m]);
      const float top = here > before ? here : before;
      from[m] = all(top == -INFINITY ? 0 : top);
      kept[m] = before == -INFINITY ? 0 : std::exp2(before - top);
      if (m < count) top_[i + m] = top;
    }
    for (int half = 0; half < TILE; half += TILE / 2) {
      V sums[TILE / 2] = {};
      for (int64_t j = 0; j < block.count; j += LANES)
#pragma GCC unroll 3
        for (int m = 0; m < TILE / 2; m++) {
          float *at = s_ + (half + m) * row + j;
          const V x = exp2(load(at) - from[half + m]);
          store(at, x);
          sums[m] += x;
        }
      for (int64_t m = half; m < smaller(count, half + TILE / 2); m++)
        total_[i + m] = sum(sums[m - half]) + (block.index ? kept[m] * total_[i + m] : 0);
    }
  }

  const Problem &p_;
  const WfAttention &a_;
  Logits<T> logits_;
  StretchFinder find_;
  BucketSums bucket_sums_;
  View view_;
  int64_t features_;
  float *v_, *s_, *o_, *top_, *total_, *sums_ = nullptr;
  float *weights_[MOST_LOOKUPS];
};

}  // namespace wf::WF_ISA
