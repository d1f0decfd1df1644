// The C interface: picks the widest instructions that run here, and lets no exception out.
#include <cstdlib>
#include <cstring>
#include <new>

#include "isa.h"
#ifdef WF_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define WF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Pass = int (*)(const WfAttention &);

struct Isa {
  const char *name;
  bool (*runs)();
  Pass forward, backward;
};

#ifdef WF_X86
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#ifdef WF_AMX
// Tiles, and products of bfloat16s on them, by the processor and by the system, which wants to be asked.
bool runs_amx() {
  constexpr unsigned BFLOAT16 = 1u << 22, TILES = 1u << 24;  // in edx of leaf 7
  constexpr long ASK = 0x1023, TILE_DATA = 18;               // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return runs_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BFLOAT16) && (d & TILES) &&
         syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

constexpr Isa WIDEST_FIRST[] = {
#ifdef WF_AMX
    {"amx", runs_amx, wf::amx::forward, wf::amx::backward},
#endif
#ifdef WF_X86
    {"avx512", runs_avx512, wf::avx512::forward, wf::avx512::backward},
    {"avx2", runs_avx2, wf::avx2::forward, wf::avx2::backward},
#endif
    {"portable", [] { return true; }, wf::portable::forward, wf::portable::backward},
};

// The widest that runs here, or the one that WHEREFORMER_ISA names; null if that does not run here.
const Isa *pick() {
#ifdef WF_X86
  __builtin_cpu_init();
#endif
  const char *wanted = std::getenv("WHEREFORMER_ISA");
  for (const Isa &isa : WIDEST_FIRST)
    if ((!wanted || !*wanted || !std::strcmp(wanted, isa.name)) && isa.runs()) return &isa;
  return nullptr;
}

const Isa *picked() {
  static const Isa *const isa = pick();
  return isa;
}

bool too_much(const WfAttention &a) {
  int64_t of_values = 0;
  for (int64_t n = 0; n < a.lookups; n++) of_values += a.lookup[n].kind == WF_VALUES;
  return of_values > WF_MOST_LOOKUPS || a.lookups - of_values > WF_MOST_LOOKUPS || a.features > WF_MOST_FEATURES ||
         a.value_features > WF_MOST_FEATURES;
}

bool by_keys_own_place(const WfAttention &a) {
  for (int64_t n = 0; n < a.lookups; n++)
    if (a.lookup[n].kind == WF_BY_KEY && a.lookup[n].absolute) return true;
  return false;
}

int run(Pass Isa::*pass, const WfAttention *attention) {
  const Isa *isa = picked();
  if (!isa) return wf::UNKNOWN_ISA;
  if (too_much(*attention)) return wf::TOO_MUCH;
  if (by_keys_own_place(*attention)) return wf::BY_OWN_PLACE;
  try {
    return (isa->*pass)(*attention);
  } catch (const std::bad_alloc &) {
    return wf::OUT_OF_MEMORY;
  } catch (...) {
    return wf::UNEXPECTED;
  }
}

}  // namespace

WF_EXPORT int whereformer_forward(const WfAttention *attention) { return run(&Isa::forward, attention); }

WF_EXPORT int whereformer_backward(const WfAttention *attention) { return run(&Isa::backward, attention); }

WF_EXPORT const char *whereformer_error(int code) {
  switch (code) {
    case wf::NONE: return "";
    case wf::OUT_OF_MEMORY: return "not enough memory for the kernel's own scratch";
    case wf::UNKNOWN_ISA: return "WHEREFORMER_ISA is none of amx, avx512, avx2 and portable, or not of this machine";
    case wf::TOO_MUCH: return "more than 8 lookups of the logits or of the values, or more than 1024 features";
    case wf::BY_OWN_PLACE: return "a lookup in which keys read by their own places: WF_BY_KEY goes by offsets";
    default: return "an exception that the kernel did not expect";
  }
}

WF_EXPORT const char *whereformer_isa(void) { return picked() ? picked()->name : nullptr; }

WF_EXPORT int64_t whereformer_layout(void) { return static_cast<int64_t>(sizeof(WfAttention) + sizeof(WfLookup)); }
