// Attention, backward: the weights are made again from the logits, block by block; with g the gradient of out,
//
//   dP_ij = g_i·(v_j + value terms)      dS_ij = P_ij (dP_ij − g_i·out_i)
//   dv_j = Σ_i P_ij g_i     dq_i = scale Σ_j dS_ij k_j     dk_j = scale Σ_i dS_ij q_i
//
// and a table gets, for each bucket, the sum of P or dS over that bucket times what read the table.
#pragma once
#include "forward.h"

namespace wf::WF_ISA {

// Sums of one thread, [1 or heads] of each table, in the layout of Lookup::table, or along lines if SHARED.
class TableGrads {
 public:
  TableGrads(const Problem &p, const Group &group, Arena &arena) : group_(group) {
    for (int64_t f = 0; f < group.count; f++) {
      const bool wanted = group.is_shared(f) ? group.given[f]->grad_scores : group.given[f]->grad_table;
      if (!wanted) continue;
      const Lookup &lookup = group.lookup[f];
      size_[f] = lookup.kind == WF_SHARED ? whole(lookup.lines * lookup.stride() + LANES)
                                          : lookup.buckets * whole(features(p.a, lookup));
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

  // Adds rows [count, whole(features)] of lookup f, from bucket `first` on.
  void add(int64_t f, int64_t head, int64_t first, int64_t count, const float *rows) const {
    float *sums = (*this)(f, head);
    if (!sums) return;
    const int64_t row = group_.lookup[f].row;
    for (int64_t n = 0; n < count * row; n += LANES) {
      float *at = sums + first * row + n;
      store(at, load(at) + load(rows + n));
    }
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
          grad[lookup.by_bucket ? n * width + d : d * lookup.buckets + n] = sum * unit;
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

// The gradient of one lookup by key: dS summed over its buckets, for each key.
class ByKey {
 public:
  ByKey() = default;
  ByKey(const Problem &p, const Lookup &lookup, Arena &arena) : room_(lookup.room()), lines_(p, lookup, arena) {
    weights_ = arena.take<float>(whole(p.most_keys(), LANES) * room_);
  }

  void start_block(int64_t keys) {
    lines_.forget();
    std::memset(weights_, 0, size_t(whole(keys) * room_) * 4);
  }

  // What one query gives.
  void add(const Lookup &lookup, int64_t f, const Stretches *stretches, const Place &place, const Block &block,
           const float *ds) {
    const int64_t with_prefix = place.prefix ? block.count : block.prefix;
    for (int64_t j = 0; lookup.prefix >= 0 && j < with_prefix; j++) weights_[j * room_ + lookup.prefix] += ds[j];
    if (!place.prefix)
      lines_(lookup, f, *stretches, place.x, ds + block.prefix, weights_ + block.prefix * room_, room_);
  }

  void end_block(const Lookup &lookup, const Block &block) {
    lines_.flush(lookup, weights_ + block.prefix * room_, room_);
  }

  const float *weights() const { return weights_; }  // [keys][room]
  int64_t room() const { return room_; }

 private:
  int64_t room_ = 0;
  KeyLineSums lines_;
  float *weights_ = nullptr;
};

template <class T>
class Backward {
 public:
  static constexpr bool BACKWARD = true;

  Backward(const Problem &p, Arena &arena)
      : logit_tables(p, p.logits, arena), value_tables(p, p.values, arena), p_(p), a_(p.a), logits_(p, arena),
        find_(p, p.values, arena), logit_sums_(p, p.logits, arena), value_sums_(p, p.values, arena) {
    features_ = logits_.features, value_features_ = whole(a_.value_features), row_ = logits_.row;
    beside_ = a_.pairs ? 0 : p.logits.rows(), apart_ = a_.pairs ? p.logits.rows() : 0;
    const int64_t keys = p.most_keys();
    value_panels_ = Panels(keys, a_.value_features, p.values, p.blocks == 1, arena);
    value_tables_ = TableColumns(p.values, a_.value_features, value_panels_, arena);
    weights_ = Left(CHUNK, arena), g_left_ = Left(a_.value_features, arena);
    k_ = Right(keys + beside_, a_.features, arena);
    dk_ = Sums(keys + beside_, a_.features, arena);
    dv_ = Sums(keys + p.values.rows(), a_.value_features, arena);
    if (apart_) tables_ = Right(apart_, a_.features, arena), table_sums_ = Sums(apart_, a_.features, arena);
    if (p.keys_read()) rows_ = arena.take<float>(BUCKETS * features_);
    if (p.plain_keys_read()) plain_k_ = Right(keys, a_.features, arena), plain_dk_ = Sums(keys, a_.features, arena);
    s_ = arena.take<float>(GROUP * row_), ds_ = arena.take<float>(GROUP * row_);
    q_ = arena.take<float>(GROUP * features_), plain_q_ = a_.pairs ? arena.take<float>(GROUP * features_) : q_;
    g_ = arena.take<float>(GROUP * value_features_);
    dq_ = arena.take<float>(TILE * features_);
    dot_ = arena.take<float>(GROUP);
    if (keeps_sums()) sums_ = arena.take<float>(p.queries * features_);
    for (int64_t f = 0; f < p.logits.count; f++) {
      const Lookup &lookup = p.logits.lookup[f];
      if (lookup.given && p.logits.is_by_query(f)) given_sums_[f] = arena.take<float>(TILE * lookup.room());
      if (lookup.kind == WF_BY_KEY) by_key_[f] = ByKey(p, lookup, arena);
    }
    for (int64_t f = 0; f < p.values.count; f++) {
      const Lookup &lookup = p.values.lookup[f];
      if (value_panels_.has(f)) continue;
      value_from_.room[f] = lookup.room(), value_from_.scores[f] = arena.take<float>(TILE * lookup.room(), LANES);
    }
  }

  // Queries first ... end of one head; `next` is the head that this thread reads afterwards, or null.
  void operator()(const Head<T> &head, int64_t first, int64_t end, const Head<T> *next, KeyGrads grads) {
    logits_.start_head(head);
    value_tables_.read(head.h);
    if (apart_) {
      tables_.read(apart_, a_.features, [&](int64_t n, float *) { return p_.logits.row(n, head.h); });
      table_sums_.clear(apart_);
    }
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
        end_group(count, block);
      }
      end_block(head, block, grads);
    }
    if (apart_) add_table_sums(p_.logits, head, table_sums_.finish(), logit_tables);
  }

  TableGrads logit_tables, value_tables;

 private:
  // What is asked for before it is read or written.
  struct Ahead {
    Soon<T> keys, values;
    Soon<T, WRITE> grad_keys, grad_values;
    int64_t queries;  // up to here
  };

  bool keeps_sums() const { return sizeof(T) < 4 && p_.blocks > 1; }

  // Rows of keys, or of keys and tables.
  int64_t rows_of_keys(const Block &block) const { return block.count + beside_; }

  void start_block(const Head<T> &head, const Block &block) {
    logits_.start_block(head, block, s_);
    value_panels_.read(head.v, a_.v.token, block.first, block.count, nullptr, 1, head.h);
    k_.read(rows_of_keys(block), a_.features,
            Rows<T>{head.k, a_.k.token, block.first, block.count, a_.features, &head.turn_k, float(a_.scale),
                    &p_.logits, head.h});
    if (p_.plain_keys_read()) {
      plain_k_.read(block.count, a_.features,
                    Rows<T>{head.k, a_.k.token, block.first, block.count, a_.features, nullptr, float(a_.scale),
                            &p_.logits, head.h});
      plain_dk_.clear(block.count);
    }
    dk_.clear(rows_of_keys(block)), dv_.clear(block.count + p_.values.rows());
    for (int64_t f = p_.logits.by_query + p_.logits.shared; f < p_.logits.count; f++)
      by_key_[f].start_block(block.count);
  }

  // Sums over queries wait until a group of them is done.
  void end_group(int64_t count, const Block &block) {
    dv_.add(s_, row_, g_, count, block.count + p_.values.rows());
    dk_.add(ds_, row_, q_, count, rows_of_keys(block));
    if (apart_) table_sums_.add(ds_ + block.count, row_, plain_q_, count, apart_);
  }

  static void add_table_sums(const Group &group, const Head<T> &head, const float *rows, const TableGrads &sums) {
    for (int64_t f = 0; f < group.count; f++)
      if (group.has_rows(f))
        sums.add(f, head.h, 0, group.lookup[f].buckets, rows + group.first_row(f) * group.lookup[f].row);
  }

  void read_group(const Head<T> &head, int64_t i, int64_t count) {
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
    logits_.multiply(head, i + m, count, block, s);
    std::memcpy(q_ + m * features_, logits_.turned, size_t(count * features_) * 4);
    if (plain_q_ != q_) std::memcpy(plain_q_ + m * features_, logits_.plain, size_t(count * features_) * 4);
    grad_weights(m, count, block, ds);
    for (int64_t n = 0; n < count; n += ROWS) rows(head, i, m, n, smaller(ROWS, count - n), block, ahead);
    multiply_rows<SET>(ds, row_, rows_of_keys(block), count, weights_, k_, features_, dq_, features_);
    for (int64_t n = 0; n < count; n++) head.turn_q(dq_ + n * features_, i + m + n, -1);
    if (apart_)  // what these tables give is not turned back
      multiply_rows<ADD>(ds + block.count, row_, apart_, count, weights_, tables_, features_, dq_, features_);
    write_queries(head, i + m, count, block);
  }

  // Of queries n ... n + count of that tile, while their rows are near.
  void rows(const Head<T> &head, int64_t i, int64_t m, int64_t n, int64_t count, const Block &block, Ahead &ahead) {
    float *s = s_ + (m + n) * row_, *ds = ds_ + (m + n) * row_;
    const int64_t here = i + m + n, later = here + GROUP, more = smaller(count, ahead.queries - later);
    ahead.keys.prefetch(count);
    prefetch_rows(head.q, a_.q.token, later, more, a_.features);
    logits_.finish(head, here, n, count, block, s);
    if (p_.values)
      add_lookups(p_.values, value_from_, value_view_, logits_.place, n, count, block, p_.width, ds, logits_.added,
                  row_);
    weigh(head, here, count, block, dot_ + m + n, s, ds);
    ahead.values.prefetch(count);
    prefetch_rows<WRITE>(Head<T>::at(a_.grad_q, head.b, head.h), a_.grad_q.token, here, count, a_.features);
    ahead.grad_keys.prefetch(count);
    add_logit_terms(head, here, n, count, block, ds);
    prefetch_rows(Head<T>::at(a_.grad_out, head.b, head.h), a_.grad_out.token, later, more, a_.value_features);
    ahead.grad_values.prefetch(count);
    if (p_.values) value_sums_.behind_keys(value_view_.stretches + n, logits_.place + n, count, block, s, row_, true);
    prefetch_rows(Head<T>::at(a_.out, head.b, head.h), a_.out.token, later, more, a_.value_features);
  }

  // s, logits, becomes P; ds, dP, becomes dS.
  void weigh(const Head<T> &head, int64_t i, int64_t count, const Block &block, const float *dot, float *s, float *ds) {
    const float *lse = a_.lse + head.n * p_.queries + i;
    for (int64_t n = 0; n < count; n++, s += row_, ds += row_) {
      const V norm = all(lse[n]), out = all(dot[n]);
      for (int64_t j = 0; j < block.count; j += LANES) {
        const V weight = exp2(load(s + j) - norm);
        store(s + j, weight);
        store(ds + j, weight * (load(ds + j) - out));
      }
      // A last vector holds zeros behind the end: its logits were −inf. What it has of dP must not turn them into NaN.
      for (int64_t j = block.count; j < whole(block.count); j++) ds[j] = 0;
    }
  }

  // dP
  void grad_weights(int64_t m, int64_t count, const Block &block, float *ds) {
    g_left_.read(g_ + m * value_features_, value_features_, a_.value_features, count);
    value_panels_.multiply_by(g_left_, ds, row_);
    value_panels_.show(value_from_, ds, row_);
    if (p_.values) value_view_.look(find_, logits_.place, count, block);
    for (int64_t f = 0; f < p_.values.count; f++) {
      if (value_panels_.has(f)) continue;
      int32_t low, high;
      value_view_.buckets(f, count, &low, &high);
      value_tables_.multiply_table(f, g_left_, low, high, block.prefix || logits_.place[0].prefix,
                                   value_from_.scores[f], value_from_.room[f]);
    }
  }

  // From dS of queries i ... i + count, those of the tile from n on, to the lookups of the logits.
  void add_logit_terms(const Head<T> &head, int64_t i, int64_t n, int64_t count, const Block &block, float *ds) {
    const Stretches *const *stretches = logits_.view.stretches + n;
    const Place *place = logits_.place + n;
    // A prefix query's term is the same for all keys: softmax does not see it, its gradient is zero.
    logit_sums_.behind_keys(stretches, place, count, block, ds, row_, false);
    for (int64_t f = 0; f < p_.logits.count; f++) {
      const Lookup &lookup = p_.logits.lookup[f];
      if (p_.logits.has_rows(f)) continue;
      if (p_.logits.is_by_query(f)) {
        if (!p_.logits.given[f]->grad_scores) continue;
        logit_sums_(f, stretches, place, count, block, ds, row_, false, given_sums_[f], lookup.room());
        write_given(f, head, i, count, block);
        continue;
      }
      for (int64_t m = 0; m < count; m++) {
        if (!p_.logits.is_shared(f))
          by_key_[f].add(lookup, f, stretches[m], place[m], block, ds + m * row_);
        else if (float *sums = logit_tables(f, head.h); sums && !place[m].prefix)
          spread_shared(lookup, f, *stretches[m], place[m], block, ds + m * row_, sums);
      }
    }
  }

  void write_given(int64_t f, const Head<T> &head, int64_t i, int64_t count, const Block &block) const {
    const Lookup &lookup = p_.logits.lookup[f];
    const float *sums = given_sums_[f];
    float *grad = p_.logits.given[f]->grad_scores + (head.n * p_.queries + i) * lookup.buckets;
    for (int64_t n = 0; n < count; n++, sums += lookup.room(), grad += lookup.buckets) {
      if (block.index)
        write_row<ADD>(sums, lookup.buckets, 1, grad);
      else
        write_row<SET>(sums, lookup.buckets, 1, grad);
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
    for (int64_t f = p_.logits.by_query + p_.logits.shared; f < p_.logits.count; f++) end_lookup(head, f, block);
    const float unit = float(a_.scale) * LN2;  // q_ holds q · log2(e)
    float *dks = dk_.finish();
    const float *dvs = dv_.finish(), *plain = p_.plain_keys_read() ? plain_dk_.finish() : nullptr;
    if (beside_) add_table_sums(p_.logits, head, dks + block.count * features_, logit_tables);
    add_table_sums(p_.values, head, dvs + block.count * value_features_, value_tables);
    for (int64_t j = 0; j < block.count; j++) {
      float *dk = dks + j * features_;
      head.turn_k(dk, block.first + j, -1);
      for (int64_t d = 0; d < features_; d += LANES)
        store(dk + d, (plain ? load(dk + d) + load(plain + j * features_ + d) : load(dk + d)) * unit);
      const float *dv = dvs + j * value_features_;
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

  // Of a lookup by key. Its table is more queries, dS of these being the sums over its buckets.
  void end_lookup(const Head<T> &head, int64_t f, const Block &block) {
    const Lookup &lookup = p_.logits.lookup[f];
    ByKey &by_key = by_key_[f];
    by_key.end_block(lookup, block);
    if (lookup.given) {
      if (float *grad = p_.logits.given[f]->grad_scores)
        for (int64_t j = 0; j < block.count; j++)
          write_row<SET>(by_key.weights() + j * by_key.room(), lookup.buckets, 1,
                         grad + (head.n * p_.keys + block.first + j) * lookup.buckets);
      return;
    }
    float *sums = ds_;  // free for now: [BUCKETS][row]
    for (int64_t n = 0; n < lookup.buckets; n += BUCKETS) {
      const int64_t count = smaller(BUCKETS, lookup.buckets - n);
      turn_over(by_key.weights() + n, by_key.room(), count, block.count, 1, sums, row_);
      for (int64_t m = 0; m < count; m++) store(sums + m * row_ + whole(block.count), V{});  // a tile may read on
      multiply_rows<SET>(sums, row_, block.count, count, weights_, a_.pairs ? plain_k_ : k_, features_, rows_,
                         features_);
      logit_tables.add(f, head.h, n, count, rows_);
      const float factor = 1 / (float(a_.scale) * LN2);  // as of q_
      for (int64_t d = 0; d < count * features_; d += LANES)
        store(rows_ + d, load(lookup.table_row(head.h, n) + d) * factor);
      (a_.pairs ? plain_dk_ : dk_).add(sums, row_, rows_, count, block.count);
    }
  }

  const Problem &p_;
  const WfAttention &a_;
  Logits<T> logits_;
  StretchFinder find_;
  BucketSums logit_sums_, value_sums_;
  View value_view_;
  int64_t features_, value_features_, row_;
  int64_t beside_, apart_;  // rows of tables that queries read, beside keys, or apart from those that turn
  Panels value_panels_;
  TableColumns value_tables_;
  Left weights_, g_left_;
  Right k_, plain_k_, tables_;  // k_: and the tables beside keys
  Sums dk_, plain_dk_, dv_, table_sums_;
  float *rows_;  // [BUCKETS] of a table that keys read
  float *s_, *ds_, *q_, *plain_q_, *g_, *dq_, *dot_, *sums_ = nullptr;
  float *given_sums_[MOST_LOOKUPS];
  ByKey by_key_[MOST_LOOKUPS];
  Sources value_from_;
};

}  // namespace wf::WF_ISA
