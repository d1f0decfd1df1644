// Matrix products, as the kernel has them: a few rows on the left, a matrix made ready on the right.
#pragma once
#if defined(__AMX_BF16__)
#include "tiles.h"
#else
#include "registers.h"
#endif

namespace wf::WF_ISA {
static_assert(GROUP >= BUCKETS && TILE % ROWS == 0 && BUCKETS % TILE == 0 && BUCKETS % LANES == 0,
              "loops go by whole ones");
}
