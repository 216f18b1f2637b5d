// The arguments of the kernels of the gated linear recurrence. Every field takes eight bytes:
// `lineattn.ops.native.scan` mirrors them.
//
//   S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,   o_t = scale * q_t S_t
//
// All tensors are dense. `G` is K for a decay a key channel, or 1 for one a head. Pointers marked "or null" may be
// missing. With `offsets` the sequences lie one after another, B of them in T tokens in all: the tensors marked B, T are
// then (T, ...), and sequence n has the tokens from offsets[n] to before offsets[n + 1].
#pragma once

#include <stdint.h>

namespace lineattn {

struct ScanForward {
    int64_t batch, tokens, heads, keys, values, decays, threads;
    double scale;

    const float *q, *k;      // (B, T, h, K)
    const float *v;          // (B, T, h, V)
    const float *g;          // (B, T, h, G)
    const float *initial;    // (B, h, K, V), or null for zeros
    const int64_t *offsets;  // (B + 1,), from 0 to T, never decreasing; or null

    float *out;    // (B, T, h, V)
    float *final;  // (B, h, K, V)
};

struct ScanBackward {
    int64_t batch, tokens, heads, keys, values, decays, threads;
    double scale;

    const float *q, *k, *v, *g, *initial;  // as in the forward
    const int64_t *offsets;                // as in the forward
    const float *grad_out;                 // (B, T, h, V)
    const float *grad_final;               // (B, h, K, V)

    float *grad_q, *grad_k, *grad_v, *grad_g;
    float *grad_initial;  // (B, h, K, V)
};

}  // namespace lineattn
