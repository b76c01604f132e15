/* One step of all layers, on all cores of a CPU: the inner rule, the inner products, the coefficients and the update.

   The same step as that of the kernel in `fused.py`; the names are those used there. `native_step.py` calls it. Layers are
   taken in parts that stay in the caches from their sums to their update. Chunks are of a fixed size and their sums are
   added in order, so that a step has the same digits whatever the number of threads and whatever other layers there are.

   The file includes itself twice, for the arithmetic in floats and in doubles. */

#ifndef REAL

#include "../vectors/native.c"
#include <math.h>

#ifndef __FP_FAST_FMAF /* no instruction for it */
#define fmaf(a, b, c) ((a) * (b) + (c))
#define fma(a, b, c) ((a) * (b) + (c))
#endif
#define PART 6291456 /* bytes of layers that are summed and then updated together, unless one layer has more */
#define AHEAD 16     /* chunks that are updated forward */
#define INLINE static inline __attribute__((always_inline))
#define EACH_RULE(DO)                                                                                                  \
    DO(GIVEN) DO(STEPPED) DO(SGD) DO(MOMENTUM) DO(NESTEROV) DO(SGD_AMOM) DO(ADAM) DO(NADAM) DO(RADAM) DO(ADAMAX)       \
    DO(RMSPROP) DO(ADAGRAD)
#define NAMED(rule) rule,
enum { EACH_RULE(NAMED) };

INLINE int has_first(int rule) { return rule >= MOMENTUM && rule <= ADAMAX; }
INLINE int has_second(int rule) { return rule >= ADAM; }

/* Options of a step, as `native_step.py` has them. */
struct options {
    double decay, mu, undamped, beta1, beta2, eps, growth, along, shrink, noise, lr, floor;
    int64_t rule, maximize, decoupled, project, relative, reproject, capped, zero;
};

/* Columns of the ledger, by row. */
struct ledger {
    double *multiplier, *radius, *power1, *power2, *age;
    int64_t *skipped, *bad;
};

/* The layers: each list (weights, gradients, first and second moments) has a type, and an address for each segment. */
struct layers {
    int64_t chunks, segments;
    const int64_t *segment, *place, *first, *length, *row, *address, *kind;
    double *partial, *radius; /* sums of chunks, and of segments: the radius, */
    int64_t *bad;             /* and whether the step is skipped */
};

/* What one row's rule needs, in the arithmetic of a REAL. */
#define DEFINE_FACTORS(name, real)                                                                                     \
    struct name {                                                                                                      \
        real sign, coupled, decoupled, mu, kept, taken, rest1, beta2, rest2, eps, scale, third;                        \
    };
DEFINE_FACTORS(double_factors, double)
DEFINE_FACTORS(float_factors, float)

static struct float_factors rounded(struct double_factors k) {
    return (struct float_factors){k.sign,  k.coupled, k.decoupled, k.mu,  k.kept,  k.taken,
                                  k.rest1, k.beta2,   k.rest2,     k.eps, k.scale, k.third};
}

static double nadam_mu(double age, const struct options *o) { return o->beta1 * (1 - 0.5 * exp2(age * o->shrink)); }

/* The row's numbers after one more step: beta1^t (NAdam: the product of its mu), beta2^t, and t. */
static void advance(const struct options *o, double *power1, double *power2, double *age) {
    *age += 1;
    *power1 = o->rule == NADAM ? (float)*power1 * (float)nadam_mu(*age, o) : *power1 * o->beta1;
    *power2 *= o->beta2;
}

/* -(m/bias1)/(sqrt(v)/bias2 + eps) is computed as -(m scale)/(sqrt(v) + eps bias2), with scale = bias2/bias1. `fresh` is
   a momentum's first step. The ledger is that before the step. */
static struct double_factors factors_of(const struct options *o, const struct ledger *book, int64_t row) {
    double power1 = book->power1[row], power2 = book->power2[row], age = book->age[row];
    const int fresh = (o->rule == MOMENTUM || o->rule == NESTEROV) && power1 == 1;
    advance(o, &power1, &power2, &age);
    struct double_factors k = {
        .sign = o->maximize ? -1 : 1, .coupled = o->decoupled || o->rule <= STEPPED ? 0 : o->decay,
        .decoupled = o->decoupled ? o->decay : 0, .mu = o->mu, .kept = fresh ? 0 : o->mu,
        .taken = fresh ? 1 : o->undamped, .rest1 = 1 - o->beta1, .beta2 = o->beta2, .rest2 = 1 - o->beta2, .eps = o->eps,
        .scale = 1, .third = 0};
    if (!has_first(o->rule) || !has_second(o->rule)) return k;
    const double bias1 = 1 - power1, bias2 = sqrt(1 - power2);
    if (o->rule == ADAM) {
        k.scale = bias2 / bias1, k.eps *= bias2;
    } else if (o->rule == NADAM) {
        const double following = nadam_mu(age + 1, o);
        k.scale = bias2 * following / (1 - power1 * following);
        k.third = bias2 * (1 - nadam_mu(age, o)) / bias1;
        k.eps *= bias2;
    } else if (o->rule == RADAM) {
        const double most = 2 / (1 - o->beta2) - 1, length = most - 2 * age * power2 / (1 - power2);
        k.scale = 1 / bias1;
        if (length > 5) /* it rectifies; third = 0 where it does not yet */
            k.third = bias2 * sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
    }
    return k;
}

#define REAL float
#define OF(name) float_##name
#define ABS fabsf
#define ROOT sqrtf
#define FMA fmaf
#include "native_step.c"
#undef REAL
#undef OF
#undef ABS
#undef ROOT
#undef FMA
#define REAL double
#define OF(name) double_##name
#define ABS fabs
#define ROOT sqrt
#define FMA fma
#include "native_step.c"

/* A segment's coefficients, its radius, and whether the step is skipped because something is not finite. */
struct outcome {
    double a, b, radius;
    int finite;
};

static struct outcome settled(const struct layers *l, const struct options *o, const struct ledger *book, int64_t s) {
    const int64_t row = l->row[s];
    double ww = 0, ws = 0, ss = 0;
    for (int64_t c = l->first[s]; c < l->first[s + 1]; c++)
        ww += l->partial[3 * c], ws += l->partial[3 * c + 1], ss += l->partial[3 * c + 2];
    /* A decoupled decay that is not part of the displacement: s + along w. */
    ss += 2 * o->along * ws + o->along * o->along * ww;
    ws += o->along * ww;
    const double rate = o->lr * book->multiplier[row], norm = sqrt(ww);
    const double radius = book->radius[row] <= 0 && ww < INFINITY ? norm : book->radius[row];
    int finite = ww < INFINITY && fabs(ws) < INFINITY && ss < INFINITY;
    /* A change of a few roundings of the weights has no direction. */
    if (o->rule == STEPPED) finite = finite && (ss == 0 || ss > o->noise * ww);
    const double ratio = ws / ww, square = o->project ? ss - ratio * ws : ss;
    int moved = finite && ww > 0 && ss > 0 && rate > 0 && rate < INFINITY && square > o->floor * ss;
    const double length = o->relative ? rate * norm : rate, step = length / sqrt(square), far = ww + length * length;
    const double new = sqrt(o->project ? far : fmax(far + 2 * step * ws, 0));
    moved = moved && new < INFINITY;
    double k = 1;
    if (o->reproject) {
        moved = moved && new * new > o->floor * far;
        k = radius / new;
    } else if (o->capped) {
        k = fmin(1, (norm + o->growth * radius) / new);
    }
    const double b = k * step, a = k * (o->project ? 1 - step * ratio : 1) + b * o->along;
    return (struct outcome){moved ? a : 1, moved ? b : 0, radius, finite};
}

enum { WEIGHT, GRADIENT, FIRST, SECOND };

static int64_t length_of(const struct layers *l, int64_t c) {
    const int64_t left = l->length[l->segment[c]] - l->place[c] * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

static char *at(const struct layers *l, int list, int64_t c, int64_t element) {
    const int64_t s = l->segment[c];
    return (char *)l->address[list * l->segments + s] + (l->place[c] * CHUNK + element) * BYTES[l->kind[list]];
}

static int all_are(const struct layers *l, int kind) {
    return l->kind[0] == kind && l->kind[1] == kind && l->kind[2] == kind && l->kind[3] == kind;
}

static void sum_chunk(const struct layers *l, const struct options *o, const struct ledger *book, int64_t c) {
    const int64_t n = length_of(l, c);
    const struct double_factors k = factors_of(o, book, l->row[l->segment[c]]);
    double *sums = l->partial + 3 * c;
    sums[0] = sums[1] = sums[2] = 0;
    void *p[4];
    if (all_are(l, FLOAT32) || all_are(l, FLOAT64)) {
        for (int list = 0; list < 4; list++) p[list] = at(l, list, c, 0);
        if (l->kind[0] == FLOAT32)
            float_sum(o->rule, p[0], p[1], p[2], p[3], n, rounded(k), 1, 1, sums);
        else
            double_sum(o->rule, p[0], p[1], p[2], p[3], n, k, 1, 1, sums);
        return;
    }
    double wide[4][BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t m = n - start < BLOCK ? n - start : BLOCK;
        for (int list = 0; list < 4; list++) widen(at(l, list, c, start), l->kind[list], m, wide[list]);
        double_sum(o->rule, wide[0], wide[1], wide[2], wide[3], m, k, 1, 0, sums);
        /* Rounded as it is stored, so that the update computes the same displacement from it. */
        for (int list = FIRST; list <= SECOND; list++)
            if (list == FIRST ? has_first(o->rule) : has_second(o->rule)) {
                narrow(wide[list], l->kind[list], m, at(l, list, c, start));
                widen(at(l, list, c, start), l->kind[list], m, wide[list]);
            }
        double_sum(o->rule, wide[0], wide[1], wide[2], wide[3], m, k, 0, 1, sums);
    }
}

static void update_chunk(const struct layers *l, const struct options *o, const struct ledger *book, int64_t c, double a,
                         double b) {
    const int64_t n = length_of(l, c);
    if (a != 1 || b != 0) {
        const struct double_factors k = factors_of(o, book, l->row[l->segment[c]]);
        void *p[4];
        for (int list = 0; list < 4; list++) p[list] = at(l, list, c, 0);
        if (all_are(l, FLOAT32) && fabs(b) > 1e-30 && fabs(b) < 1e30) { /* floats hold the coefficients */
            float_update(o->rule, p[0], p[1], p[2], p[3], n, rounded(k), a, b);
        } else if (all_are(l, FLOAT64)) {
            double_update(o->rule, p[0], p[1], p[2], p[3], n, k, a, b);
        } else {
            double wide[4][BLOCK];
            for (int64_t start = 0; start < n; start += BLOCK) {
                const int64_t m = n - start < BLOCK ? n - start : BLOCK;
                for (int list = 0; list < 4; list++) widen(at(l, list, c, start), l->kind[list], m, wide[list]);
                double_update(o->rule, wide[0], wide[1], wide[2], wide[3], m, k, a, b);
                narrow(wide[0], l->kind[0], m, at(l, WEIGHT, c, start));
            }
        }
    }
    if (o->zero) memset(at(l, GRADIENT, c, 0), 0, n * BYTES[l->kind[GRADIENT]]);
}

#ifdef _OPENMP
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

void step_layers(const struct layers *l, const struct options *o, const struct ledger *book) {
    int64_t each = 0;
    for (int list = 0; list < 4; list++)
        if (list < FIRST || (list == FIRST ? has_first(o->rule) : has_second(o->rule))) each += BYTES[l->kind[list]];
#pragma omp parallel if (l->chunks >= SERIAL)
    {
        const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        int64_t end;
        for (int64_t start = 0; start < l->segments; start = end) {
            int64_t size = l->length[start];
            for (end = start + 1; end < l->segments && (size + l->length[end]) * each <= PART; end++) size += l->length[end];
            const int64_t first = l->first[start], chunks = l->first[end] - first;
            const int64_t from = first + chunks * me / threads, to = first + chunks * (me + 1) / threads;
            for (int64_t c = from; c < to; c++) sum_chunk(l, o, book, c);
            /* The only barrier of a part: where other programs take a core, each costs a turn of theirs. So the threads
               that share a segment all compute its coefficients, and the ledger is written at the end. */
#pragma omp barrier
            struct outcome its = {0};
            int64_t of = -1;
            /* From the chunks that were read last backward, a block of them at a time: processors read ahead forward. */
            for (int64_t last = to, next; last > from; last = next) {
                next = last - AHEAD > from ? last - AHEAD : from;
                for (int64_t c = next; c < last; c++) {
                    const int64_t s = l->segment[c];
                    if (s != of) its = settled(l, o, book, of = s);
                    if (!l->place[c]) l->radius[s] = its.radius, l->bad[s] = !its.finite;
                    update_chunk(l, o, book, c, its.a, its.b);
                }
            }
        }
    }
    for (int64_t s = 0; s < l->segments; s++) {
        const int64_t row = l->row[s];
        book->radius[row] = l->radius[s];
        book->bad[row] = l->bad[s];
        book->skipped[row] += l->bad[s];
        if (has_first(o->rule) && o->rule != SGD_AMOM)
            advance(o, book->power1 + row, book->power2 + row, book->age + row);
    }
}

#else

/* The gradient as the rule takes it. */
INLINE REAL OF(gradient)(int rule, REAL g, REAL w, struct OF(factors) k) {
    return rule <= STEPPED ? g : k.sign * g + k.coupled * w;
}

/* The displacement s from the rule's state after this step's update; its length does not matter. */
INLINE REAL OF(displacement)(int rule, REAL d, REAL w, REAL m, REAL v, struct OF(factors) k) {
    REAL s;
    if (rule == GIVEN) return d;
    if (rule == STEPPED) return d - w;
    if (rule == SGD) s = -d;
    else if (rule == MOMENTUM || rule == SGD_AMOM) s = -m;
    else if (rule == NESTEROV) s = -(d + k.mu * m);
    else if (rule == ADAM) s = -(k.scale * m) / (ROOT(v) + k.eps);
    else if (rule == NADAM) s = -(k.scale * m + k.third * d) / (ROOT(v) + k.eps);
    else if (rule == RADAM) s = -(k.scale * m) * (k.third > 0 ? k.third / (ROOT(v) + k.eps) : 1);
    else if (rule == ADAMAX) s = -m / v;
    else s = -d / (ROOT(v) + k.eps);
    return s - k.decoupled * w;
}

/* Update the state where `advances`, and add <w,w>, <w,s>, <s,s> to the sums where `adds`. */
INLINE void OF(sum_rule)(int rule, const REAL *w, const REAL *g, REAL *m, REAL *v, int64_t n, struct OF(factors) k,
                         int advances, int adds, double *sums) {
    double ww = 0, ws = 0, ss = 0;
#pragma omp simd reduction(+ : ww, ws, ss)
    for (int64_t i = 0; i < n; i++) {
        const REAL x = w[i], y = g[i], d = OF(gradient)(rule, y, x, k);
        /* A gradient that is not finite must not stay in the state: its element starts again from 0. */
        const int finite = ABS(y) < (REAL)INFINITY;
        REAL mi = d, vi = d;
        if (has_first(rule)) {
            mi = m[i];
            if (advances) {
                mi = has_second(rule) ? mi + k.rest1 * (d - mi) : k.kept * mi + k.taken * d;
                m[i] = mi = finite ? mi : 0;
            }
        }
        if (has_second(rule)) {
            vi = v[i];
            if (advances) {
                if (rule == ADAGRAD) vi = vi + d * d;
                else if (rule == ADAMAX) vi = k.beta2 * vi > ABS(d) + k.eps ? k.beta2 * vi : ABS(d) + k.eps;
                else vi = FMA(k.rest2 * d, d, k.beta2 * vi); /* rounded as torch rounds it */
                v[i] = vi = finite ? vi : 0;
            }
        }
        if (adds) {
            REAL si = OF(displacement)(rule, d, x, mi, vi, k);
            if (rule != GIVEN) si = finite ? si : (REAL)NAN;
            ww += (double)x * x, ws += (double)x * si, ss += (double)si * si;
        }
    }
    sums[0] += ww, sums[1] += ws, sums[2] += ss;
}

/* w <- a w + b s, as w + ((a - 1) w + b s): what is rounded more than once is small compared with w. */
INLINE void OF(update_rule)(int rule, REAL *w, const REAL *g, const REAL *m, const REAL *v, int64_t n,
                            struct OF(factors) k, double a, double b) {
    const REAL more = a - 1, along = b;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const REAL x = w[i], d = OF(gradient)(rule, g[i], x, k);
        w[i] = x + (more * x + along * OF(displacement)(rule, d, x, m[i], v[i], k));
    }
}

#define SUM(R)                                                                                                         \
    case R:                                                                                                            \
        if (advances && adds) OF(sum_rule)(R, w, g, m, v, n, k, 1, 1, sums);                                           \
        else OF(sum_rule)(R, w, g, m, v, n, k, advances, adds, sums);                                                  \
        break;
static void OF(sum)(int rule, const REAL *w, const REAL *g, REAL *m, REAL *v, int64_t n, struct OF(factors) k,
                    int advances, int adds, double *sums) {
    switch (rule) { EACH_RULE(SUM) }
}
#undef SUM

#define UPDATE(R)                                                                                                      \
    case R: OF(update_rule)(R, w, g, m, v, n, k, a, b); break;
static void OF(update)(int rule, REAL *w, const REAL *g, const REAL *m, const REAL *v, int64_t n, struct OF(factors) k,
                       double a, double b) {
    switch (rule) { EACH_RULE(UPDATE) }
}
#undef UPDATE

#endif
