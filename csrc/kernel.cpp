// The kernel for one instruction set: this file is compiled once for each, WF_ISA being its name.
#include "backward.h"
#include "forward.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace wf::WF_ISA {

constexpr int64_t MOST_BACKWARD_PIECES = 4;  // each has gradients of its own of all keys and values
constexpr int64_t FORWARD_BLOCK = 1152, BACKWARD_BLOCK = 640;  // what fits the second cache with its companions

// Into how many pieces a head's queries are cut: all threads then have as much to do, if `most` pieces are enough.
inline int64_t pieces(const WfAttention &a, int64_t queries, int64_t most) {
  int64_t cuts = 1;
  while ((a.batch * a.heads * cuts) % a.threads && a.batch * a.heads * cuts < 4 * a.threads && cuts < most) cuts++;
  return smaller(cuts, (queries + GROUP - 1) / GROUP);
}

template <class T>
void forward_of(const WfAttention &a) {
  Arena room;
  Problem(a, FORWARD_BLOCK, room, true);
  Memory shared(room.used());
  Arena arena(shared.start());
  const Problem p(a, FORWARD_BLOCK, arena, false);

  Arena thread_room;
  Forward<T>(p, thread_room);
  const int64_t size = whole(thread_room.used(), 4096);
  Memory memory(a.threads * size);
  const int64_t cuts = pieces(a, p.queries, a.threads), units = a.batch * a.heads * cuts;
#pragma omp parallel num_threads(int(a.threads))
  {
#if defined(_OPENMP)
    const int64_t thread = omp_get_thread_num();
#else
    const int64_t thread = 0;
#endif
    Arena mine(memory.start() + thread * size);
    Forward<T> work(p, mine);
#pragma omp for schedule(static)
    for (int64_t u = 0; u < units; u++) {
      const int64_t n = u / cuts, cut = u % cuts, then = smaller(u + 1, units - 1) / cuts;
      const Head<T> head(a, n / a.heads, n % a.heads), next(a, then / a.heads, then % a.heads);
      work(head, p.queries * cut / cuts, p.queries * (cut + 1) / cuts, then == n ? nullptr : &next);
    }
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
  Arena room;
  Problem(a, BACKWARD_BLOCK, room, true);
  Memory shared(room.used());
  Arena arena(shared.start());
  const Problem p(a, BACKWARD_BLOCK, arena, false);

  Arena thread_room;
  Backward<T>(p, thread_room);
  const int64_t size = whole(thread_room.used(), 4096);
  Memory memory(a.threads * size);
  bool given_by_key = false;
  for (int64_t f = 0; f < p.logits.count; f++)
    given_by_key |= p.logits.lookup[f].kind == WF_BY_KEY && p.logits.lookup[f].given;
  const int64_t cuts = given_by_key ? 1 : pieces(a, p.queries, MOST_BACKWARD_PIECES);
  const int64_t heads = a.batch * a.heads, units = heads * cuts;
  const int64_t k_size = p.keys * whole(a.features), v_size = p.keys * whole(a.value_features);
  Memory cut_memory(cuts > 1 ? units * (k_size + v_size) * 4 + CACHE_LINE : 0);
  float *k_pieces = reinterpret_cast<float *>(cut_memory.start()), *v_pieces = k_pieces + units * k_size;
  Memory table_memory(a.threads * int64_t(2 * sizeof(TableGrads *)));
  auto **logit_tables = reinterpret_cast<TableGrads **>(table_memory.start());
  auto **value_tables = logit_tables + a.threads;
#pragma omp parallel num_threads(int(a.threads))
  {
#if defined(_OPENMP)
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    Arena mine(memory.start() + thread * size);
    Backward<T> work(p, mine);
    logit_tables[thread] = &work.logit_tables, value_tables[thread] = &work.value_tables;
    work.logit_tables.clear(), work.value_tables.clear();
#pragma omp for schedule(static)
    for (int64_t u = 0; u < units; u++) {
      const int64_t n = u / cuts, cut = u % cuts, then = smaller(u + 1, units - 1) / cuts;
      const Head<T> head(a, n / a.heads, n % a.heads), next(a, then / a.heads, then % a.heads);
      const KeyGrads grads =
          cuts > 1 ? KeyGrads{k_pieces + u * k_size, v_pieces + u * v_size} : KeyGrads{nullptr, nullptr};
      work(head, p.queries * cut / cuts, p.queries * (cut + 1) / cuts, then == n ? nullptr : &next, grads);
    }
    if (cuts > 1) {
#pragma omp for schedule(static)
      for (int64_t n = 0; n < heads; n++) {
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
