/* The layers of a small fully connected network at drawn weights, y = f(x W^T + b), forward and back, for one real type:
 * part of cpu_real.h.  All matrices are row by row.  There is one kind of product, C = A B, where A and B may be read
 * across; what of B is used next to each other is first copied next to each other, as a panel of COLUMNS columns. */

typedef REAL NAME(Vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define LANES (VECTOR_BYTES / (int)sizeof(REAL))
#define COLUMNS (2 * LANES)
#define ROWS 6 /* with two vectors each they fill the registers */

/* panel[q][j] = b[q * step + j * across] for j < n, and 0 beyond. */
INLINE void NAME(pack)(int64_t k, int n, const REAL *b, int64_t step, int64_t across, REAL *panel) {
    for (int64_t q = 0; q < k; q += 16) { /* in pieces of which all is in the cache, read across or not */
        int64_t last = k - q < 16 ? k : q + 16;
        if (across == 1) {
            for (int64_t r = q; r < last; r++)
                for (int j = 0; j < n; j++) panel[r * COLUMNS + j] = b[r * step + j];
        } else {
            for (int j = 0; j < n; j++)
                for (int64_t r = q; r < last; r++) panel[r * COLUMNS + j] = b[r * step + j * across];
        }
        for (int64_t r = q; n < COLUMNS && r < last; r++)
            for (int j = n; j < COLUMNS; j++) panel[r * COLUMNS + j] = 0;
    }
}

/* Some rows of C, n columns of them, from a panel. */
INLINE void NAME(tile)(const int rows, int64_t k, const REAL *a, int64_t row, int64_t step, const REAL *panel, const REAL *start, REAL *c, int64_t width, int n) {
    NAME(Vector) sum[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        sum[i][0] = *(const NAME(Vector) *)start;
        sum[i][1] = *(const NAME(Vector) *)(start + LANES);
    }
    for (int64_t q = 0; q < k; q++) {
        NAME(Vector) left = *(const NAME(Vector) *)(panel + q * COLUMNS), right = *(const NAME(Vector) *)(panel + q * COLUMNS + LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            REAL factor = a[i * row + q * step];
            sum[i][0] += factor * left;
            sum[i][1] += factor * right;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        if (n == COLUMNS) {
            *(NAME(Vector) *)(c + i * width) = sum[i][0];
            *(NAME(Vector) *)(c + i * width + LANES) = sum[i][1];
        } else memcpy(c + i * width, sum[i], n * sizeof(REAL));
    }
}

/* C[m, n] = start + A B over k, with A[i, q] = a[i * row + q * step] and B[q, j] = b[q * b_step + j * b_across]; start is one
 * number for each column, null for 0. */
CLONES static void NAME(product)(int64_t m, int64_t n, int64_t k, const REAL *a, int64_t row, int64_t step, const REAL *b, int64_t b_step, int64_t b_across, const REAL *start, REAL *c, REAL *panel) {
    for (int64_t j = 0; j < n; j += COLUMNS) {
        int some = (int)(n - j < COLUMNS ? n - j : COLUMNS);
        int64_t i = 0;
        REAL first[COLUMNS] = {0};
        if (start) memcpy(first, start + j, some * sizeof(REAL));
        NAME(pack)(k, some, b + j * b_across, b_step, b_across, panel);
        for (; i + ROWS <= m; i += ROWS) NAME(tile)(ROWS, k, a + i * row, row, step, panel, first, c + i * n + j, n, some);
        for (; i + 2 <= m; i += 2) NAME(tile)(2, k, a + i * row, row, step, panel, first, c + i * n + j, n, some);
        for (; i < m; i++) NAME(tile)(1, k, a + i * row, row, step, panel, first, c + i * n + j, n, some);
    }
}

/* exp(-|x|) - 1 = 2^n (exp(r) - 1) + (2^n - 1) with |r| <= log(2) / 2: where n is 0, nothing cancels. */
INLINE REAL NAME(expm1_minus)(REAL x) {
    UINT u = NAME(bits)(ABS(x)), limit = NAME(bits)(EXP_LIMIT);
    x = -NAME(real)(u < limit ? u : limit);
    REAL shifted = x * R(1.4426950408889634) + ROUND_MAGIC, n = shifted - ROUND_MAGIC, r = x - n * LN2_HIGH - n * LN2_LOW;
    static const REAL exp[] = {EXP};
    REAL power = NAME(real)(NAME(bits)(R(1.0)) + (NAME(bits)(shifted) << MANTISSA));
    return power * (r * NAME(poly)(r, exp + 1, sizeof(exp) / sizeof(REAL) - 1)) + (power - 1);
}

/* f(y), in place.  A NaN stays one. */
INLINE void NAME(activate)(int64_t function, int64_t count, REAL *y) {
    if (function == RELU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) y[i] = y[i] < 0 ? 0 : y[i];
    } else if (function == TANH) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) { /* tanh|y| = -e / (2 + e) */
            REAL e = NAME(expm1_minus)(2 * y[i]), size = -e / (2 + e);
            y[i] = y[i] > 0 ? size : y[i] < 0 ? -size : y[i];
        }
    } else if (function == SIGMOID) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            REAL t = NAME(exp_minus)(y[i]);
            y[i] = (y[i] > 0 ? 1 : y[i] <= 0 ? t : y[i]) / (1 + t);
        }
    }
}

/* g, the gradient by f(y), becomes that by y; h is f(y). */
INLINE void NAME(differentiate)(int64_t function, int64_t count, const REAL *h, REAL *g) {
    if (function == RELU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] = h[i] <= 0 ? 0 : g[i];
    } else if (function == TANH) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] *= 1 - h[i] * h[i];
    } else if (function == SIGMOID) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] *= (1 - h[i]) * h[i];
    }
}

INLINE double NAME(squares)(int64_t count, const REAL *x) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return (double)sum;
}

CLONES static double NAME(layers_forward)(const Layer *layers, int64_t count, int64_t batch, void *panel) {
    for (const Layer *l = layers; l < layers + count; l++) {
        NAME(product)(batch, l->outputs, l->inputs, l->x, l->inputs, 1, l->w, 1, l->inputs, l->b, l->y, panel);
        NAME(activate)(l->function, batch * l->outputs, l->y);
    }
    return 0;
}

/* With G the gradient by x W^T + b: that by x is G W, by W it is G^T x, and by b the sum of the rows of G.  Returns the sum
 * of squares of all that is by weights. */
CLONES static double NAME(layers_backward)(const Layer *layers, int64_t count, int64_t batch, void *panel) {
    double total = 0;
    for (const Layer *l = layers + count - 1; l >= layers; l--) {
        const int64_t n = l->outputs, k = l->inputs;
        REAL *g = l->gy, *gb = l->gb;
        NAME(differentiate)(l->function, batch * n, l->y, g);
        if (l->gx) NAME(product)(batch, k, n, g, n, 1, l->w, k, 1, NULL, l->gx, panel);
        NAME(product)(n, k, batch, g, 1, n, l->x, k, 1, NULL, l->gw, panel);
        total += NAME(squares)(n * k, l->gw);
        if (!gb) continue;
        memset(gb, 0, n * sizeof(REAL));
        for (int64_t i = 0; i < batch; i++)
#pragma omp simd
            for (int64_t j = 0; j < n; j++) gb[j] += g[i * n + j];
        total += NAME(squares)(n, gb);
    }
    return total;
}

/* The likelihood cost, -log P averaged over the rows, and its slope by the output.  With actions, the first number of a row
 * of targets is the one that was taken, and the output has each number for all of them.  NaN for targets that there cannot
 * be. */
static double NAME(cost)(const Cost *c) {
    const REAL *output = c->output, *target = c->target;
    REAL *slope = c->slope;
    const int64_t apart = c->actions ? c->actions : c->columns; /* two numbers about the same target */
    double total = 0, each = 1.0 / (double)c->batch;
    memset(slope, 0, c->batch * c->width * sizeof(REAL));
    for (int64_t row = 0; row < c->batch; row++, output += c->width, slope += c->width) {
        int64_t place = 0;
        if (c->actions) {
            double action = *target++;
            if (!(action >= 0 && action < (double)c->actions)) return NAN;
            place = (int64_t)action;
        }
        for (int64_t i = 0; i < c->columns; i++, place++) {
            double o = output[place], y = *target++;
            if (c->kind == BERNOULLI) {
                if (y != 0 && y != 1) return NAN;
                total += softplus(o) - y * o;
                slope[place] = (REAL)((exp(o - softplus(o)) - y) * each); /* the first is sigmoid(o) */
            } else if (c->kind == GAUSSIAN) {
                double away = (o - y) / c->number;
                total += 0.5 * away * away + log(c->number) + HALF_LOG_2PI;
                slope[place] = (REAL)(away / c->number * each);
            } else { /* noise = number + softplus(s) */
                double s = output[place + apart], noise = c->number + softplus(s), away = (o - y) / noise;
                total += 0.5 * away * away + log(noise) + HALF_LOG_2PI;
                slope[place] = (REAL)(away / noise * each);
                slope[place + apart] = (REAL)((1 - away * away) / noise * exp(s - softplus(s)) * each);
            }
        }
    }
    return (REAL)(total * each); /* infinite where the type has no such number */
}

#undef LANES
#undef COLUMNS
#undef ROWS
