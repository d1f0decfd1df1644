// Attention, forward: a block of keys, then all queries, a few at a time; softmax goes on from block to block.
#pragma once
#include <cmath>

#include "tile.h"

namespace wf::WF_ISA {

constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

// One head of one image.
template <class T>
struct Head {
  const T *q, *k, *v;
  Turner turn_q, turn_k;
  int64_t b, h;

  Head(const WfAttention &a, int64_t b, int64_t h)
      : q(at(a.q, b, h)), k(at(a.k, b, h)), v(at(a.v, b, h)), turn_q(a, a.query_turn, a.queries, b, h),
        turn_k(a, a.key_turn, a.keys, b, h), b(b), h(h) {}

  static T *at(const WfTokens &x, int64_t b, int64_t h) {
    return static_cast<T *>(x.data) + b * x.batch + h * x.head;
  }
};

inline float dot(const float *a, const float *b, int64_t n) {
  V v{};
  for (int64_t d = 0; d < n; d += LANES) v += load(a + d) * load(b + d);
  return sum(v);
}

// scores[m][bucket] = x_m·table[:, bucket], for low <= bucket <= high and, if asked for, the prefix's. x has TILE rows.
inline void read_table(const Lookup &lookup, int64_t head, const float *x, int64_t row, int64_t features, int64_t count,
                       int32_t low, int32_t high, bool with_prefix, float *scores) {
  const int64_t room = lookup.width + LANES;
  if (low <= high)
    product<SET>(x, row, lookup.wide + head * lookup.wide_head + low, lookup.width, scores + low, room, features,
                 high - low + 1);
  if (lookup.prefix < 0 || !with_prefix) return;
  const float *column = lookup.tall + head * lookup.tall_head + lookup.prefix * row;
  for (int64_t m = 0; m < count; m++) scores[m * room + lookup.prefix] = dot(x + m * row, column, row);
}

// What one thread needs for the logits of TILE queries and a block of keys; backward shares it.
template <class T>
struct Logits {
  const Problem &p;
  const WfAttention &a;
  int64_t row, features;  // floats in a row of logits; of a query
  StretchFinder find;
  float *panels, *plain_panels;   // keys · scale, turned and not, transposed
  Sources from;
  float *plain, *turned;          // queries · log2(e): [TILE][features]
  View view;
  Place place[TILE];

  Logits(const Problem &p, Arena &arena)
      : p(p), a(p.a), row(whole(p.most_keys()) + 2 * LANES), features(whole(a.features)), find(p, p.logits, arena) {
    const int64_t room = whole(p.most_keys(), PANEL) * a.features;
    panels = arena.take<float>(room);
    plain_panels = a.pairs && p.logits.count > p.logits.by_query + p.logits.shared ? arena.take<float>(room) : panels;
    for (int64_t f = 0; f < p.logits.count; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      from.scores[f] = arena.take<float>(p.logits.is_by_query(f) ? TILE * (lookup.width + LANES)
                                    : p.logits.is_shared(f) ? lookup.lines * lookup.stride() + LANES
                                                            : whole(lookup.buckets, TILE) * row);
      if (lookup.kind == WF_BY_KEY) from.key_lines[f] = KeyLines(p, arena);
    }
    from.keys = row;
    plain = arena.take<float>(TILE * features);
    turned = a.pairs ? arena.take<float>(TILE * features) : plain;
  }

  // Scores that no token changes, laid along their lines; behind them, that of pairs with a prefix token.
  void start_head(const Head<T> &head) {
    for (int64_t f = p.logits.by_query; f < p.logits.by_query + p.logits.shared; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      const float *given = p.logits.given[f]->scores + head.h * lookup.head;
      const int64_t places = lookup.lines * lookup.stride();
      for (int64_t t = 0; t < places; t++) from.scores[f][t] = given[lookup.buckets_at[t]] * LOG2E;
      from.scores[f][places] = lookup.prefix < 0 ? 0 : given[lookup.prefix] * LOG2E;
    }
  }

  void start_block(const Head<T> &head, const Block &block) {
    read_transposed(head.k, a.k.token, block.first, block.count, a.features, &head.turn_k, float(a.scale), panels);
    if (plain_panels != panels)
      read_transposed(head.k, a.k.token, block.first, block.count, a.features, nullptr, float(a.scale), plain_panels);
    for (int64_t f = p.logits.by_query + p.logits.shared; f < p.logits.count; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      from.key_lines[f].forget();
      if (lookup.given) {
        const float *given = p.logits.given[f]->scores + (head.b * a.heads + head.h) * p.keys * lookup.buckets;
        for (int64_t n = 0; n < lookup.buckets; n++)
          for (int64_t j = 0; j < block.count; j++)
            from.scores[f][n * row + j] = given[(block.first + j) * lookup.buckets + n] * LOG2E;
        continue;
      }
      const float *tall = lookup.tall + head.h * lookup.tall_head;
      for (int64_t n = 0; n < lookup.buckets; n += TILE)
        product_panels<SET>(tall + n * features, features, plain_panels, from.scores[f] + n * row, row, a.features, block.count);
      const float factor = LOG2E / float(a.scale);
      for (int64_t n = 0; n < lookup.buckets; n++)
        for (int64_t j = 0; j < block.count; j += LANES) {
          float *s = from.scores[f] + n * row + j;
          store(s, load(s) * factor);
        }
    }
  }

  // Logits in base 2 of queries i ... i + count and all keys of the block: s [TILE][row].
  void operator()(const Head<T> &head, int64_t i, int64_t count, const Block &block, float *s) {
    read_queries(head, i, count, block);
    for (int64_t f = 0; f < p.logits.by_query; f++) read_scores(head, f, i, count, block);
    if (p.logits) {
      for (int64_t m = 0; m < count; m++) {
        if (place[m].prefix)
          fill_prefix(p.logits, from, m, block.count, s + m * row);
        else
          fill(p.logits, from, m, *view.stretches[m], place[m].x, block, p.width, s + m * row);
      }
      product_panels<ADD>(turned, features, panels, s, row, a.features, block.count);
    } else {
      product_panels<SET>(turned, features, panels, s, row, a.features, block.count);
    }
    if (a.allowed || a.added)
      for (int64_t m = 0; m < count; m++) mask(head, i + m, block, s + m * row);
    for (int64_t m = 0; m < TILE; m++) store(s + m * row + block.count, all(-INFINITY));
  }

 private:
  void read_queries(const Head<T> &head, int64_t i, int64_t count, const Block &block) {
    read_rows(head.q, a.q.token, i, count, a.features, nullptr, LOG2E, plain);
    std::memset(plain + count * features, 0, size_t((TILE - count) * features) * 4);
    if (a.pairs) {
      std::memcpy(turned, plain, size_t(TILE * features) * 4);
      for (int64_t m = 0; m < count; m++) head.turn_q(turned + m * features, i + m);
    }
    for (int64_t m = 0; m < count; m++) place[m] = Place(a.queries, i + m);
    if (p.logits) view.look(find, place, count, block);
  }

  void read_scores(const Head<T> &head, int64_t f, int64_t i, int64_t count, const Block &block) {
    const Lookup &lookup = p.logits.lookup[f];
    const int64_t room = lookup.width + LANES;
    if (lookup.given) {
      const float *given = p.logits.given[f]->scores + ((head.b * a.heads + head.h) * p.queries + i) * lookup.buckets;
      for (int64_t m = 0; m < count; m++) read_row(given + m * lookup.buckets, lookup.buckets, LOG2E, from.scores[f] + m * room);
      return;
    }
    int32_t low, high;
    view.buckets(f, count, &low, &high);
    read_table(lookup, head.h, plain, features, a.features, count, low, high, block.prefix || place[0].prefix, from.scores[f]);
  }

  void mask(const Head<T> &head, int64_t i, const Block &block, float *s) const {
    const auto at = [&](const int64_t *strides) {
      return head.b * strides[0] + head.h * strides[1] + i * strides[2] + block.first * strides[3];
    };
    if (a.added) {
      const float *added = a.added + at(a.added_strides);
      for (int64_t j = 0; j < block.count; j++) s[j] += added[j * a.added_strides[3]] * LOG2E;
    }
    if (a.allowed) {
      const uint8_t *allowed = a.allowed + at(a.allowed_strides);
      for (int64_t j = 0; j < block.count; j++) s[j] = allowed[j * a.allowed_strides[3]] ? s[j] : -INFINITY;
    }
  }
};

// Spreads the prefetches of the next block's keys and values over the queries of this one.
template <class T>
class Soon {
 public:
  Soon(const WfAttention &a, const Head<T> *head, const Block &block, int64_t queries)
      : a_(a), head_(head), at_(block.first), end_(block.first + block.count),
        each_((block.count + queries - 1) / queries) {}

  void prefetch(int64_t queries) {
    const int64_t count = smaller(each_ * queries, end_ - at_);
    if (!head_) return;
    prefetch_rows(head_->k, a_.k.token, at_, count, a_.features);
    prefetch_rows(head_->v, a_.v.token, at_, count, a_.value_features);
    at_ += count;
  }

 private:
  const WfAttention &a_;
  const Head<T> *head_;
  int64_t at_, end_, each_;
};

template <class T>
class Forward {
 public:
  Forward(const Problem &p, Arena &arena) : p_(p), a_(p.a), logits_(p, arena), find_(p, p.values, arena),
        bucket_sums_(p, p.values, arena) {
    features_ = whole(a_.value_features);
    v_ = arena.take<float>(p.most_keys() * features_);
    s_ = arena.take<float>(TILE * logits_.row);
    o_ = arena.take<float>(TILE * features_);
    top_ = arena.take<float>(p.queries), total_ = arena.take<float>(p.queries);
    if (keeps_sums()) sums_ = arena.take<float>(p.queries * features_);
    for (int64_t f = 0; f < p.values.count; f++)
      weights_[f] = arena.take<float>(TILE * (p.values.lookup[f].width + LANES));
  }

  // Queries first ... end of one head; `next` is the head that this thread reads afterwards, or null.
  void operator()(const Head<T> &head, int64_t first, int64_t end, const Head<T> *next) {
    logits_.start_head(head);
    for (int64_t t = 0; t < p_.blocks; t++) {
      const Block block = p_.block(t);
      logits_.start_block(head, block);
      read_rows(head.v, a_.v.token, block.first, block.count, a_.value_features, nullptr, 1, v_);
      const bool last = t == p_.blocks - 1;
      Soon<T> soon(a_, last ? next : &head, p_.block(last ? 0 : t + 1), end - first);
      for (int64_t i = first; i < end; i += TILE) {
        prefetch_rows(head.q, a_.q.token, i + TILE, smaller(TILE, end - i - TILE), a_.features);
        soon.prefetch(smaller(TILE, end - i));
        tile(head, i, smaller(TILE, end - i), block);
      }
    }
  }

 private:
  bool keeps_sums() const { return sizeof(T) < 4 && p_.blocks > 1; }

  void tile(const Head<T> &head, int64_t i, int64_t count, const Block &block) {
    logits_(head, i, count, block, s_);
    T *out = Head<T>::at(a_.out, head.b, head.h) + i * a_.out.token;
    for (int64_t m = 0; m < count; m++) {
      const float kept = softmax(s_ + m * logits_.row, block, i + m);
      float *o = o_ + m * features_;
      if (!block.index) continue;
      if (keeps_sums())
        read_row(sums_ + (i + m) * features_, features_, kept, o);
      else
        read_row(out + m * a_.out.token, a_.value_features, kept, o);
    }
    if (block.index)
      product<ADD>(s_, logits_.row, v_, features_, o_, features_, block.count, features_);
    else
      product<SET>(s_, logits_.row, v_, features_, o_, features_, block.count, features_);
    add_values(head, count, block);
    const bool last = block.index == p_.blocks - 1;
    for (int64_t m = 0; m < count; m++) {
      const float total = total_[i + m], *o = o_ + m * features_;
      if (keeps_sums() && !last)
        write_row<SET>(o, features_, 1, sums_ + (i + m) * features_);
      else
        write_row<SET>(o, a_.value_features, !last ? 1 : total > 0 ? 1 / total : 0, out + m * a_.out.token);
      if (last && a_.lse)
        a_.lse[(head.b * a_.heads + head.h) * p_.queries + i + m] = total > 0 ? top_[i + m] + std::log2(total) : INFINITY;
    }
  }

  // o += Σ_j weight[i, j] table[bucket(i, j)]
  void add_values(const Head<T> &head, int64_t count, const Block &block) {
    if (!p_.values) return;
    view_.look(find_, logits_.place, count, block);
    for (int64_t f = 0; f < p_.values.count; f++) {
      const int64_t room = p_.values.lookup[f].width + LANES;
      int32_t low, high;
      view_.buckets(f, count, &low, &high);
      bucket_sums_(f, view_.stretches, logits_.place, count, block, s_, logits_.row, low, high, true, weights_[f], room);
      add_rows(p_.values.lookup[f], head.h, weights_[f], room, count, low, high, o_, features_);
    }
  }

  // Logits become weights, relative to the largest logit so far; returns what earlier weights are worth now.
  float softmax(float *s, const Block &block, int64_t i) {
    V largest_here = all(-INFINITY);
    for (int64_t j = 0; j < block.count; j += LANES) largest_here = max(largest_here, load(s + j));
    const float before = block.index ? top_[i] : -INFINITY;
    float top = largest(largest_here);
    top = top > before ? top : before;
    const V from = all(top == -INFINITY ? 0 : top);
    V even{}, odd{};
    int64_t j = 0;
    for (; j + LANES < block.count; j += 2 * LANES) {
      const V x = exp2(load(s + j) - from), y = exp2(load(s + j + LANES) - from);
      store(s + j, x), store(s + j + LANES, y);
      even += x, odd += y;
    }
    if (j < block.count) {
      const V x = exp2(load(s + j) - from);
      store(s + j, x);
      even += x;
    }
    const float kept = before == -INFINITY ? 0 : std::exp2(before - top);
    total_[i] = sum(even + odd) + (block.index ? kept * total_[i] : 0);
    top_[i] = top;
    return kept;
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
