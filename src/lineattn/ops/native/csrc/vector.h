// Small fixed-width vectors by the compiler's vector extension, so that one source serves every instruction set.
#pragma once

#include <stdint.h>

#define INLINE inline __attribute__((always_inline))

template <int L>
struct Lanes {
    typedef float type __attribute__((vector_size(4 * L)));
};

template <int L>
using vec = typename Lanes<L>::type;
