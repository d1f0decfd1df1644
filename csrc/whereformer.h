// The plain C interface of the CPU kernel: attention with positions, forward and backward.
//
// All tensors live in the caller's memory. T is the type of q, k, v, out and their gradients (float or bfloat16);
// everything else is float. Sizes are at least 1, but for prefix, pairs and lookups. Strides count elements; a stride
// of 0 shares one entry along its axis. Tokens are prefix tokens, then patches row by row; a video's rows are those of
// its first frame, then of its second, ...
//
//   logits[i, j] = scale · turned(q_i)·turned(k_j) + Σ lookups[i, j] + added[i, j],   −inf unless allowed[i, j]
//   out_i        = Σ_j softmax_j(logits[i, j]) (v_j + Σ value lookups[i, j])
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// [batch, heads, tokens, features]; features are contiguous.
typedef struct {
  void *data;
  int64_t batch, head, token;
} WfTokens;

typedef struct {
  int64_t prefix, frames, height, width;
} WfGrid;

// Turns feature pairs of all patches: x -> (x1 cos - x2 sin, x1 sin + x2 cos). [batch, heads, patches, pairs],
// pairs contiguous; any scale is already multiplied in. No pairs, no turn.
typedef struct {
  const float *cos, *sin;
  int64_t batch, head;  // strides
} WfTurn;

enum {
  WF_MOST_LOOKUPS = 8,     // of the logits, and of the values
  WF_MOST_FEATURES = 1024  // of queries and keys, and of values
};

enum { WF_BY_QUERY = 0, WF_BY_KEY = 1, WF_SHARED = 2, WF_VALUES = 3 };

// A term that depends on pair (i, j) by a bucket alone: bucket = map[offset of i and j], or `prefix`, which the
// map does not use, if one of the two is a prefix token (-1: the term is then 0).
//
//   WF_BY_QUERY   logits += scores[b, h, i, bucket]     scores = q_i·table[h, :, bucket], or given
//   WF_BY_KEY     logits += scores[b, h, j, bucket]     scores = k_j·table[h, :, bucket], or given
//   WF_SHARED     logits += scores[h, bucket]           given
//   WF_VALUES     out    += weight[i, j] table[h, bucket, :]
//
// q and k are read as they came: not scaled, not turned.
typedef struct {
  int64_t kind;
  int64_t buckets;
  int64_t absolute;    // 0: map is indexed by offset, 1: by the key's own place, not for WF_BY_KEY
  int64_t mirrored;    // 0: the offset is query - key, 1: key - query
  int64_t prefix;      // bucket of pairs with a prefix token, or -1
  int64_t by_bucket;   // how a table of BY_QUERY or BY_KEY lies: 0: [features, buckets], 1: [buckets, features]
  const int32_t *map;  // offset:   [frames, height, width of queries + keys - 1] of offset + (n - 1), n the size of the
                       //           side that is subtracted;   absolute: [keys' frames, height, width]
  // BY_QUERY, BY_KEY: [1 or heads, features, buckets] or the other way around, or null; VALUES: [1 or heads, buckets,
  // features]
  const float *table;
  const float *scores;  // BY_QUERY, BY_KEY: [batch, heads, tokens, buckets] or null; SHARED: [1 or heads, buckets]
  int64_t head;         // stride of heads of table (or of SHARED scores): 0 if shared by all heads
  double scale;         // by which a table is multiplied where it is read
  float *grad_table;    // backward: as table, written; or null
  float *grad_scores;   // backward: as scores, written; or null
} WfLookup;

typedef struct {
  int64_t batch, heads, features, value_features;
  WfGrid queries, keys;
  int64_t bfloat16;  // T: 0 float, 1 bfloat16
  int64_t threads;
  double scale;
  WfTokens q, k, v, out;
  float *lse;  // [batch, heads, queries]: log2 of Σ_j exp(logits), +inf where nothing is allowed; null if not wanted
  int64_t pairs, half;  // pairs that turn: features (2c, 2c + 1), or (c, c + pairs) if half
  WfTurn query_turn, key_turn;
  int64_t lookups;
  const WfLookup *lookup;
  const uint8_t *allowed;  // [batch, heads, queries, keys] or null
  int64_t allowed_strides[4];
  const float *added;  // [batch, heads, queries, keys] or null
  int64_t added_strides[4];
  WfTokens grad_out, grad_q, grad_k, grad_v;  // backward only
} WfAttention;

// 0, or a positive number: what went wrong (whereformer_error says it in words).
int whereformer_forward(const WfAttention *);
int whereformer_backward(const WfAttention *);
const char *whereformer_error(int code);

// The instructions the kernel runs on: "amx", "avx512", "avx2" or "portable". The environment's WHEREFORMER_ISA picks a
// lesser; null if it names none that runs here, and then every call fails.
const char *whereformer_isa(void);
// sizeof(WfAttention) + sizeof(WfLookup), for the caller to check its own picture of them.
int64_t whereformer_layout(void);

#ifdef __cplusplus
}
#endif
