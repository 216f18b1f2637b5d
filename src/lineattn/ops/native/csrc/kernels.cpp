// The library: every kernel once for each instruction set, and a C interface that picks one at run time.

#include <string.h>

#include "address.h"
#include "kcla.h"
#include "memory.h"
#include "parallel.h"
#include "scan.h"
#include "vector.h"

#define INLINE_LAMBDA __attribute__((always_inline))

namespace lineattn {

Fork fork_threads = nullptr;

// What an instruction set brings. A kernel returns 0, or 1 if there was no memory.
struct Kernels {
    int (*kcla_forward)(const KclaForward *);
    int (*kcla_backward)(const KclaBackward *);
    int (*transpose)(const float *, float *, int64_t, int64_t, int64_t, int64_t);
    int (*scan_forward)(const ScanForward *);
    int (*scan_backward)(const ScanBackward *);
    int (*scan_step)(const ScanForward *);
};

namespace portable {
#define WIDTH 4
#include "kernels.inc"
#undef WIDTH
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__)
#define LINEATTN_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define WIDTH 8
#include "kernels.inc"
#undef WIDTH
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#ifndef LINEATTN_NO_AVX512  // left out where a test compiles for this processor alone
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#endif
namespace avx512 {
#define WIDTH 16
#include "kernels.inc"
#undef WIDTH
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#endif

// An instruction set: its name, whether this processor has it, its kernels.
struct Choice {
    const char *name;
    bool (*here)();
    Kernels kernels;
};

// The best comes first; the last one runs everywhere.
static const Choice kChoices[] = {
#ifdef LINEATTN_X86
#ifndef LINEATTN_NO_AVX512
    {"avx512",
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
     },
     avx512::kernels()},
#endif
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::kernels()},
#endif
    {"portable", [] { return true; }, portable::kernels()},
};

static bool runs_here(int64_t i) {
    return i < static_cast<int64_t>(sizeof kChoices / sizeof *kChoices) && kChoices[i].here();
}

static int64_t best() {
#ifdef LINEATTN_X86
    __builtin_cpu_init();
#endif
    int64_t i = 0;
    while (!runs_here(i)) ++i;
    return i;
}

static int64_t chosen = best();

}  // namespace lineattn

#define EXPORT extern "C" __attribute__((visibility("default")))

// Raised with every change of a signature or a structure.
EXPORT int64_t lineattn_interface() { return 4; }

// The name of instruction set `i` that this processor has, or null; the first is the one in use at the start.
EXPORT const char *lineattn_instructions(int64_t i) {
    i += lineattn::best();
    return lineattn::runs_here(i) ? lineattn::kChoices[i].name : nullptr;
}

// Takes instruction set `i` of those; for tests.
EXPORT void lineattn_choose(int64_t i) { lineattn::chosen = lineattn::best() + i; }

// The size of a structure of arguments, or 0; what mirrors it must be as large.
EXPORT int64_t lineattn_size_of(const char *name) {
    if (!strcmp(name, "KclaForward")) return sizeof(lineattn::KclaForward);
    if (!strcmp(name, "KclaBackward")) return sizeof(lineattn::KclaBackward);
    if (!strcmp(name, "ScanForward")) return sizeof(lineattn::ScanForward);
    if (!strcmp(name, "ScanBackward")) return sizeof(lineattn::ScanBackward);
    return 0;
}

EXPORT void lineattn_threads_from(lineattn::Fork fork) { lineattn::fork_threads = fork; }

EXPORT int lineattn_kcla_forward(const lineattn::KclaForward *p) {
    return lineattn::kChoices[lineattn::chosen].kernels.kcla_forward(p);
}

EXPORT int lineattn_kcla_backward(const lineattn::KclaBackward *p) {
    return lineattn::kChoices[lineattn::chosen].kernels.kcla_backward(p);
}

EXPORT int lineattn_scan_forward(const lineattn::ScanForward *p) {
    return lineattn::kChoices[lineattn::chosen].kernels.scan_forward(p);
}

EXPORT int lineattn_scan_backward(const lineattn::ScanBackward *p) {
    return lineattn::kChoices[lineattn::chosen].kernels.scan_backward(p);
}

EXPORT int lineattn_scan_step(const lineattn::ScanForward *p) {
    return lineattn::kChoices[lineattn::chosen].kernels.scan_step(p);
}

EXPORT int lineattn_transpose(const float *from, float *to, int64_t batch, int64_t rows, int64_t columns,
                              int64_t threads) {
    return lineattn::kChoices[lineattn::chosen].kernels.transpose(from, to, batch, rows, columns, threads);
}
