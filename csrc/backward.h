// Attention, backward: the weights are made again from the logits, block by block; with g the gradient of out,
//
//   dP_ij = g_i·(v_j + value terms)      dS_ij = P_ij (dP_ij − g_i·out_i)
//   dv_j = Σ_i P_ij g_i     dq_i = scale Σ_j dS_ij k_j     dk_j = scale Σ_i dS_ij q_i
//
// and a table gets, for each bucket, the sum of P or dS over that bucket times what read the table.
#pragma once
#include "forward.h"

namespace wf::WF_ISA {

constexpr int64_t GROUP = 8 * TILE;  // queries whose sums over queries are made at once

// Sums of one thread, [1 or heads] of each table, in the layout of Lookup::tall, or along lines if SHARED.
class TableGrads {
 public:
  TableGrads(const Problem &p, const Group &group, Arena &arena) : group_(group) {
    for (int64_t f = 0; f < group.count; f++) {
      const bool wanted = group.is_shared(f) ? group.given[f]->grad_scores : group.given[f]->grad_table;
      if (!wanted) continue;
      const Lookup &lookup = group.lookup[f];
      size_[f] = lookup.kind == WF_SHARED ? whole(lookup.lines * lookup.stride() + LANES)
                                          : whole(lookup.buckets, TILE) * whole(features(p.a, lookup));
      heads_[f] = lookup.head ? p.a.heads : 1;
      sums_[f] = arena.take<float>(heads_[f] * size_[f]);
    }
  }

  void clear() {
    for (int64_t f = 0; f < group_.count; f++)
      if (sums_[f]) std::memset(sums_[f], 0, size_t(heads_[f] * size_[f]) * 4);
  }

  // Null if not wanted.
  float *operator()(int64_t f, int64_t head) const {
    return sums_[f] ? sums_[f] + (heads_[f] > 1 ? head * size_[f] : 0) : nullptr;
  }

  // The caller's gradient becomes the sum over threads, in their order.
  static void finish(const WfAttention &a, const Group &group, TableGrads *const *threads, int64_t count, int64_t f,
                     float factor) {
    const Lookup &lookup = group.lookup[f];
    const WfLookup &given = *group.given[f];
    for (int64_t h = 0; h < threads[0]->heads_[f]; h++) {
      if (lookup.kind == WF_SHARED) {
        float *grad = given.grad_scores + h * lookup.head;
        std::memset(grad, 0, size_t(lookup.buckets) * 4);
        for (int64_t t = 0; t < count; t++) {
          const float *sums = (*threads[t])(f, h);
          for (int64_t n = 0; n < lookup.lines; n++)
            for (int64_t s = 0; s < lookup.span; s++) grad[*lookup.at(n, s)] += sums[n * lookup.stride() + s];
          if (lookup.prefix >= 0) grad[lookup.prefix] += sums[lookup.lines * lookup.stride()];
        }
        continue;
      }
      const int64_t width = features(a, lookup), row = whole(width);
      const float unit = factor * lookup.scale;
      float *grad = given.grad_table + h * lookup.head;
      for (int64_t n = 0; n < lookup.buckets; n++)
        for (int64_t d = 0; d < width; d++) {
          float sum = 0;
          for (int64_t t = 0; t < count; t++) sum += (*threads[t])(f, h)[n * row + d];
          grad[lookup.kind == WF_VALUES ? n * width + d : d * lookup.buckets + n] = sum * unit;
        }
    }
  }

 private:
  static int64_t features(const WfAttention &a, const Lookup &lookup) {
    return lookup.kind == WF_VALUES ? a.value_features : a.features;
  }

  const Group &group_;
  int64_t size_[MOST_LOOKUPS], heads_[MOST_LOOKUPS];
  float *sums_[MOST_LOOKUPS] = {};
};

// Where gradients of keys and values go: to the caller, or, if a head's queries are cut, to a sum of their own.
struct KeyGrads {
  float *k, *v;  // [keys][whole(features)]; null: the caller's
};

template <class T>
class Backward {
 public:
  static constexpr bool BACKWARD = true;

  Backward(const Problem &p, Arena &arena)
      : logit_tables(p, p.logits, arena), value_tables(p, p.values, arena), p_(p), a_(p.a), logits_(p, arena),
        find_(p, p.values, arena), logit_sums_(p, p.logits, arena), value_sums_(p, p.values, arena) {
    features_ = logits_.features, value_features_ = whole(a_.value_features), row_ = logits_.row;
    const int64_t keys = whole(p.most_keys(), TILE);
    value_panels_ = Panels(p.most_keys(), a_.value_features, p.values, p.blocks == 1 ? p.values.count : 0, arena);
    k_ = arena.take<float>(p.most_keys() * features_);
    plain_k_ = plain_keys_differ() ? arena.take<float>(p.most_keys() * features_) : k_;
    dk_ = arena.take<float>(keys * features_), dv_ = arena.take<float>(keys * value_features_);
    s_ = arena.take<float>(GROUP * row_), ds_ = arena.take<float>(GROUP * row_);
    q_ = arena.take<float>(GROUP * features_), plain_q_ = a_.pairs ? arena.take<float>(GROUP * features_) : q_;
    g_ = arena.take<float>(GROUP * value_features_);
    dq_ = arena.take<float>(TILE * features_);
    dot_ = arena.take<float>(GROUP);
    if (keeps_sums()) sums_ = arena.take<float>(p.queries * features_);
    for (int64_t f = 0; f < p.logits.count; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      weights_[f] = p.logits.is_by_query(f) ? arena.take<float>(GROUP * lookup.room())
                    : p.logits.is_shared(f) ? nullptr
                                            : arena.take<float>(keys * lookup.room());
      if (lookup.kind == WF_BY_KEY) key_line_sums_[f] = KeyLineSums(p, arena);
    }
    for (int64_t f = 0; f < p.values.count; f++) {
      const Lookup &lookup = p.values.lookup[f];
      value_from_.room[f] = value_panels_.has(f) ? value_panels_.room() : lookup.room();
      value_from_.scores[f] =
          value_panels_.has(f) ? value_panels_.scores(f) : arena.take<float>(TILE * lookup.room(), LANES);
      value_weights_[f] = arena.take<float>(GROUP * p.values.lookup[f].room());
    }
  }

  // Queries first ... end of one head; `next` is the head that this thread reads afterwards, or null.
  void operator()(const Head<T> &head, int64_t first, int64_t end, const Head<T> *next, KeyGrads grads) {
    logits_.start_head(head);
    for (int64_t t = 0; t < p_.blocks; t++) {
      const Block block = p_.block(t);
      start_block(head, block);
      const bool last = t == p_.blocks - 1;
      const Head<T> *then = last ? next : &head;
      const Block then_block = p_.block(last ? 0 : t + 1);
      Ahead ahead{{then ? then->k : nullptr, a_.k, a_.features, then_block, end - first},
                  {then ? then->v : nullptr, a_.v, a_.value_features, then_block, end - first},
                  {Head<T>::at(a_.grad_k, head.b, head.h), a_.grad_k, a_.features, block, end - first},
                  {Head<T>::at(a_.grad_v, head.b, head.h), a_.grad_v, a_.value_features, block, end - first},
                  end};
      for (int64_t i = first; i < end; i += GROUP) {
        const int64_t count = smaller(GROUP, end - i);
        read_group(head, i, count);
        for (int64_t m = 0; m < count; m += TILE) {
          tile(head, i, m, smaller(TILE, count - m), block, ahead);
        }
        end_group(head, count, block);
      }
      end_block(head, block, grads);
    }
  }

  TableGrads logit_tables, value_tables;

 private:
  // What is asked for before it is read or written.
  struct Ahead {
    Soon<T> keys, values;
    Soon<T, WRITE> grad_keys, grad_values;
    int64_t queries;  // up to here
  };

  bool plain_keys_differ() const { return a_.pairs && p_.logits.count > p_.logits.by_query + p_.logits.shared; }
  bool keeps_sums() const { return sizeof(T) < 4 && p_.blocks > 1; }

  void start_block(const Head<T> &head, const Block &block) {
    logits_.start_block(head, block);
    value_panels_.read(head.v, a_.v.token, block.first, block.count, nullptr, 1, head.h);
    read_rows(head.k, a_.k.token, block.first, block.count, a_.features, &head.turn_k, float(a_.scale), k_);
    if (plain_k_ != k_)
      read_rows(head.k, a_.k.token, block.first, block.count, a_.features, nullptr, float(a_.scale), plain_k_);
    std::memset(dk_, 0, size_t(whole(block.count, TILE) * features_) * 4);
    std::memset(dv_, 0, size_t(whole(block.count, TILE) * value_features_) * 4);
    for (int64_t f = p_.logits.by_query + p_.logits.shared; f < p_.logits.count; f++) {
      key_line_sums_[f].forget();
      std::memset(weights_[f], 0, size_t(whole(block.count, TILE) * p_.logits.lookup[f].room()) * 4);
    }
  }

  // Sums over queries wait until a group of them is done.
  void end_group(const Head<T> &head, int64_t count, const Block &block) {
    for (int64_t j = 0; j < block.count; j += TILE) {
      product<ADD, COLUMNS>(s_ + j, row_, g_, value_features_, dv_ + j * value_features_, value_features_, count,
                            value_features_);
      product<ADD, COLUMNS>(ds_ + j, row_, q_, features_, dk_ + j * features_, features_, count, features_);
    }
    for (int64_t f = 0; f < p_.logits.by_query; f++)
      add_table(p_.logits.lookup[f], weights_[f], plain_q_, features_, count, logit_tables(f, head.h));
    for (int64_t f = 0; f < p_.values.count; f++)
      add_table(p_.values.lookup[f], value_weights_[f], g_, value_features_, count, value_tables(f, head.h));
  }

  // sums[bucket] += Σ_m weights[m][bucket] rows[m]
  static void add_table(const Lookup &lookup, const float *weights, const float *rows, int64_t features, int64_t count,
                        float *sums) {
    if (!sums) return;
    for (int64_t n = 0; n < lookup.buckets; n += TILE)
      product<ADD, COLUMNS>(weights + n, lookup.room(), rows, features, sums + n * features, features, count, features);
  }

  void read_group(const Head<T> &head, int64_t i, int64_t count) {
    for (int64_t f = 0; f < p_.logits.by_query; f++)
      std::memset(weights_[f], 0, size_t(count * p_.logits.lookup[f].room()) * 4);
    for (int64_t f = 0; f < p_.values.count; f++)
      std::memset(value_weights_[f], 0, size_t(count * p_.values.lookup[f].room()) * 4);
    read_rows(Head<T>::at(a_.grad_out, head.b, head.h), a_.grad_out.token, i, count, a_.value_features, nullptr, 1, g_);
    std::memset(g_ + count * value_features_, 0, size_t((whole(count, TILE) - count) * value_features_) * 4);
    const T *out = Head<T>::at(a_.out, head.b, head.h);
    for (int64_t m = 0; m < count; m++) {
      float *row = dq_;  // free for now
      float sum = 0;
      for (int64_t d = 0; d < a_.value_features; d += features_) {
        const int64_t part = smaller(features_, a_.value_features - d);
        read_row(out + (i + m) * a_.out.token + d, part, 1, row);
        sum += dot(row, g_ + m * value_features_ + d, whole(part));
      }
      dot_[m] = sum;
    }
  }

  // Queries i + m ... i + m + count: their weights, the gradients of their logits, and what needs no other queries.
  void tile(const Head<T> &head, int64_t i, int64_t m, int64_t count, const Block &block, Ahead &ahead) {
    float *s = s_ + m * row_, *ds = ds_ + m * row_;
    const int64_t later = i + m + GROUP, more = smaller(TILE, ahead.queries - later);
    ahead.keys.prefetch(count);
    logits_(head, i + m, count, block, s);
    ahead.values.prefetch(count);
    std::memcpy(q_ + m * features_, logits_.turned, size_t(count * features_) * 4);
    if (plain_q_ != q_) std::memcpy(plain_q_ + m * features_, logits_.plain, size_t(count * features_) * 4);
    grad_weights(head, m, count, block, ds);
    ahead.grad_keys.prefetch(count);
    prefetch_rows(head.q, a_.q.token, later, more, a_.features);
    const float *lse = a_.lse + head.n * p_.queries + i + m;
    for (int64_t n = 0; n < count; n++) {
      const V norm = all(lse[n]), out = all(dot_[m + n]);
      float *p = s + n * row_, *d = ds + n * row_;
      for (int64_t j = 0; j < block.count; j += LANES) {
        const V weight = exp2(load(p + j) - norm);
        store(p + j, weight);
        store(d + j, weight * (load(d + j) - out));
      }
      // A last vector holds zeros behind the end: its logits were −inf. What it has of dP must not turn them into NaN.
      for (int64_t j = block.count; j < whole(block.count); j++) d[j] = 0;
    }
    prefetch_rows<WRITE>(Head<T>::at(a_.grad_q, head.b, head.h), a_.grad_q.token, i + m, count, a_.features);
    Parts parts;
    parts.add(ds, row_, k_, features_, block.count);
    if (a_.pairs) {  // what tables give is not turned back
      parts.multiply<SET>(dq_, features_, features_);
      for (int64_t n = 0; n < count; n++) head.turn_q(dq_ + n * features_, i + m + n, -1);
      parts = Parts();
    }
    ahead.grad_values.prefetch(count);
    prefetch_rows(Head<T>::at(a_.grad_out, head.b, head.h), a_.grad_out.token, later, more, a_.value_features);
    add_logit_terms(head, i, m, count, block, ds, parts);
    if (a_.pairs)
      parts.multiply<ADD>(dq_, features_, features_);
    else
      parts.multiply<SET>(dq_, features_, features_);
    write_queries(head, i + m, count, block);
    prefetch_rows(Head<T>::at(a_.out, head.b, head.h), a_.out.token, later, more, a_.value_features);
    for (int64_t f = 0; f < p_.values.count; f++) {
      int32_t low, high;
      value_view_.buckets(f, count, &low, &high);
      value_sums_(f, value_view_.stretches, logits_.place, count, block, s, row_, low, high, true,
                  value_weights_[f] + m * p_.values.lookup[f].room(), p_.values.lookup[f].room());
    }
  }

  // dP
  void grad_weights(const Head<T> &head, int64_t m, int64_t count, const Block &block, float *ds) {
    const float *g = g_ + m * value_features_;
    if (!p_.values) return value_panels_.template multiply<SET>(g, value_features_, ds, row_);
    value_view_.look(find_, logits_.place, count, block);
    value_panels_.read_tables(g, value_features_);
    for (int64_t f = 0; f < p_.values.count; f++) {
      if (value_panels_.has(f)) continue;
      int32_t low, high;
      value_view_.buckets(f, count, &low, &high);
      read_table(p_.values.lookup[f], head.h, g, value_features_, a_.value_features, count, low, high,
                 block.prefix || logits_.place[0].prefix, value_from_.scores[f], value_from_.room[f]);
    }
    for (int64_t n = 0; n < count; n++) {
      if (logits_.place[n].prefix)
        fill_prefix(p_.values, value_from_, n, block.count, ds + n * row_);
      else
        fill(p_.values, value_from_, n, *value_view_.stretches[n], logits_.place[n].x, block, p_.width, ds + n * row_);
    }
    value_panels_.template multiply<ADD>(g, value_features_, ds, row_);
  }

  // From dS to the lookups of the logits, and to dq through those that q reads.
  void add_logit_terms(const Head<T> &head, int64_t i, int64_t m, int64_t count, const Block &block, const float *ds,
                       Parts &tables) {
    for (int64_t f = 0; f < p_.logits.count; f++) {
      const Lookup &lookup = p_.logits.lookup[f];
      if (p_.logits.is_by_query(f)) {
        float *weights = weights_[f] + m * lookup.room();
        int32_t low, high;
        logits_.view.buckets(f, count, &low, &high);
        // A prefix query's term is the same for all keys: softmax does not see it, its gradient is zero.
        logit_sums_(f, logits_.view.stretches, logits_.place, count, block, ds, row_, low, high, false, weights,
                    lookup.room());
        if (!lookup.given)
          tables.add_table(lookup, head.h, weights, low, high, features_);
        else if (p_.logits.given[f]->grad_scores)
          for (int64_t n = 0; n < count; n++) {
            float *grad = p_.logits.given[f]->grad_scores + (head.n * p_.queries + i + m + n) * lookup.buckets;
            if (block.index)
              write_row<ADD>(weights + n * lookup.room(), lookup.buckets, 1, grad);
            else
              write_row<SET>(weights + n * lookup.room(), lookup.buckets, 1, grad);
          }
        continue;
      }
      for (int64_t n = 0; n < count; n++) {
        const Place &place = logits_.place[n];
        if (!p_.logits.is_shared(f))
          spread_by_key(lookup, f, logits_.view.stretches[n], place, block, ds + n * row_);
        else if (float *sums = logit_tables(f, head.h); sums && !place.prefix)
          spread_shared(lookup, f, *logits_.view.stretches[n], place, block, ds + n * row_, sums);
      }
    }
  }

  void spread_shared(const Lookup &lookup, int64_t f, const Stretches &stretches, const Place &place,
                     const Block &block, const float *ds, float *sums) const {
    for (int64_t j = 0; j < block.prefix; j++) sums[lookup.lines * lookup.stride()] += ds[j];
    ds += block.prefix;
    for (int64_t n = 0; n < stretches.count; n++) {
      const Stretch &stretch = stretches.list[n];
      float *line = sums + stretch.line[f] * lookup.stride() + lookup.slice(place.x);
      for (int32_t y = stretch.row; y < stretch.row + stretch.rows; y++)
        for (int64_t x = 0; x < p_.width; x += LANES)
          store(line + x, load(line + x) + before_lane(int32_t(p_.width - x), load(ds + y * p_.width + x)));
    }
  }

  void spread_by_key(const Lookup &lookup, int64_t f, const Stretches *stretches, const Place &place,
                     const Block &block, const float *ds) {
    const int64_t room = lookup.room(), with_prefix = place.prefix ? block.count : block.prefix;
    for (int64_t j = 0; lookup.prefix >= 0 && j < with_prefix; j++) weights_[f][j * room + lookup.prefix] += ds[j];
    if (!place.prefix)
      key_line_sums_[f](lookup, f, *stretches, place.x, ds + block.prefix, weights_[f] + block.prefix * room, room);
  }

  void write_queries(const Head<T> &head, int64_t i, int64_t count, const Block &block) {
    const bool last = block.index == p_.blocks - 1;
    for (int64_t n = 0; n < count; n++) {
      float *dq = dq_ + n * features_;
      T *grad = Head<T>::at(a_.grad_q, head.b, head.h) + (i + n) * a_.grad_q.token;
      if (!keeps_sums()) {
        block.index ? write_row<ADD>(dq, a_.features, 1, grad) : write_row<SET>(dq, a_.features, 1, grad);
        continue;
      }
      float *sum = sums_ + (i + n) * features_;
      block.index ? write_row<ADD>(dq, features_, 1, sum) : write_row<SET>(dq, features_, 1, sum);
      if (last) write_row<SET>(sum, a_.features, 1, grad);
    }
  }

  void end_block(const Head<T> &head, const Block &block, KeyGrads grads) {
    const float unit = float(a_.scale) * LN2;  // q_ holds q · log2(e)
    for (int64_t j = 0; j < block.count; j++) {
      float *dk = dk_ + j * features_;
      for (int64_t d = 0; d < features_; d += LANES) store(dk + d, load(dk + d) * unit);
      head.turn_k(dk, block.first + j, -1);
    }
    for (int64_t f = p_.logits.by_query + p_.logits.shared; f < p_.logits.count; f++) {
      const Lookup &lookup = p_.logits.lookup[f];
      key_line_sums_[f].flush(lookup, weights_[f] + block.prefix * lookup.room(), lookup.room());
      if (lookup.given) {
        if (!p_.logits.given[f]->grad_scores) continue;
        float *grad = p_.logits.given[f]->grad_scores + (head.n * p_.keys + block.first) * lookup.buckets;
        for (int64_t j = 0; j < block.count; j++)
          write_row<SET>(weights_[f] + j * lookup.room(), lookup.buckets, 1, grad + j * lookup.buckets);
        continue;
      }
      const float *table = lookup.tall + head.h * lookup.tall_head;
      for (int64_t j = 0; j < block.count; j += TILE)
        product<ADD>(weights_[f] + j * lookup.room(), lookup.room(), table, features_, dk_ + j * features_, features_,
                     lookup.buckets, features_);
      add_table(lookup, weights_[f], plain_k_, features_, block.count, logit_tables(f, head.h));
    }
    for (int64_t j = 0; j < block.count; j++) {
      const float *dk = dk_ + j * features_, *dv = dv_ + j * value_features_;
      const int64_t key = block.first + j;
      if (grads.k) {
        write_row<SET>(dk, features_, 1, grads.k + key * features_);
        write_row<SET>(dv, value_features_, 1, grads.v + key * value_features_);
      } else {
        write_row<SET>(dk, a_.features, 1, Head<T>::at(a_.grad_k, head.b, head.h) + key * a_.grad_k.token);
        write_row<SET>(dv, a_.value_features, 1, Head<T>::at(a_.grad_v, head.b, head.h) + key * a_.grad_v.token);
      }
    }
  }

  const Problem &p_;
  const WfAttention &a_;
  Logits<T> logits_;
  StretchFinder find_;
  BucketSums logit_sums_, value_sums_;
  View value_view_;
  int64_t features_, value_features_, row_;
  Panels value_panels_;
  float *k_, *plain_k_, *dk_, *dv_, *s_, *ds_, *q_, *plain_q_, *g_, *dq_, *dot_, *sums_ = nullptr;
  float *weights_[MOST_LOOKUPS];  // by query: [GROUP][room]; by key: [keys of the block][room]
  KeyLineSums key_line_sums_[MOST_LOOKUPS];
  Sources value_from_;
  float *value_weights_[MOST_LOOKUPS];
};

}  // namespace wf::WF_ISA
