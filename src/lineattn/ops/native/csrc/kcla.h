// The arguments of the two KCLA kernels. Every field takes eight bytes: `lineattn.ops.native.kcla` mirrors them.
//
// Maps are dense (B, H, W, C), which PyTorch calls channels_last. Pointers marked "or null" may be missing.
#pragma once

#include <stdint.h>

namespace lineattn {

struct KclaForward {
    int64_t batch, channels, height, width, heads;
    int64_t query_taps, key_taps;
    int64_t relu, training, threads;
    double clamp, gate_eps, norm_eps;

    const float *x;                           // (B, H, W, C)
    const float *mean, *log_norm;             // (B, H, W, C), (B, h); null at the start of a chain
    const float *query, *key;                 // (taps,)
    const float *inv_temperature;             // (h,)
    const float *mixing;                      // (h, h), or null: the gate is not mixed
    const float *value;                       // (C, 3, 3)
    const float *weight, *bias;               // (C,); weight is null where the norm is folded into the value
    const float *running_mean, *running_var;  // (C,), or null in training and where weight is null
    const float *gain;                        // (C,), or null
    const float *drop;                        // (B,), or null

    float *out;                      // (B, H, W, C)
    float *mean_out;                 // (B, H, W, C); null at the start of a chain, where the mean is x
    float *log_norm_out, *score;     // (B, h)
    float *pooled;                   // (B, C)
    float *batch_mean, *batch_var;   // (C,); biased; null outside training
};

struct KclaBackward {
    int64_t batch, channels, height, width, heads;
    int64_t query_taps, key_taps, past;
    int64_t relu, training, threads;
    double clamp, gate_eps, norm_eps;

    const float *grad_out;                                // (B, H, W, C)
    const float *grad_mean, *grad_log_norm, *grad_score;  // as the outputs, each or null
    const float *x;
    const float *base, *base_log_norm;  // the last kept mean and its normaliser; null at the start of a chain
    const float *const *maps;           // `past` maps (B, H, W, C) written since
    const float *const *scores;         // their scores (B, h)
    const float *log_norm_before;       // (B, h), or null at the start
    const float *log_norm, *pooled;
    const float *query, *key, *inv_temperature, *mixing, *value, *weight, *bias;
    const float *norm_mean, *norm_var;  // (C,), of the batch in training
    const float *gain, *drop;

    float *grad_x;
    float *grad_mean_before, *grad_log_norm_before;  // null at the start
    float *grad_query, *grad_key, *grad_mixing, *grad_value, *grad_weight, *grad_bias;
    float *grad_gain;  // or null
};

}  // namespace lineattn
