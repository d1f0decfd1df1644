// What kernel.cpp, compiled once for each set of instructions, offers dispatch.cpp.
#pragma once
#include "whereformer.h"

namespace wf {

// What a call returns; whereformer_error says it in words.
enum Error : int { NONE = 0, OUT_OF_MEMORY = 1, UNKNOWN_ISA = 2, UNEXPECTED = 3, TOO_MUCH = 4, BY_OWN_PLACE = 5 };

#define WF_DECLARE(isa)              \
  namespace isa {                    \
  int forward(const WfAttention &);  \
  int backward(const WfAttention &); \
  }
WF_DECLARE(amx)
WF_DECLARE(avx512)
WF_DECLARE(avx2)
WF_DECLARE(portable)
#undef WF_DECLARE

}  // namespace wf
