// Scratch memory of one call, and how a call's work is cut.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes)
#endif

namespace lineattn {

class Memory {
   public:
    // Every piece starts at a cache line and has one behind it, which is nobody's; there are at most 16.
    Memory(int64_t floats, int64_t doubles)
        : doubles_(doubles),
          start_(static_cast<char *>(malloc(static_cast<size_t>(4 * floats + 8 * doubles + 2 * 16 * kLine)))),
          next_(start_) {}
    ~Memory() { free(start_); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    bool ready() const { return start_ != nullptr; }
    float *floats(int64_t count) { return static_cast<float *>(piece(4 * count)); }
    double *doubles() { return static_cast<double *>(piece(8 * doubles_)); }

   private:
    static constexpr int64_t kLine = 64;
    void *piece(int64_t bytes) {
        next_ += (kLine - reinterpret_cast<uintptr_t>(next_) % kLine) % kLine;
        void *start = next_;
        next_ += bytes;
        ASAN_POISON_MEMORY_REGION(next_, kLine);
        next_ += kLine;
        return start;
    }
    int64_t doubles_;
    char *start_, *next_;
};

// Maps of so many bytes are written past the caches.
#ifndef LINEATTN_STREAMED
#define LINEATTN_STREAMED (int64_t(16) << 20)
#endif
constexpr int64_t kStreamed = LINEATTN_STREAMED;

// Bands of rows an image: one where there are images enough, else so many that threads have something to share. It
// depends on the sizes alone, so that results don't depend on the number of threads.
inline int64_t count_bands(int64_t batch, int64_t height) {
    if (batch >= 8) return 1;
    const int64_t wanted = (8 + batch - 1) / batch, possible = height / 4;
    return possible < 1 ? 1 : wanted < possible ? wanted : possible;
}

// (C, 3, 3) -> (9, C)
inline void taps_last(const float *value, int64_t channels, float *taps) {
    for (int64_t c = 0; c < channels; ++c)
        for (int k = 0; k < 9; ++k) taps[k * channels + c] = value[9 * c + k];
}

}  // namespace lineattn
