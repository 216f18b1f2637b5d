// Runs every kernel over sizes drawn at random, for the sanitizers: no buffer is larger than the headers say, so that
// whatever reaches beyond one is caught. All that is written must be finite, and the same with one thread and two.
//
// Usage: driver CASES. A case depends on its number alone, so that one that fails can be run again.

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>
#include <vector>

#include "kcla.h"
#include "parallel.h"
#include "scan.h"

extern "C" {
const char *lineattn_instructions(int64_t);
void lineattn_choose(int64_t);
void lineattn_threads_from(lineattn::Fork);
int lineattn_kcla_forward(const lineattn::KclaForward *);
int lineattn_kcla_backward(const lineattn::KclaBackward *);
int lineattn_scan_forward(const lineattn::ScanForward *);
int lineattn_scan_backward(const lineattn::ScanBackward *);
int lineattn_scan_step(const lineattn::ScanForward *);
int lineattn_transpose(const float *, float *, int64_t, int64_t, int64_t, int64_t);
}

namespace {

constexpr int64_t kThreads = 2;

// Threads without OpenMP, whose own runtime the sanitizers don't see through.
struct Call {
    void (*body)(void *);
    void *argument;
};

void *enter(void *call) {
    static_cast<Call *>(call)->body(static_cast<Call *>(call)->argument);
    return nullptr;
}

void fork_threads(void (*body)(void *), void *argument, unsigned threads, unsigned) {
    Call call = {body, argument};
    pthread_t others[kThreads];
    for (unsigned i = 1; i < threads; ++i)
        if (pthread_create(&others[i], nullptr, enter, &call)) abort();
    body(argument);
    for (unsigned i = 1; i < threads; ++i) pthread_join(others[i], nullptr);
}

uint64_t random_state;

int64_t below(int64_t count) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((random_state >> 33) % static_cast<uint64_t>(count));
}

template <class T>
T one_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
}

class Case {
   public:
    explicit Case(int64_t number) : number_(number) { random_state = static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15; }
    ~Case() {
        for (void *memory : owned_) free(memory);
    }
    Case(const Case &) = delete;
    Case &operator=(const Case &) = delete;

    template <class T>
    T *take(int64_t count) {
        // At a cache line, as PyTorch does it: only aligned maps are written past the caches.
        void *start = nullptr;
        if (posix_memalign(&start, 64, sizeof(T) * static_cast<size_t>(count))) abort();
        T *memory = static_cast<T *>(start);
        owned_.push_back(memory);
        return memory;
    }

    const float *input(int64_t count, float low = -1, float high = 1) {
        float *values = take<float>(count);
        for (int64_t i = 0; i < count; ++i)
            values[i] = low + (high - low) * static_cast<float>(below(1 << 20)) / (1 << 20);
        return values;
    }
    const float *maybe(int64_t count) { return below(2) ? input(count) : nullptr; }

    // Of sequences, some of them empty, that lie one after another.
    const int64_t *offsets(int64_t sequences, int64_t tokens) {
        int64_t *values = take<int64_t>(sequences + 1);
        values[0] = 0, values[sequences] = tokens;
        for (int64_t n = 1; n < sequences; ++n) values[n] = values[n - 1] + below(tokens - values[n - 1] + 1);
        return values;
    }

    float *output(int64_t count) {
        outputs_.push_back({take<float>(count), take<float>(count), static_cast<size_t>(count)});
        return outputs_.back().values;
    }

    // Runs a kernel with every instruction set and number of threads, and looks at all outputs.
    template <class Arguments>
    void run(const char *kernel, int (*function)(const Arguments *), Arguments p) {
        for (int64_t set = 0; lineattn_instructions(set); ++set) {
            lineattn_choose(set);
            for (p.threads = 1; p.threads <= kThreads; ++p.threads) {
                for (Output &out : outputs_)
                    for (size_t i = 0; i < out.count; ++i) out.values[i] = NAN;
                const char *wrong = function(&p) ? "no memory" : look(p.threads == 1);
                if (!wrong) continue;
                fprintf(stderr, "case %d, %s, %s, %d threads: %s\n", static_cast<int>(number_), kernel,
                        lineattn_instructions(set), static_cast<int>(p.threads), wrong);
                exit(1);
            }
        }
    }

   private:
    struct Output {
        float *values, *alone;  // `alone`: what one thread wrote
        size_t count;
    };

    const char *look(bool alone) {
        for (Output &out : outputs_) {
            for (size_t i = 0; i < out.count; ++i)
                if (!isfinite(out.values[i])) return "a value is not finite";
            if (alone) memcpy(out.alone, out.values, sizeof(float) * out.count);
            if (memcmp(out.alone, out.values, sizeof(float) * out.count)) return "not what one thread wrote";
        }
        return nullptr;
    }

    int64_t number_;
    std::vector<void *> owned_;
    std::vector<Output> outputs_;
};

// What forward and backward have in common. Up to 8 images are cut into bands of rows, more are not.
template <class Arguments>
void draw_kcla(Case &c, Arguments &p) {
    p.batch = 1 + below(9), p.channels = 1 + below(40), p.width = 1 + below(9);
    p.height = one_of<int64_t>({1, 2, 3, 4, 5, 7, 8, 12, 17, 33});
    p.heads = 1 + below(p.channels);
    while (p.channels % p.heads) --p.heads;
    p.query_taps = 1 + 2 * below(3), p.key_taps = 1 + 2 * below(3);
    p.relu = below(2), p.training = below(2);
    p.clamp = one_of<double>({HUGE_VAL, 0.3}), p.gate_eps = one_of({0.0, 0.1}), p.norm_eps = 1e-5;
    const float range = below(8) ? 1 : 0;  // a map of zeros now and then
    p.x = c.input(p.batch * p.height * p.width * p.channels, -range, range);
    p.query = c.input(p.query_taps), p.key = c.input(p.key_taps);
    p.inv_temperature = c.input(p.heads, 0.1f, 2), p.mixing = c.maybe(p.heads * p.heads);
    p.value = c.input(9 * p.channels);
    p.weight = p.training || below(2) ? c.input(p.channels) : nullptr;
    p.bias = c.input(p.channels), p.gain = c.maybe(p.channels), p.drop = c.maybe(p.batch);
}

void kcla_forward(Case &c) {
    lineattn::KclaForward p = {};
    draw_kcla(c, p);
    const int64_t map = p.batch * p.height * p.width * p.channels, of_head = p.batch * p.heads;
    if (below(3)) p.mean = c.input(map), p.log_norm = c.input(of_head), p.mean_out = c.output(map);
    if (p.weight && !p.training) p.running_mean = c.input(p.channels), p.running_var = c.input(p.channels, 0.1f, 2);
    if (p.training) p.batch_mean = c.output(p.channels), p.batch_var = c.output(p.channels);
    p.out = c.output(map), p.log_norm_out = c.output(of_head), p.score = c.output(of_head);
    p.pooled = c.output(p.batch * p.channels);
    c.run("kcla_forward", lineattn_kcla_forward, p);
}

void kcla_backward(Case &c) {
    lineattn::KclaBackward p = {};
    draw_kcla(c, p);
    const int64_t map = p.batch * p.height * p.width * p.channels, of_head = p.batch * p.heads;
    p.grad_out = c.input(map), p.grad_mean = c.maybe(map);
    p.grad_log_norm = c.maybe(of_head), p.grad_score = c.maybe(of_head);
    if (below(3)) {
        p.base = c.input(map), p.base_log_norm = c.input(of_head), p.log_norm_before = c.input(of_head);
        p.past = below(10);
        p.grad_mean_before = c.output(map), p.grad_log_norm_before = c.output(of_head);
    }
    const float **maps = c.take<const float *>(p.past), **scores = c.take<const float *>(p.past);
    for (int64_t k = 0; k < p.past; ++k) maps[k] = c.input(map), scores[k] = c.input(of_head);
    p.maps = maps, p.scores = scores;
    p.log_norm = c.input(of_head), p.pooled = c.input(p.batch * p.channels);
    if (p.weight) {
        p.norm_mean = c.input(p.channels), p.norm_var = c.input(p.channels, 0.1f, 2);
        p.grad_weight = c.output(p.channels);
    }
    if (p.mixing) p.grad_mixing = c.output(p.heads * p.heads);
    if (p.gain) p.grad_gain = c.output(p.channels);
    p.grad_x = c.output(map), p.grad_query = c.output(p.query_taps), p.grad_key = c.output(p.key_taps);
    p.grad_value = c.output(9 * p.channels), p.grad_bias = c.output(p.channels);
    c.run("kcla_backward", lineattn_kcla_backward, p);
}

template <class Arguments>
int64_t scan_rows(const Arguments &p) {
    return (p.offsets ? 1 : p.batch) * p.tokens * p.heads;
}

template <class Arguments>
void draw_scan(Case &c, Arguments &p, int64_t tokens) {
    p.batch = below(4), p.tokens = tokens, p.heads = 1 + below(4);
    p.keys = below(40), p.values = below(4) ? below(40) : 150;
    if (tokens == 1 && !below(8)) p.batch = 2, p.heads = 4, p.keys = 220, p.values = 150;  // a step uses threads
    p.decays = below(2) ? p.keys : 1, p.scale = 0.3;
    if (tokens != 1 && !below(3)) p.offsets = c.offsets(p.batch += !p.batch, tokens);
    const int64_t rows = scan_rows(p);
    p.q = c.input(rows * p.keys), p.k = c.input(rows * p.keys), p.v = c.input(rows * p.values);
    p.g = c.input(rows * p.decays, one_of({-0.1f, -3.0f, -200.0f}), 0);
}

void scan_forward(Case &c) {
    lineattn::ScanForward p = {};
    draw_scan(c, p, below(40));
    const int64_t state = p.batch * p.heads * p.keys * p.values;
    p.initial = c.maybe(state);
    p.out = c.output(scan_rows(p) * p.values), p.final = c.output(state);
    c.run("scan_forward", lineattn_scan_forward, p);
}

void scan_backward(Case &c) {
    lineattn::ScanBackward p = {};
    draw_scan(c, p, below(40));
    const int64_t rows = scan_rows(p), state = p.batch * p.heads * p.keys * p.values;
    p.initial = c.maybe(state);
    p.grad_out = c.input(rows * p.values), p.grad_final = c.input(state);
    p.grad_q = c.output(rows * p.keys), p.grad_k = c.output(rows * p.keys), p.grad_v = c.output(rows * p.values);
    p.grad_g = c.output(rows * p.decays), p.grad_initial = c.output(state);
    c.run("scan_backward", lineattn_scan_backward, p);
}

void scan_step(Case &c) {
    lineattn::ScanForward p = {};
    draw_scan(c, p, 1);
    const int64_t state = p.batch * p.heads * p.keys * p.values;
    p.initial = c.input(state);
    p.out = c.output(p.batch * p.heads * p.values), p.final = c.output(state);
    c.run("scan_step", lineattn_scan_step, p);
}

struct Transpose {
    const float *from;
    float *to;
    int64_t batch, rows, columns, threads;
};

int call_transpose(const Transpose *p) {
    return lineattn_transpose(p->from, p->to, p->batch, p->rows, p->columns, p->threads);
}

void transpose(Case &c) {
    Transpose p = {};
    p.batch = below(4), p.rows = below(150), p.columns = below(70);
    const int64_t values = p.batch * p.rows * p.columns;
    p.from = c.input(values), p.to = c.output(values);
    c.run("transpose", call_transpose, p);
}

}  // namespace

int main(int, char **argv) {
    lineattn_threads_from(fork_threads);
    const int64_t cases = atoi(argv[1]);
    for (int64_t number = 0; number < cases; ++number)
        for (void (*kernel)(Case &) : {kcla_forward, kcla_backward, scan_forward, scan_backward, scan_step, transpose}) {
            Case c(number);
            kernel(c);
        }
    for (int64_t set = 0; lineattn_instructions(set); ++set) printf("%s\n", lineattn_instructions(set));
    return 0;
}
