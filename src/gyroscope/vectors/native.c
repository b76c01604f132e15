/* Inner products and linear combinations of many tensors, on all cores of a CPU: what `dots`, `combine_` and a monitor need.

   `native.py` compiles this file on the machine that runs it, and calls it through ctypes. Work is cut into chunks of a
   fixed size within each tensor, so that a sum has the same digits whatever the number of threads and whatever other
   tensors there are. Sums are taken in double precision, in which products of two floats are exact. */

#include <stdint.h>
#include <string.h>

#define CHUNK 8192 /* elements: two of these in floats, and the doubles of one BLOCK each, fit in the first cache */
#define BLOCK 512
#define MOST 8     /* lists of tensors, at most */
#define SERIAL 4   /* fewer chunks than this are not worth waking threads for */

enum { FLOAT32, FLOAT64, BFLOAT16 };

static const int64_t BYTES[] = {4, 8, 2};

static void widen(const char *from, int kind, int64_t n, double *restrict to) {
    if (kind == FLOAT32) {
        const float *x = (const float *)from;
        for (int64_t i = 0; i < n; i++) to[i] = x[i];
    } else if (kind == FLOAT64) {
        memcpy(to, from, 8 * n);
    } else {
        const uint16_t *x = (const uint16_t *)from;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)x[i] << 16;
            float value;
            memcpy(&value, &bits, 4);
            to[i] = value;
        }
    }
}

static uint16_t to_bfloat16(double wide) {
    /* By way of a float, to nearest, ties to even, as torch does. */
    float value = (float)wide;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void narrow(const double *from, int kind, int64_t n, char *to) {
    if (kind == FLOAT32) {
        float *x = (float *)to;
        for (int64_t i = 0; i < n; i++) x[i] = (float)from[i];
    } else if (kind == FLOAT64) {
        memcpy(to, from, 8 * n);
    } else {
        uint16_t *x = (uint16_t *)to;
        for (int64_t i = 0; i < n; i++) x[i] = to_bfloat16(from[i]);
    }
}

/* <x,x>, <x,y>, <y,y> of floats: what a step of Layca needs. */
static void three(const float *restrict x, const float *restrict y, int64_t n, double *out) {
    double xx = 0, xy = 0, yy = 0;
#pragma omp simd reduction(+ : xx, xy, yy)
    for (int64_t i = 0; i < n; i++) {
        double a = x[i], b = y[i];
        xx += a * a;
        xy += a * b;
        yy += b * b;
    }
    out[0] += xx, out[1] += xy, out[2] += yy;
}

static double inner(const double *restrict x, const double *restrict y, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* The sums of each chunk. Chunk c is the `place[c]`-th of segment `segment[c]`, which has `length[segment]` elements.
   List l of that segment starts at `address[l * segments + segment]` and has the type `kind[l * segments + segment]`.
   Pair k is (pair[2k], pair[2k + 1]). `partial` is [chunks, pairs]. */
void chunk_dots(int64_t chunks, const int64_t *segment, const int64_t *place, const int64_t *length, int64_t segments,
                int64_t lists, const int64_t *address, const int8_t *kind, int64_t pairs, const int8_t *pair,
                double *partial) {
    const int usual = lists == 2 && pairs == 3 && !pair[0] && !pair[1] && !pair[2] && pair[3] == 1 && pair[4] == 1 &&
                      pair[5] == 1;
#pragma omp parallel for schedule(static) if (chunks >= SERIAL)
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t s = segment[c], first = place[c] * CHUNK;
        const int64_t left = length[s] - first, n = left < CHUNK ? left : CHUNK;
        double *sums = partial + c * pairs;
        memset(sums, 0, pairs * sizeof(double));
        if (usual && kind[s] == FLOAT32 && kind[segments + s] == FLOAT32) {
            three((const float *)address[s] + first, (const float *)address[segments + s] + first, n, sums);
            continue;
        }
        double wide[MOST][BLOCK];
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t m = n - start < BLOCK ? n - start : BLOCK;
            for (int64_t l = 0; l < lists; l++) {
                const int k = kind[l * segments + s];
                widen((const char *)address[l * segments + s] + (first + start) * BYTES[k], k, m, wide[l]);
            }
            for (int64_t p = 0; p < pairs; p++) sums[p] += inner(wide[pair[2 * p]], wide[pair[2 * p + 1]], m);
        }
    }
}

/* x <- a x + b y for each chunk, in double precision, rounded once. Where a = 1 and b = 0, x stays as it is. */
void chunk_combine(int64_t chunks, const int64_t *segment, const int64_t *place, const int64_t *length,
                   int64_t segments, const int64_t *address, const int8_t *kind, const double *a, const double *b) {
#pragma omp parallel for schedule(static) if (chunks >= SERIAL)
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t s = segment[c], first = place[c] * CHUNK;
        const int64_t left = length[s] - first, n = left < CHUNK ? left : CHUNK;
        const double as = a[s], bs = b[s];
        if (as == 1.0 && bs == 0.0) continue;
        if (kind[s] == FLOAT32 && kind[segments + s] == FLOAT32) {
            float *x = (float *)address[s] + first;
            const float *y = (const float *)address[segments + s] + first; /* may be x itself */
#pragma omp simd
            for (int64_t i = 0; i < n; i++) x[i] = (float)(as * x[i] + bs * y[i]);
            continue;
        }
        double x[BLOCK], y[BLOCK];
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t m = n - start < BLOCK ? n - start : BLOCK;
            const int kx = kind[s], ky = kind[segments + s];
            char *to = (char *)address[s] + (first + start) * BYTES[kx];
            widen(to, kx, m, x);
            widen((const char *)address[segments + s] + (first + start) * BYTES[ky], ky, m, y);
            for (int64_t i = 0; i < m; i++) x[i] = as * x[i] + bs * y[i];
            narrow(x, kx, m, to);
        }
    }
}

/* The thirteen sums of one stretch; see `chunk_moves`. The displacement goes to `kept`, which may be p itself. */
#define DEFINE_SUMS(name, real)                                                                                        \
    static void name(const real *w, const real *g, const real *r, const real *since, const real *last,                 \
                     const real *before, const real *p, real *kept, int64_t n, double *out) {                          \
        double ww = 0, we = 0, ee = 0, gg = 0, wg = 0, uu = 0, wu = 0, gu = 0, vv = 0, wv = 0, pp = 0, vp = 0, bb = 0; \
        _Pragma("omp simd reduction(+ : ww, we, ee, gg, wg, uu, wu, gu, vv, wv, pp, vp, bb)")                          \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const double x = w[i], y = g[i], z = p[i], b = before[i];                                                  \
            const double e = x - r[i], u = x - since[i], v = x - last[i];                                              \
            ww += x * x, we += x * e, ee += e * e, gg += y * y, wg += x * y;                                           \
            uu += u * u, wu += x * u, gu += y * u, vv += v * v, wv += x * v;                                           \
            pp += z * z, vp += v * z, bb += b * b;                                                                     \
            kept[i] = (real)v;                                                                                         \
        }                                                                                                              \
        const double sums[] = {ww, we, ee, gg, wg, uu, wu, gu, vv, wv, pp, vp, bb};                                    \
        for (int k = 0; k < 13; k++) out[k] += sums[k];                                                                \
    }
DEFINE_SUMS(sums_of_floats, float)
DEFINE_SUMS(sums_of_doubles, double)

/* Everything that a monitor needs of a step, in one pass. Of each layer: the weights w, their gradient g, and parts of
   flat buffers that begin at `offset`: w0 (`buffer[0]`), the weights before the step (1), the weights at the last
   measured step (2) and the last displacement (3), each 0 where there is none. With e = w - w0, u = w - before (or - the
   last measured ones), v = w - the last measured ones (or u) and p the last displacement, `partial` gets

       ww we ee gg wg uu wu gu vv wv pp vp bb

   and p becomes v where `keep` is set. `kind` holds the types of w, g and the four buffers. */
void chunk_moves(int64_t chunks, const int64_t *segment, const int64_t *place, const int64_t *length, int64_t segments,
                 const int64_t *address, const int64_t *offset, const int64_t *buffer, const int8_t *kind, int moved,
                 int keep, double *partial) {
    int floats = 1;
    for (int l = 0; l < 6; l++) floats &= kind[l] == FLOAT32;
#pragma omp parallel for schedule(static) if (chunks >= SERIAL)
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t s = segment[c], first = place[c] * CHUNK;
        const int64_t left = length[s] - first, n = left < CHUNK ? left : CHUNK;
        double *sums = partial + 13 * c, wide[6][BLOCK], zeros[BLOCK] = {0}, spare[BLOCK];
        memset(sums, 0, 13 * sizeof(double));
        for (int64_t start = 0; start < n; start += BLOCK) {
            const int64_t m = n - start < BLOCK ? n - start : BLOCK;
            const char *at[6]; /* w, g and the buffers, 0 where there is none */
            for (int l = 0; l < 6; l++) {
                const int64_t base = l < 2 ? address[l * segments + s] : buffer[l - 2];
                const int64_t element = first + start + (l < 2 ? 0 : offset[s]);
                at[l] = base ? (const char *)base + element * BYTES[kind[l]] : 0;
            }
            char *to = (char *)at[5];
            if (!floats)
                for (int l = 0; l < 6; l++)
                    if (at[l]) {
                        widen(at[l], kind[l], m, wide[l]);
                        at[l] = (const char *)wide[l];
                    }
            const void *none = zeros, *last = at[4] ? at[4] : at[3] ? at[3] : at[0], *since = at[3] ? at[3] : last;
            const void *before = at[3] ? at[3] : none, *p = moved && at[5] ? at[5] : none;
            if (floats) {
                sums_of_floats((const float *)at[0], (const float *)at[1], (const float *)at[2], since, last, before, p,
                               keep ? (float *)to : (float *)spare, m, sums);
            } else {
                sums_of_doubles((const double *)at[0], (const double *)at[1], (const double *)at[2], since, last, before,
                                p, spare, m, sums);
                if (keep) narrow(spare, kind[5], m, to);
            }
        }
    }
}
