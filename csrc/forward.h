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
    v_ = Right(p.most_keys() + p.values.rows(), a_.value_features, arena);
    weights_ = Left(CHUNK, arena);
    s_ = arena.take<float>((p.keys_read() ? larger(TILE, BUCKETS) : TILE) * logits_.row);
    o_ = arena.take<float>(TILE * features_);
    top_ = arena.take<float>(p.queries), total_ = arena.take<float>(p.queries);
    if (keeps_sums()) sums_ = arena.take<float>(p.queries * features_);
  }

  // Queries first ... end of one head; `next` is the head that this thread reads afterwards, or null.
  void operator()(const Head<T> &head, int64_t first, int64_t end, const Head<T> *next) {
    logits_.start_head(head);
    for (int64_t t = 0; t < p_.blocks; t++) {
      const Block block = p_.block(t);
      logits_.start_block(head, block, s_);
      v_.read(block.count + p_.values.rows(), a_.value_features,
              Rows<T>{head.v, a_.v.token, block.first, block.count, a_.value_features, nullptr, 1, &p_.values, head.h});
      const bool last = t == p_.blocks - 1;
      const Head<T> *then = last ? next : &head;
      const Block then_block = p_.block(last ? 0 : t + 1);
      Ahead ahead{{then ? then->k : nullptr, a_.k, a_.features, then_block, end - first},
                  {then ? then->v : nullptr, a_.v, a_.value_features, then_block, end - first},
                  end};
      for (int64_t i = first; i < end; i += TILE) tile(head, i, smaller(TILE, end - i), block, ahead);
    }
  }

 private:
  bool keeps_sums() const { return sizeof(T) < 4 && p_.blocks > 1; }

  // What is asked for before it is read.
  struct Ahead {
    Soon<T> keys, values;
    int64_t queries;  // up to here
  };

  void tile(const Head<T> &head, int64_t i, int64_t count, const Block &block, Ahead &ahead) {
    logits_.multiply(head, i, count, block, s_);
    if (p_.values) view_.look(find_, logits_.place, count, block);
    float kept[TILE];
    for (int64_t m = 0; m < count; m += ROWS) rows(head, i, m, smaller(ROWS, count - m), block, kept + m, ahead);
    T *out = Head<T>::at(a_.out, head.b, head.h) + i * a_.out.token;
    for (int64_t m = 0; block.index && m < count; m++) {
      float *o = o_ + m * features_;
      if (keeps_sums())
        read_row(sums_ + (i + m) * features_, features_, kept[m], o);
      else
        read_row(out + m * a_.out.token, a_.value_features, kept[m], o);
    }
    const int64_t depth = block.count + p_.values.rows();
    if (block.index)
      multiply_rows<ADD>(s_, logits_.row, depth, count, weights_, v_, features_, o_, features_);
    else
      multiply_rows<SET>(s_, logits_.row, depth, count, weights_, v_, features_, o_, features_);
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

  // Of queries m ... m + count of the tile that begins with i, while their rows are near.
  void rows(const Head<T> &head, int64_t i, int64_t m, int64_t count, const Block &block, float *kept, Ahead &ahead) {
    float *s = s_ + m * logits_.row;
    const int64_t later = i + m + TILE;
    ahead.keys.prefetch(count);
    logits_.finish(head, i + m, m, count, block, s);
    softmax(i + m, count, block, s, kept);
    ahead.values.prefetch(count);
    prefetch_rows<WRITE>(Head<T>::at(a_.out, head.b, head.h), a_.out.token, i + m, count, a_.value_features);
    if (p_.values) bucket_sums_.behind_keys(view_.stretches + m, logits_.place + m, count, block, s, logits_.row, true);
    prefetch_rows(head.q, a_.q.token, later, smaller(count, ahead.queries - later), a_.features);
  }

  // Logits become weights, relative to the largest logit so far; kept: what earlier weights are worth now.
  void softmax(int64_t i, int64_t count, const Block &block, float *s, float *kept) {
    const int64_t row = logits_.row;
    V largest_here[ROWS];
    for (V &v : largest_here) v = all(-INFINITY);
    for (int64_t j = 0; j < block.count; j += LANES)
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++) largest_here[m] = max(largest_here[m], load(s + m * row + j));
    V from[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
      const float before = block.index && m < count ? top_[i + m] : -INFINITY, here = largest(largest_here[m]);
      const float top = here > before ? here : before;
      from[m] = all(top == -INFINITY ? 0 : top);
      if (m < count) top_[i + m] = top, kept[m] = before == -INFINITY ? 0 : std::exp2(before - top);
    }
    for (int half = 0; half < ROWS; half += ROWS / 2) {
      V sums[ROWS / 2] = {};
      for (int64_t j = 0; j < block.count; j += LANES)
#pragma GCC unroll 4
        for (int m = 0; m < ROWS / 2; m++) {
          float *at = s + (half + m) * row + j;
          const V x = exp2(load(at) - from[half + m]);
          store(at, x);
          sums[m] += x;
        }
      for (int64_t m = half; m < smaller(count, half + ROWS / 2); m++)
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
  Right v_;       // and the tables of values
  Left weights_;  // of keys, and of buckets
  float *s_, *o_, *top_, *total_, *sums_ = nullptr;
};

}  // namespace wf::WF_ISA
