// The kernel for one instruction set: this file is compiled once for each, WF_ISA being its name.
#include "backward.h"
#include "forward.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace wf::WF_ISA {

constexpr int64_t MOST_BACKWARD_PIECES = 4;  // each has gradients of its own of all keys and values
constexpr int64_t BACKWARD_BLOCK = 640;  // keys that fit the second cache with what goes with them; see FORWARD_BLOCK

inline int64_t thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int64_t team_size() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

// A problem made ready, and scratch for the work of each thread: both are counted first, then made.
template <class Work>
class SetUp {
 public:
  SetUp(const WfAttention &a, int64_t most)
      : shared_(count(a, most), 1), arena_(shared_.start()), p(a, most, Work::BACKWARD, arena_, false), each_(count(p)),
        scratch_(a.threads * each_, a.threads) {}

  Work work(int64_t thread) const {
    Arena mine(scratch_.start() + thread * each_);
    return Work(p, mine);
  }

 private:
  static int64_t count(const WfAttention &a, int64_t most) {
    Arena room;
    Problem(a, most, Work::BACKWARD, room, true);
    return room.used();
  }
  static int64_t count(const Problem &p) {
    Arena room;
    Work(p, room);
    return whole(room.used(), 4096);
  }

  Memory shared_;
  Arena arena_;

 public:
  const Problem p;

 private:
  int64_t each_;
  Memory scratch_;
};

// The pieces of all heads, in order: into how many the queries of one are cut, so that all threads have as much to do,
// if `most` are enough.
struct Units {
  const WfAttention &a;
  int64_t queries, heads, cuts = 1;

  Units(const WfAttention &attention, int64_t tokens, int64_t most)
      : a(attention), queries(tokens), heads(a.batch * a.heads) {
    while (heads * cuts % a.threads && heads * cuts < 4 * a.threads && cuts < most) cuts++;
    cuts = smaller(cuts, (queries + GROUP - 1) / GROUP);
  }

  int64_t count() const { return heads * cuts; }

  // Has `work` do unit u, knowing which head comes then.
  template <class T, class Work, class... Others>
  void run(Work &work, int64_t u, Others... others) const {
    const int64_t n = u / cuts, cut = u % cuts, then = smaller(u + 1, count() - 1) / cuts;
    const Head<T> head(a, n / a.heads, n % a.heads), next(a, then / a.heads, then % a.heads);
    work(head, queries * cut / cuts, queries * (cut + 1) / cuts, then == n ? nullptr : &next, others...);
  }
};

template <class T>
void forward_of(const WfAttention &a) {
  const SetUp<Forward<T>> set_up(a, FORWARD_BLOCK);
  const Units units(a, set_up.p.queries, a.threads);
#pragma omp parallel num_threads(int(a.threads))
  {
    const Products ready;
    Forward<T> work = set_up.work(thread_number());
#pragma omp for schedule(static) nowait
    for (int64_t u = 0; u < units.count(); u++) units.run<T>(work, u);
  }
}

// Sums over the pieces of a head's queries, in their order.
template <class T>
void add_pieces(const WfAttention &a, const WfTokens &grad, int64_t unit, int64_t tokens, int64_t features,
                float *pieces, int64_t piece, int64_t count) {
  T *out = Head<T>::at(grad, unit / a.heads, unit % a.heads);
  const int64_t row = whole(features);
  float *sum = pieces;  // the first, for a start
  for (int64_t n = 1; n < count; n++)
    for (int64_t d = 0; d < tokens * row; d += LANES) store(sum + d, load(sum + d) + load(pieces + n * piece + d));
  for (int64_t j = 0; j < tokens; j++) write_row<SET>(sum + j * row, features, 1, out + j * grad.token);
}

template <class T>
void backward_of(const WfAttention &a) {
  const SetUp<Backward<T>> set_up(a, BACKWARD_BLOCK);
  const Problem &p = set_up.p;
  bool given_by_key = false;
  for (int64_t f = 0; f < p.logits.count; f++)
    given_by_key |= p.logits.lookup[f].kind == WF_BY_KEY && p.logits.lookup[f].given;
  const Units units(a, p.queries, given_by_key ? 1 : MOST_BACKWARD_PIECES);
  const int64_t cuts = units.cuts;
  const int64_t k_size = p.keys * whole(a.features), v_size = p.keys * whole(a.value_features);
  Memory cut_memory(cuts > 1 ? units.count() * (k_size + v_size) * 4 + CACHE_LINE : 0, a.threads);
  float *k_pieces = reinterpret_cast<float *>(cut_memory.start()), *v_pieces = k_pieces + units.count() * k_size;
  Memory table_memory(a.threads * int64_t(2 * sizeof(TableGrads *)), 1);
  auto **logit_tables = reinterpret_cast<TableGrads **>(table_memory.start());
  auto **value_tables = logit_tables + a.threads;
#pragma omp parallel num_threads(int(a.threads))
  {
    const Products ready;
    const int64_t thread = thread_number(), threads = team_size();
    Backward<T> work = set_up.work(thread);
    logit_tables[thread] = &work.logit_tables, value_tables[thread] = &work.value_tables;
    work.logit_tables.clear(), work.value_tables.clear();
#pragma omp for schedule(static)
    for (int64_t u = 0; u < units.count(); u++) {
      const KeyGrads grads =
          cuts > 1 ? KeyGrads{k_pieces + u * k_size, v_pieces + u * v_size} : KeyGrads{nullptr, nullptr};
      units.run<T>(work, u, grads);
    }
    if (cuts > 1) {
#pragma omp for schedule(static)
      for (int64_t n = 0; n < units.heads; n++) {
        add_pieces<T>(a, a.grad_k, n, p.keys, a.features, k_pieces + n * cuts * k_size, k_size, cuts);
        add_pieces<T>(a, a.grad_v, n, p.keys, a.value_features, v_pieces + n * cuts * v_size, v_size, cuts);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t f = 0; f < p.logits.count + p.values.count; f++) {
      const int64_t v = f - p.logits.count;
      if (v >= 0 && (*value_tables[0])(v, 0))
        TableGrads::finish(a, p.values, value_tables, threads, v, 1);
      else if (v < 0 && (*logit_tables[0])(f, 0))  // sums over q · log2(e), or over k · scale
        TableGrads::finish(a, p.logits, logit_tables, threads, f, p.logits.is_by_query(f) ? LN2 : 1 / float(a.scale));
    }
  }
}

int forward(const WfAttention &a) {
  a.bfloat16 ? forward_of<bfloat16>(a) : forward_of<float>(a);
  return 0;
}

int backward(const WfAttention &a) {
  a.bfloat16 ? backward_of<bfloat16>(a) : backward_of<float>(a);
  return 0;
}

}  // namespace wf::WF_ISA
