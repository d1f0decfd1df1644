// The logits of a few queries and a block of keys; forward and backward make them alike.
#pragma once
#include <cmath>

#include "fill.h"
#include "panels.h"

namespace wf::WF_ISA {

constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

// One head of one image.
template <class T>
struct Head {
  const T *q, *k, *v;
  Turner turn_q, turn_k;
  int64_t b, h, n;  // n: of all heads of all images

  Head(const WfAttention &a, int64_t b, int64_t h)
      : q(at(a.q, b, h)), k(at(a.k, b, h)), v(at(a.v, b, h)), turn_q(a, a.query_turn, a.queries, b, h),
        turn_k(a, a.key_turn, a.keys, b, h), b(b), h(h), n(b * a.heads + h) {}

  static T *at(const WfTokens &x, int64_t b, int64_t h) { return static_cast<T *>(x.data) + b * x.batch + h * x.head; }
};

inline float dot(const float *a, const float *b, int64_t n) {
  V v{};
  for (int64_t d = 0; d < n; d += LANES) v += load(a + d) * load(b + d);
  return sum(v);
}

// What one thread needs for the logits of TILE queries and a block of keys; backward shares it.
template <class T>
struct Logits {
  const Problem &p;
  const WfAttention &a;
  int64_t row, features;  // floats in a row of logits; of a query
  StretchFinder find;
  Panels panels;        // keys · scale, turned; and the tables that queries read, if one block holds all keys
  Panels plain_keys;    // as they came but for the scale, if keys turn and tables are read by them
  TableColumns tables;  // those of queries that are not beside keys
  Sources from;
  float *plain, *turned;   // queries · log2(e): [TILE][features]
  Left left, left_turned;  // made of them
  float *added;            // what lookups say: [ROWS][row]
  View view;
  Place place[TILE];

  Logits(const Problem &p, Arena &arena)
      : p(p), a(p.a), row(whole(p.most_keys() + larger(p.logits.rows(), p.values.rows()), 2 * LANES) + 3 * LANES),
        features(whole(a.features)), find(p, p.logits, arena),
        panels(p.most_keys(), a.features, p.logits, !a.pairs && p.blocks == 1, arena),
        tables(p.logits, a.features, panels, arena), left(a.features, arena) {
    for (int64_t f = 0; f < p.logits.count; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      if (panels.has(f)) continue;
      from.room[f] = lookup.kind == WF_BY_KEY ? whole(lookup.buckets) : lookup.room();
      const int64_t size = p.logits.is_by_query(f) ? TILE * from.room[f]
                           : p.logits.is_shared(f) ? lookup.lines * lookup.stride() + LANES
                                                   : (whole(p.most_keys(), TILE) + LANES) * from.room[f];
      from.scores[f] = arena.take<float>(size, LANES);
      if (lookup.kind == WF_BY_KEY) from.key_lines[f] = KeyLines(p, arena);
    }
    plain = arena.take<float>(TILE * features), added = arena.take<float>(ROWS * row);
    turned = a.pairs ? arena.take<float>(TILE * features) : plain;
    if (a.pairs) left_turned = Left(a.features, arena);
    if (p.plain_keys_read()) plain_keys = Panels(p.most_keys(), a.features, p.logits, false, arena);
  }

  // Scores that no token changes, laid along their lines; behind them, that of pairs with a prefix token.
  void start_head(const Head<T> &head) {
    tables.read(head.h);
    for (int64_t f = p.logits.by_query; f < p.logits.by_query + p.logits.shared; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      const float *given = p.logits.given[f]->scores + head.h * lookup.head;
      const int64_t places = lookup.lines * lookup.stride();
      for (int64_t t = 0; t < places; t++) from.scores[f][t] = given[lookup.buckets_at[t]] * LOG2E;
      from.scores[f][places] = lookup.prefix < 0 ? 0 : given[lookup.prefix] * LOG2E;
    }
  }

  // `room`: [BUCKETS][row].
  void start_block(const Head<T> &head, const Block &block, float *room) {
    panels.read(head.k, a.k.token, block.first, block.count, &head.turn_k, float(a.scale), head.h);
    if (p.plain_keys_read())
      plain_keys.read(head.k, a.k.token, block.first, block.count, nullptr, float(a.scale), head.h);
    for (int64_t f = p.logits.by_query + p.logits.shared; f < p.logits.count; f++) {
      from.key_lines[f].forget();
      if (p.logits.lookup[f].given)
        read_given(head, f, p.keys, block.first, block.count, from.scores[f]);
      else
        let_keys_read(head, f, block, room);
    }
  }

  // What queries i ... i + count say to all keys of the block, and to tables: s [TILE][row].
  void multiply(const Head<T> &head, int64_t i, int64_t count, const Block &block, float *s) {
    read_queries(head, i, count, block);
    panels.multiply_by(a.pairs ? left_turned : left, s, row);
    panels.show(from, s, row);
    for (int64_t f = 0; f < p.logits.by_query; f++)
      if (!panels.has(f)) read_scores(head, f, i, count, block);
  }

  // Then s, [count][row], becomes logits in base 2: of queries m ... m + count of that tile, i being the first of them.
  void finish(const Head<T> &head, int64_t i, int64_t m, int64_t count, const Block &block, float *s) {
    if (p.logits) add_lookups(p.logits, from, view, place, m, count, block, p.width, s, added, row);
    for (int64_t n = 0; n < count; n++) {
      if (a.allowed || a.added) mask(head, i + n, block, s + n * row);
      store(s + n * row + block.count, all(-INFINITY));
    }
  }

 private:
  void read_queries(const Head<T> &head, int64_t i, int64_t count, const Block &block) {
    read_rows(head.q, a.q.token, i, count, a.features, nullptr, LOG2E, plain);
    std::memset(plain + count * features, 0, size_t((TILE - count) * features) * 4);
    left.read(plain, features, a.features, count);
    if (a.pairs) {
      std::memcpy(turned, plain, size_t(TILE * features) * 4);
      for (int64_t m = 0; m < count; m++) head.turn_q(turned + m * features, i + m);
      left_turned.read(turned, features, a.features, count);
    }
    place[0] = Place(a.queries, i);
    for (int64_t m = 1; m < count; m++) place[m] = place[m - 1].next(a.queries, i + m);
    if (p.logits) view.look(find, place, count, block);
  }

  void read_scores(const Head<T> &head, int64_t f, int64_t i, int64_t count, const Block &block) {
    const Lookup &lookup = p.logits.lookup[f];
    if (lookup.given) return read_given(head, f, p.queries, i, count, from.scores[f]);
    int32_t low, high;
    view.buckets(f, count, &low, &high);
    tables.multiply_table(f, left, low, high, block.prefix || place[0].prefix, from.scores[f], from.room[f]);
  }

  // Tables that keys read are more queries; what these say to keys is turned over: scores [keys][buckets].
  void let_keys_read(const Head<T> &head, int64_t f, const Block &block, float *room) {
    const Lookup &lookup = p.logits.lookup[f];
    const Panels &keys = a.pairs ? plain_keys : panels;
    for (int64_t n = 0; n < lookup.buckets; n += BUCKETS) {
      const int64_t count = smaller(BUCKETS, lookup.buckets - n);
      left.read(lookup.table_row(head.h, n), lookup.row, a.features, count);
      keys.multiply_tokens_by(left, room, row);
      turn_over(room, row, block.count, count, LOG2E / float(a.scale), from.scores[f] + n, from.room[f]);
    }
  }

  void read_given(const Head<T> &head, int64_t f, int64_t tokens, int64_t first, int64_t count, float *scores) const {
    const Lookup &lookup = p.logits.lookup[f];
    const float *given = p.logits.given[f]->scores + (head.n * tokens + first) * lookup.buckets;
    for (int64_t m = 0; m < count; m++)
      read_row(given + m * lookup.buckets, lookup.buckets, LOG2E, scores + m * from.room[f]);
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

// Spreads the prefetches of a block's tokens over queries that are worked on before: x is a head, or null for none. Of
// several, each is asked for at a time of its own, or they would wait for one another.
template <class T, Use use = READ>
class Soon {
 public:
  Soon(const T *x, const WfTokens &of, int64_t features, const Block &block, int64_t queries)
      : x_(x), token_(of.token), features_(features), at_(block.first), end_(x ? block.first + block.count : at_),
        each_((block.count + queries - 1) / queries) {}

  void prefetch(int64_t queries) {
    const int64_t count = smaller(each_ * queries, end_ - at_);
    prefetch_rows<use>(x_, token_, at_, count, features_);
    at_ += count;
  }

 private:
  const T *x_;
  int64_t token_, features_, at_, end_, each_;
};

}  // namespace wf::WF_ISA
