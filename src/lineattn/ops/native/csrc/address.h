// KCLA's arithmetic per sample: from the pooled map to the score, the share and the gate, and back.
//
// A few thousand operations a sample, in double precision: the gradients of the query and the key nearly cancel.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>

namespace lineattn {

// Below this length a key has no direction.
constexpr double kShort = 1e-6;

struct AddressSizes {
    int64_t channels, heads, query_taps, key_taps;
    double clamp, gate_eps;
};

struct AddressWeights {
    const float *query, *key, *inv_temperature, *mixing;
};

// What one sample needs; arrays of `heads`, and `query`, `key` of `channels`.
struct Address {
    double *query, *key;
    double *length, *dot, *rho;  // |k|, <q, k>, <q, k> / max(|k|, short)
    double *score, *log_norm, *share, *rest;  // rest = 1 - share, without cancellation
    double *sigmoid, *gate;
};

inline int64_t address_doubles(int64_t channels, int64_t heads) { return 2 * channels + 9 * heads; }

inline Address address_in(double *memory, int64_t channels, int64_t heads) {
    double *h = memory + 2 * channels;
    return {memory, memory + channels, h, h + heads, h + 2 * heads, h + 3 * heads, h + 4 * heads, h + 5 * heads,
            h + 6 * heads, h + 7 * heads, h + 8 * heads};
}

inline double logistic(double z) { return z >= 0 ? 1 / (1 + exp(-z)) : exp(z) / (1 + exp(z)); }

inline void channel_conv(const float *y, const float *taps, int64_t count, int64_t channels, double *out) {
    const int64_t reach = count / 2;
    for (int64_t c = 0; c < channels; ++c) {
        const int64_t from = c < reach ? reach - c : 0;
        const int64_t to = c + count - reach > channels ? channels + reach - c : count;
        double sum = 0;
        for (int64_t j = from; j < to; ++j) sum += static_cast<double>(taps[j]) * y[c + j - reach];
        out[c] = sum;
    }
}

inline void channel_conv_backward(const double *grad, const float *y, const float *taps, int64_t count,
                                  int64_t channels, double *grad_y, double *grad_taps) {
    const int64_t reach = count / 2;
    for (int64_t c = 0; c < channels; ++c) {
        const int64_t from = c < reach ? reach - c : 0;
        const int64_t to = c + count - reach > channels ? channels + reach - c : count;
        for (int64_t j = from; j < to; ++j) {
            grad_y[c + j - reach] += grad[c] * taps[j];
            grad_taps[j] += grad[c] * y[c + j - reach];
        }
    }
}

// `before` is the log-normaliser so far, or null at the start of a chain.
inline void address(const AddressSizes &n, const AddressWeights &w, const float *pooled, const float *before,
                    Address a) {
    channel_conv(pooled, w.query, n.query_taps, n.channels, a.query);
    channel_conv(pooled, w.key, n.key_taps, n.channels, a.key);
    const int64_t width = n.channels / n.heads;
    for (int64_t h = 0; h < n.heads; ++h) {
        double square = 0, dot = 0;
        for (int64_t c = h * width; c < (h + 1) * width; ++c) {
            square += a.key[c] * a.key[c];
            dot += a.query[c] * a.key[c];
        }
        a.length[h] = sqrt(square);
        a.dot[h] = dot;
        a.rho[h] = dot / (a.length[h] < kShort ? kShort : a.length[h]);
        double score = sqrt(square + FLT_MIN) * w.inv_temperature[h];
        if (score > n.clamp) score = n.clamp;
        a.score[h] = score;
        if (before) {
            const double gap = score - before[h];
            a.share[h] = logistic(gap);
            a.rest[h] = logistic(-gap);
            a.log_norm[h] = gap > 0 ? score + log1p(exp(-gap)) : before[h] + log1p(exp(gap));
        } else {
            a.share[h] = 1;
            a.rest[h] = 0;
            a.log_norm[h] = score;
        }
    }
    for (int64_t h = 0; h < n.heads; ++h) {
        double z = a.rho[h];
        if (w.mixing) {
            z = 0;
            for (int64_t j = 0; j < n.heads; ++j) z += static_cast<double>(w.mixing[h * n.heads + j]) * a.rho[j];
        }
        a.sigmoid[h] = logistic(z);
        a.gate[h] = n.gate_eps != 0 ? a.sigmoid[h] / (1 + n.gate_eps * exp(-a.log_norm[h])) : a.sigmoid[h];
    }
}

// Gradients of one sample's parameters, added to; `mixing` is null where the gate is not mixed.
struct AddressGrads {
    double *query, *key, *mixing;
};

// From the gradients of gate, log-normaliser and score, and from `pull`, the sum over a head of
// grad(mean) * (x - mean): the share moves the mean by x - mean_before = (x - mean) / rest.
// Writes `grad_pooled` (C) and `grad_before` (h, or null); `work` holds 2 C + 2 h doubles.
inline void address_backward(const AddressSizes &n, const AddressWeights &w, const float *pooled, const Address &a,
                             const double *grad_gate, const float *grad_log_norm, const float *grad_score,
                             const double *pull, double *work, double *grad_pooled, float *grad_before,
                             AddressGrads grads) {
    double *grad_query = work, *grad_key = work + n.channels, *grad_z = work + 2 * n.channels;
    double *grad_score_total = grad_z + n.heads;
    const int64_t width = n.channels / n.heads;
    for (int64_t h = 0; h < n.heads; ++h) {
        double grad_norm = grad_log_norm ? grad_log_norm[h] : 0;
        double grad_sigmoid = grad_gate[h];
        if (n.gate_eps != 0) {
            const double shrink = n.gate_eps * exp(-a.log_norm[h]);
            grad_norm += grad_gate[h] * a.sigmoid[h] * shrink / ((1 + shrink) * (1 + shrink));
            grad_sigmoid /= 1 + shrink;
        }
        grad_z[h] = grad_sigmoid * a.sigmoid[h] * (1 - a.sigmoid[h]);
        const double moved = grad_before ? a.share[h] * pull[h] : 0;
        grad_score_total[h] = (grad_score ? grad_score[h] : 0) + moved + a.share[h] * grad_norm;
        if (grad_before) grad_before[h] = static_cast<float>(a.rest[h] * grad_norm - moved);
    }
    for (int64_t h = 0; h < n.heads; ++h) {
        double grad_rho = grad_z[h];
        if (w.mixing) {
            grad_rho = 0;
            for (int64_t i = 0; i < n.heads; ++i) {
                grad_rho += grad_z[i] * w.mixing[i * n.heads + h];
                grads.mixing[i * n.heads + h] += grad_z[i] * a.rho[h];
            }
        }
        const bool directed = a.length[h] >= kShort;
        const double divisor = directed ? a.length[h] : kShort;
        const double grad_dot = grad_rho / divisor;
        const double length = sqrt(a.length[h] * a.length[h] + FLT_MIN);
        // A score at the clamp passes nothing on.
        const double grad_length = length * w.inv_temperature[h] > n.clamp
                                       ? 0
                                       : grad_score_total[h] * w.inv_temperature[h] / length;
        const double along = grad_length - (directed ? grad_rho * a.dot[h] / (divisor * divisor * divisor) : 0);
        for (int64_t c = h * width; c < (h + 1) * width; ++c) {
            grad_query[c] = grad_dot * a.key[c];
            grad_key[c] = grad_dot * a.query[c] + along * a.key[c];
        }
    }
    for (int64_t c = 0; c < n.channels; ++c) grad_pooled[c] = 0;
    channel_conv_backward(grad_query, pooled, w.query, n.query_taps, n.channels, grad_pooled, grads.query);
    channel_conv_backward(grad_key, pooled, w.key, n.key_taps, n.channels, grad_pooled, grads.key);
}

}  // namespace lineattn
