// The kernel for one instruction set: this file is compiled once for each, WF_ISA being its name.
#include "backward.h"
#include "forward.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace wf::WF_ISA {

// How a head's queries are cut, so that all threads have work.
inline int64_t pieces(const WfAttention &a, int64_t queries) {
  const int64_t heads = a.batch * a.heads;
  if (heads % a.threads == 0 || heads >= 4 * a.threads) return 1;
  return smaller((4 * a.threads + heads - 1) / heads, (queries + 47) / 48);
}

template <class T>
void forward_of(const WfAttention &a) {
  Arena room;
  Problem(a, room, true);
  Memory shared(room.used());
  Arena arena(shared.start());
  const Problem p(a, arena, false);

  Arena thread_room;
  Forward<T>(p, thread_room);
  const int64_t size = whole(thread_room.used(), 4096);
  Memory memory(a.threads * size);
  const int64_t cuts = pieces(a, p.queries), units = a.batch * a.heads * cuts;
#pragma omp parallel num_threads(int(a.threads))
  {
#if defined(_OPENMP)
    const int64_t thread = omp_get_thread_num();
#else
    const int64_t thread = 0;
#endif
    Arena mine(memory.start() + thread * size);
    Forward<T> work(p, mine);
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < units; u++) {
      const int64_t n = u / cuts, cut = u % cuts;
      work(n / a.heads, n % a.heads, p.queries * cut / cuts, p.queries * (cut + 1) / cuts);
    }
  }
}

int forward(const WfAttention &a) {
  a.bfloat16 ? forward_of<bfloat16>(a) : forward_of<float>(a);
  return 0;
}

}  // namespace wf::WF_ISA
namespace wf::WF_ISA { int backward(const WfAttention &) { return 1; } }
