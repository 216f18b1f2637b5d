// Work items over the threads of the OpenMP runtime that PyTorch has brought along.
//
// Nothing here is compiled with OpenMP or linked to it: a second runtime in the process would keep a second pool of
// threads. The loader hands over the entry of the one that is there; without it, work is done by the caller.
#pragma once

#include <stdint.h>

namespace lineattn {

typedef void (*Fork)(void (*body)(void *), void *argument, unsigned threads, unsigned flags);

// GOMP_parallel of the runtime, or null.
extern Fork fork_threads;

// One item of a job; `slot` numbers the thread, from 0 to less than the threads asked for: scratch memory of its own.
typedef void (*Item)(void *job, int64_t item, int slot);

struct Team {
    Item run;
    void *job;
    int64_t items;
    int64_t next;
    int slots;
};

inline void take_items(void *argument) {
    Team *team = static_cast<Team *>(argument);
    const int slot = __atomic_fetch_add(&team->slots, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int64_t item = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
        if (item >= team->items) return;
        team->run(team->job, item, slot);
    }
}

// Runs every item once. Which thread takes which item is open, so an item writes only what is its own.
inline void parallel(Item run, void *job, int64_t items, int threads) {
    Team team = {run, job, items, 0, 0};
    if (threads > items) threads = static_cast<int>(items);
    if (threads > 1 && fork_threads)
        fork_threads(take_items, &team, static_cast<unsigned>(threads), 0);
    else
        take_items(&team);
}

}  // namespace lineattn
