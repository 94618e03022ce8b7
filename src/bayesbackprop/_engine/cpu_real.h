/* The arithmetic of every kernel for one real type.  cpu.c includes this file twice, with
 *   REAL, UINT      the type and the unsigned integer of its size       R(x)     a literal of that type
 *   NAME(x)         x with the suffix of the type                       MANTISSA the stored bits of its mantissa
 *   EXP_LIMIT       where exp(-x) stops falling (while still normal)    EXP ...  coefficients of minimax polynomials
 * A loop runs over at most BLOCK elements and is written so that the compiler can vectorise it: no branch, no call. */

INLINE UINT NAME(bits)(REAL x) { UINT u; memcpy(&u, &x, sizeof u); return u; }
INLINE REAL NAME(real)(UINT u) { REAL x; memcpy(&x, &u, sizeof x); return x; }

/* Even and odd powers apart: two short chains of dependent operations instead of a long one. */
INLINE REAL NAME(poly)(REAL x, const REAL *c, int n) {
    REAL z = x * x, even = c[(n - 1) & ~1], odd = c[(n - 2) | 1];
#pragma GCC unroll 32
    for (int i = ((n - 1) & ~1) - 2; i >= 0; i -= 2) even = even * z + c[i];
#pragma GCC unroll 32
    for (int i = ((n - 2) | 1) - 2; i >= 1; i -= 2) odd = odd * z + c[i];
    return odd * x + even;
}
#define POLY(x, ...) NAME(poly)(x, (const REAL[]){__VA_ARGS__}, sizeof((REAL[]){__VA_ARGS__}) / sizeof(REAL))

/* Adding 1.5 * 2^MANTISSA rounds to an integer, whose low bits are then those of the sum. */
#define ROUND_MAGIC (R(1.5) * (REAL)((UINT)1 << MANTISSA))

/* exp(-|x|), held at exp(-EXP_LIMIT) beyond EXP_LIMIT.  The bound is on the bits, for one instruction instead of
 * several; a NaN becomes the bound as well, so a caller sees to it that x itself enters its result. */
INLINE REAL NAME(exp_minus)(REAL x) {
    UINT u = NAME(bits)(ABS(x)), limit = NAME(bits)(EXP_LIMIT);
    x = -NAME(real)(u < limit ? u : limit);
    REAL shifted = x * R(1.4426950408889634) + ROUND_MAGIC, n = shifted - ROUND_MAGIC;
    REAL y = POLY(x - n * LN2_HIGH - n * LN2_LOW, EXP);
    return NAME(real)(NAME(bits)(y) + (NAME(bits)(shifted) << MANTISSA));
}

/* log(x) for a normal x > 0: x = m 2^e with m in [sqrt(1/2), sqrt(2)). */
INLINE REAL NAME(log)(REAL x) {
    const UINT half = NAME(bits)(R(0.70710678118654752)), one = NAME(bits)(R(1.0));
    const REAL two = (REAL)((UINT)1 << MANTISSA);
    UINT u = NAME(bits)(x) + (one - half);
    REAL e = NAME(real)((u >> MANTISSA) | NAME(bits)(two)) - (two + (REAL)(one >> MANTISSA));
    REAL f = NAME(real)((u & (((UINT)1 << MANTISSA) - 1)) + half) - 1;
    REAL s = f / (2 + f), z = s * s;
    return e * LN2_HIGH + (e * LN2_LOW + (s + s + s * z * POLY(z, LOG)));
}

/* erf(u) for u >= 0, given exp(-u^2): an odd polynomial near 0, so that it is exact in proportion to itself; further out
 * 1 - exp(-u^2) erfcx(u).  From ERFCX_LIMIT on it is 1; a NaN stays one. */
INLINE REAL NAME(erf)(REAL u, REAL exp_minus_square) {
    REAL bounded = u > ERFCX_LIMIT ? ERFCX_LIMIT : u;
    REAL near = u * POLY(u * u, ERF), far = 1 - exp_minus_square * POLY(bounded, ERFCX);
    return u < 1 ? near : far;
}

/* The uint32 as a real, rounded once: both halves and the product are exact. */
INLINE REAL NAME(from32)(uint32_t x) {
    return (REAL)(int32_t)(x >> 16) * 65536 + (REAL)(int32_t)(x & 0xffff);
}

/* Two standard normals out of 64 random bits (Box-Muller). */
INLINE void NAME(box_muller)(uint32_t x0, uint32_t x1, REAL *cosine, REAL *sine) {
    REAL u1 = NAME(from32)(x0) * R(0x1p-32) + R(0x1p-33), u2 = NAME(from32)(x1) * R(0x1p-32);
    REAL radius = SQRT(-2 * NAME(log)(u1));
    REAL shifted = u2 * 4 + ROUND_MAGIC, f = u2 - (shifted - ROUND_MAGIC) * R(0.25), z = f * f;
    REAL s = f * POLY(z, SIN), c = POLY(z, COS);
    UINT q = NAME(bits)(shifted), swap = 0 - (q & 1), sb = NAME(bits)(s), cb = NAME(bits)(c), differ = (sb ^ cb) & swap;
    const int top = 8 * sizeof(REAL) - 2;
    *cosine = radius * NAME(real)(cb ^ differ ^ (((q + 1) & 2) << top));
    *sine = radius * NAME(real)(sb ^ differ ^ ((q & 2) << top));
}

/* eps[0..m) of one block; first is a multiple of 32.  eps has room for whole groups of 32. */
INLINE void NAME(noise)(const Key *key, uint32_t stream, uint32_t draw, int64_t first, int m, REAL *eps) {
    uint32_t x[4][BLOCK / 4];
    REAL cosine[BLOCK / 4], sine[BLOCK / 4];
    int groups = (m + 31) / 32;
    philox(key, (uint32_t)(first / 4), stream, draw, groups * 8, x);
    for (int half = 0; half < 32; half += 16) {
        const uint32_t *a = x[half / 8], *b = x[half / 8 + 1];
#pragma omp simd
        for (int j = 0; j < groups * 8; j++) NAME(box_muller)(a[j], b[j], &cosine[j], &sine[j]);
        for (int g = 0; g < groups; g++) { /* of the 32 numbers of a group, 16 */
            memcpy(eps + 32 * g + half, cosine + 8 * g, 8 * sizeof(REAL));
            memcpy(eps + 32 * g + half + 8, sine + 8 * g, 8 * sizeof(REAL));
        }
    }
}

/* With t = exp(-|rho|):  sigma = softplus(rho) = exp(min(rho, 0)) * scale,  log sigma = min(rho, 0) + log scale,
 * sigmoid(rho) / sigma = 1 / ((1 + t) * scale),  where scale >= log 2 at every rho: nothing under- or overflows.
 * A constant weight has sigma exactly 0. */
INLINE REAL NAME(softplus)(const int mixed, REAL rho, REAL *t, REAL *scale) {
    *t = NAME(exp_minus)(rho);
    REAL ratio = POLY(*t, LOG1P), log1p = *t * ratio; /* log(1 + t) / t, log(1 + t) */
    REAL sigma = rho < 0 ? log1p : rho + log1p;
    *scale = rho < 0 ? ratio : sigma;
    return mixed && CONSTANT(rho) ? 0 : sigma;
}

/* Whether there are constant weights among these. */
INLINE int NAME(mixed)(const REAL *rho, int m) {
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int j = 0; j < m; j++) any |= CONSTANT(rho[j]);
    return any;
}

/* The numbers a prior needs: of each component (for mixtures two) the precision and the log of weight / sigma. */
typedef struct { REAL p1, p2, a1, a2; double constant; REAL areas[GAUSSIANS + 1], squares[GAUSSIANS + 1], wide_from; } NAME(Prior);

INLINE NAME(Prior) NAME(prior)(const Param *p) {
    NAME(Prior) r = {0};
    if (p->kind == NORMAL || p->kind == NORMAL_KL) { r.p1 = (REAL)(1 / (p->a * p->a)); r.constant = -log(p->a); }
    if (p->kind == LAPLACE || p->kind == LAPLACE_KL) { r.p1 = (REAL)(1 / p->a); r.constant = 0.91893853320467274 - log(2 * p->a); }
    if (p->kind == MIXTURE) {
        r.p1 = (REAL)(1 / (p->b * p->b)); r.a1 = (REAL)(log(p->a) - log(p->b));
        r.p2 = (REAL)(1 / (p->c * p->c)); r.a2 = (REAL)(log1p(-p->a) - log(p->c));
    }
    if (p->kind == MIXTURE_KL) {
        const Bump *bump = (const Bump *)p->bump;
        r.p1 = (REAL)(1 / (bump->wide * bump->wide)); r.constant = log(bump->weight) - log(bump->wide);
        for (int k = 0; k <= GAUSSIANS; k++) r.areas[k] = (REAL)bump->areas[k], r.squares[k] = (REAL)bump->squares[k];
        r.wide_from = WIDE_FROM * SQRT(r.squares[GAUSSIANS]);
    }
    if (p->kind == NONE) r.constant = 0.91893853320467274;
    return r; /* constant: of log P(v) + log(2 pi) / 2, the part without v */
}

/* The first of a mixture's Gaussians that a block needs: where sigma is wide the last stands for all the others. */
INLINE int NAME(first_gaussian)(const NAME(Prior) *r, int m, const REAL *sigma) {
    int narrow = 0;
#pragma omp simd reduction(| : narrow)
    for (int j = 0; j < m; j++) narrow |= sigma[j] < r->wide_from;
    return narrow ? 0 : GAUSSIANS;
}
#define COUNTS(k, sigma) (((k) == GAUSSIANS) == ((sigma) >= r->wide_from))

/* The sum of the expectations of a mixture's bump over w: sum_k area_k / v_k exp(-v^2 / (2 v_k^2)), v_k^2 = s_k^2 + sigma^2.
 * Of a constant weight, whose sigma is 0, there is none. */
CLONES static double NAME(bumps)(const NAME(Prior) *r, int m, const REAL *sigma, const REAL *v) {
    REAL heights[BLOCK] = {0}, sum = 0;
    for (int k = NAME(first_gaussian)(r, m, sigma); k <= GAUSSIANS; k++) {
        const REAL area = r->areas[k], square = r->squares[k];
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL precision = 1 / (square + sigma[j] * sigma[j]);
            REAL height = area * SQRT(precision) * NAME(exp_minus)(v[j] * v[j] * precision / 2);
            heights[j] += COUNTS(k, sigma[j]) ? height : 0;
        }
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < m; j++) sum += sigma[j] > 0 ? heights[j] : 0;
    return (double)sum;
}

/* Add to slope and spread, as of expected_slope, what the bump of a mixture has in them. */
CLONES static void NAME(bump_slopes)(const NAME(Prior) *r, int m, const REAL *v, const REAL *sigma, REAL *slope, REAL *spread) {
    for (int k = NAME(first_gaussian)(r, m, sigma); k <= GAUSSIANS; k++) {
        const REAL area = r->areas[k], square = r->squares[k];
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL precision = 1 / (square + sigma[j] * sigma[j]), z = v[j] * v[j] * precision;
            REAL height = area * precision * SQRT(precision) * NAME(exp_minus)(z / 2);
            height = COUNTS(k, sigma[j]) ? height : 0;
            slope[j] += height * v[j];
            spread[j] += height * (1 - z) * sigma[j] * sigma[j];
        }
    }
}
#undef COUNTS

/* In closed form v is the mean of w, less the centre.  It becomes the v at which -log P(v) is the expectation of -log P
 * over w: sqrt(E[v^2]) for a Normal prior and for the wider component of a mixture, E|v| = sigma sqrt(2 / pi) exp(-u^2) + |v| erf(u), u = |v| / (sigma sqrt(2)), for
 * a Laplace. */
INLINE void NAME(expect)(int64_t kind, int m, const REAL *sigma, REAL *v) {
    if (kind == NORMAL_KL || kind == MIXTURE_KL) {
#pragma omp simd
        for (int j = 0; j < m; j++) v[j] = SQRT(v[j] * v[j] + sigma[j] * sigma[j]);
    } else if (kind == LAPLACE_KL) {
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL size = ABS(v[j]), u = size / (sigma[j] * R(1.4142135623730951)), e = NAME(exp_minus)(u * u);
            v[j] = sigma[j] * R(0.79788456080286536) * e + size * NAME(erf)(u, e);
        }
    }
}

/* Of the expectation of -log P over w: slope, the derivative by the mean, and spread, sigma times that by sigma. */
INLINE void NAME(expected_slope)(int64_t kind, const NAME(Prior) *r, int m, const REAL *v, const REAL *sigma, REAL *slope, REAL *spread) {
    REAL p1 = r->p1;
    if (kind == NORMAL_KL || kind == MIXTURE_KL) {
#pragma omp simd
        for (int j = 0; j < m; j++) slope[j] = v[j] * p1, spread[j] = sigma[j] * sigma[j] * p1;
        if (kind == MIXTURE_KL) NAME(bump_slopes)(r, m, v, sigma, slope, spread);
    } else if (kind == LAPLACE_KL) {
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL u = ABS(v[j]) / (sigma[j] * R(1.4142135623730951)), e = NAME(exp_minus)(u * u), size = NAME(erf)(u, e);
            slope[j] = (v[j] < 0 ? -size : size) * p1;
            spread[j] = sigma[j] * R(0.79788456080286536) * e * p1;
        }
    }
}

/* With slopes, slope = -d log P(v) / dv.  With costs, the sum of -log P(v), but for the constant and for the logarithms of
 * what each factor is multiplied by. */
INLINE REAL NAME(prior_at)(const int slopes, const int costs, const int given, int64_t kind, const NAME(Prior) *r, int m, const REAL *v, REAL *slope, REAL *factor) {
    REAL sum = 0, p1 = r->p1, p2 = r->p2, a1 = r->a1, a2 = r->a2, a = a1 - a2, b = (p2 - p1) / 2;
    if (kind == NORMAL || kind == NORMAL_KL || kind == MIXTURE_KL) {
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < m; j++) {
            if (slopes) slope[j] = v[j] * p1;
            if (costs) sum += v[j] * v[j] * p1 / 2;
        }
    } else if (kind == LAPLACE || kind == LAPLACE_KL) {
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < m; j++) {
            if (slopes) slope[j] = v[j] > 0 ? p1 : v[j] < 0 ? -p1 : v[j];
            if (costs) sum += ABS(v[j]) * p1;
        }
    } else if (kind == MIXTURE) {
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < m; j++) { /* both components over the larger one, and that times 1 + t */
            REAL q = v[j] * v[j], d = a + b * q, t = NAME(exp_minus)(d), u = 1 + t;
            if (slopes) slope[j] = v[j] * ((d < 0 ? p1 * t + p2 : p1 + p2 * t) / u);
            if (costs) factor[j] = (given ? factor[j] : 1) * u, sum += d < 0 ? q * p2 / 2 - a2 : q * p1 / 2 - a1;
        }
    } else if (slopes) memset(slope, 0, m * sizeof(REAL));
    return sum;
}

/* The sum of the logarithms of m factors, one logarithm for four of them; what is beyond m becomes 1. */
INLINE REAL NAME(logs)(int m, REAL *factor) {
    REAL sum = 0;
    for (int j = m; j < BLOCK; j++) factor[j] = 1;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < BLOCK / 4; j++)
        sum += NAME(log)(factor[j] * factor[j + BLOCK / 4] * (factor[j + BLOCK / 2] * factor[j + BLOCK / 4 * 3]));
    return sum;
}

/* The sum of -log P(v) over m weights of which some are constant: their v is 0, and they are left out.  The logarithms of
 * given factors are subtracted. */
INLINE double NAME(prior_cost)(const int slopes, const int given, int64_t kind, const NAME(Prior) *r, int m, REAL constants, const REAL *v, REAL *slope, REAL *factor) {
    double total = NAME(prior_at)(slopes, 1, given, kind, r, m, v, slope, factor);
    if (given || kind == MIXTURE) total -= (double)NAME(logs)(m, factor);
    if (constants) {
        REAL zero = 0, one = 1;
        double each = NAME(prior_at)(0, 1, 1, kind, r, 1, &zero, &zero, &one);
        total -= constants * (each - (double)NAME(log)(one));
    }
    return total - (m - constants) * r->constant;
}

/* Only a mixed block has constant weights: each of the functions below is two loops out of one source. */
#define FIXED(rho) (mixed && CONSTANT(rho))

/* w = mu + sigma * eps in one block.  Returns log q(w|theta) - log P(w), with the eps that was drawn: w - mu would lose
 * it where sigma is below the spacing of floats around mu.  In closed form, its expectation: eps^2 becomes 1, and -log P
 * what the function expect says. */
INLINE double NAME(draw_block)(const int mixed, const Call *call, const Param *p, const NAME(Prior) *prior, int64_t i, int m) {
    const REAL *mu = (const REAL *)p->mu + i, *rho = (const REAL *)p->rho + i, *centre = (const REAL *)p->centre;
    REAL *w = (REAL *)p->w + i, eps[BLOCK], v[BLOCK], spread[BLOCK], factor[BLOCK], sum = 0, constants = 0;
    const int closed = CLOSED(p->kind), deviates = (int)p->deviates;
    NAME(noise)(&call->key, (uint32_t)p->stream, call->draw, i, m, eps);
#pragma omp simd reduction(+ : sum, constants)
    for (int j = 0; j < m; j++) {
        REAL t, scale, sigma = NAME(softplus)(mixed, rho[j], &t, &scale), low = rho[j] < 0 ? rho[j] : 0;
        w[j] = (deviates ? 0 : mu[j]) + sigma * eps[j];
        v[j] = closed ? mu[j] : w[j];
        spread[j] = sigma;
        sum -= FIXED(rho[j]) ? 0 : R(0.5) * (closed ? 1 : eps[j] * eps[j]) + low;
        factor[j] = FIXED(rho[j]) ? 1 : scale;
        constants += FIXED(rho[j]) ? R(1.0) : R(0.0);
    }
    if (deviates && !closed)
        for (int j = 0; j < m; j++) v[j] += mu[j];
    if (centre)
        for (int j = 0; j < m; j++) v[j] -= centre[i + j];
    const double bumps = p->kind == MIXTURE_KL ? NAME(bumps)(prior, m, spread, v) : 0;
    if (closed) NAME(expect)(p->kind, m, spread, v);
    if (mixed)
        for (int j = 0; j < m; j++) v[j] = FIXED(rho[j]) ? 0 : v[j];
    return (double)sum - bumps + NAME(prior_cost)(0, 1, p->kind, prior, m, constants, v, NULL, factor);
}

CLONES static double NAME(draw)(const Call *call, const Param *p, int64_t first, int64_t count) {
    NAME(Prior) prior = NAME(prior)(p);
    double total = 0;
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        if (NAME(mixed)((const REAL *)p->rho + i, m)) total += NAME(draw_block)(1, call, p, &prior, i, m);
        else total += NAME(draw_block)(0, call, p, &prior, i, m);
    }
    return total;
}

/* The gradients of mu and rho in one block from gw, gm and gv (gmu may overwrite gm, gw or w; grho may overwrite w) and gc, that of the
 * complexity log q(w|theta) - log P(w).  In closed form the prior is met at mu, and its share in rho does not depend on w.
 * The noise is recovered, not generated again: sigma * eps is w - mu, to the rounding of the w that was really used.
 * Of several draws this is the last: gw is the sum of their gradients, gmu itself, and grho what redraw left.  Returns the
 * sum of -log P(w), and of -log sigma for each of them. */
INLINE double NAME(backward_block)(const int mixed, const int varies, const int several, const Param *p, const NAME(Prior) *prior, REAL gc, int64_t i, int m, REAL *gmu, REAL *grho) {
    static const REAL zeros[BLOCK];
    const REAL *mu = (const REAL *)p->mu + i, *rho = (const REAL *)p->rho + i, *w = (const REAL *)p->w + i;
    const REAL *centre = (const REAL *)p->centre, *gw = p->gw ? (const REAL *)p->gw + i : zeros;
    const REAL *gm = p->gm ? (const REAL *)p->gm + i : gw, *gv = (const REAL *)p->gv + i;
    REAL v[BLOCK], slope[BLOCK], deviation[BLOCK];
    REAL sigma[BLOCK], divisor[BLOCK], spread[BLOCK], factor[BLOCK], scales[BLOCK], low = 0, constants = 0;
    const int closed = CLOSED(p->kind), costs = several && !closed;
    const REAL draws = several ? (REAL)(p->before + 1) : 1, once = closed ? draws * gc : gc; /* in closed form all are alike */
    double total = 0;
    memcpy(v, closed ? mu : w, m * sizeof(REAL));
    memcpy(deviation, w, m * sizeof(REAL));
    if (!p->deviates)
        for (int j = 0; j < m; j++) deviation[j] -= mu[j];
    else if (!closed)
        for (int j = 0; j < m; j++) v[j] += mu[j];
    if (centre)
        for (int j = 0; j < m; j++) v[j] -= centre[i + j];
#pragma omp simd reduction(+ : low, constants)
    for (int j = 0; j < m; j++) {
        REAL t, scale;
        sigma[j] = NAME(softplus)(mixed, rho[j], &t, &scale);
        divisor[j] = (1 + t) * scale;
        if (costs) {
            scales[j] = FIXED(rho[j]) ? 1 : scale;
            low += FIXED(rho[j]) || rho[j] >= 0 ? 0 : rho[j];
            constants += FIXED(rho[j]) ? R(1.0) : R(0.0);
        }
    }
    if (closed) NAME(expected_slope)(p->kind, prior, m, v, sigma, slope, spread);
    else if (costs) {
        if (mixed)
            for (int j = 0; j < m; j++) v[j] = FIXED(rho[j]) ? 0 : v[j];
        total = NAME(prior_cost)(1, 0, p->kind, prior, m, constants, v, slope, factor);
        total -= draws * ((double)low + (double)NAME(logs)(m, scales));
    } else NAME(prior_at)(1, 0, 0, p->kind, prior, m, v, slope, NULL);
    if (p->kind == NONE && p->slope) memcpy(slope, (const REAL *)p->slope + i, m * sizeof(REAL));
#pragma omp simd
    for (int j = 0; j < m; j++) {
        REAL along = gw[j] * deviation[j] + once * (closed ? spread[j] : slope[j] * deviation[j]);
        if (varies) along += 2 * sigma[j] * sigma[j] * gv[j];
        if (several) along += grho[j];
        REAL g = gm[j] + once * slope[j], h = (along - draws * gc) / divisor[j]; /* (g eps - gc / sigma) sigmoid(rho) */
        gmu[j] = FIXED(rho[j]) ? 0 : g;
        grho[j] = FIXED(rho[j]) ? 0 : h;
    }
    return total;
}

INLINE double NAME(gradients)(const Param *p, const NAME(Prior) *prior, REAL gc, int64_t i, int m, REAL *gmu, REAL *grho) {
    if (NAME(mixed)((const REAL *)p->rho + i, m)) {
        if (p->gv) return NAME(backward_block)(1, 1, 0, p, prior, gc, i, m, gmu, grho);
        if (p->before) return NAME(backward_block)(1, 0, 1, p, prior, gc, i, m, gmu, grho);
        return NAME(backward_block)(1, 0, 0, p, prior, gc, i, m, gmu, grho);
    }
    if (p->gv) return NAME(backward_block)(0, 1, 0, p, prior, gc, i, m, gmu, grho);
    if (p->before) return NAME(backward_block)(0, 0, 1, p, prior, gc, i, m, gmu, grho);
    return NAME(backward_block)(0, 0, 0, p, prior, gc, i, m, gmu, grho);
}

CLONES static double NAME(backward)(const Call *call, const Param *p, int64_t first, int64_t count) {
    NAME(Prior) prior = NAME(prior)(p);
    double total = 0;
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        total += NAME(gradients)(p, &prior, (REAL)call->gc, i, m, (REAL *)p->gmu + i, (REAL *)p->grho + i);
    }
    return total;
}

/* A step of Adam on the n numbers x, whose gradient is g.  The means are those of a weighted average, which at beta 0
 * forgets all that was before. */
typedef struct { REAL rate, scale, beta1, new1, beta2, new2, eps, keep; } NAME(Adam);
#define ADAM_OF(p, x) (NAME(Adam)){(REAL)p->x##_rate, (REAL)p->x##_scale, (REAL)p->x##_beta1, (REAL)(1 - p->x##_beta1), \
    (REAL)p->x##_beta2, (REAL)(1 - p->x##_beta2), (REAL)p->x##_eps, (REAL)p->x##_keep}

INLINE void NAME(adam_block)(NAME(Adam) a, int64_t n, const REAL *g, REAL *x, REAL *m, REAL *v) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        m[j] = a.beta1 * m[j] + a.new1 * g[j];
        v[j] = a.beta2 * v[j] + a.new2 * (g[j] * g[j]);
        x[j] = a.keep * x[j] - a.rate * m[j] / (SQRT(v[j]) * a.scale + a.eps);
    }
}

CLONES static double NAME(adam)(const Call *call, const Param *p, int64_t i, int64_t count) {
    (void)call;
    NAME(adam_block)(ADAM_OF(p, mu), count, (const REAL *)p->gmu + i, (REAL *)p->mu + i, (REAL *)p->mu_m + i, (REAL *)p->mu_v + i);
    return 0;
}

/* The gradients of a block go straight into its step and are never in memory. */
CLONES static double NAME(backward_adam)(const Call *call, const Param *p, int64_t first, int64_t count) {
    NAME(Prior) prior = NAME(prior)(p);
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        REAL gmu[BLOCK], grho[BLOCK];
        NAME(gradients)(p, &prior, (REAL)call->gc, i, m, gmu, grho);
        NAME(adam_block)(ADAM_OF(p, mu), m, gmu, (REAL *)p->mu + i, (REAL *)p->mu_m + i, (REAL *)p->mu_v + i);
        NAME(adam_block)(ADAM_OF(p, rho), m, grho, (REAL *)p->rho + i, (REAL *)p->rho_m + i, (REAL *)p->rho_v + i);
    }
    return 0;
}

#include "cpu_ivon.h"

/* From one draw to the next, in one block.  With g_k the gradient at the weights w_k of draw k, that of its prior included,
 * and S_k = g_1 + ... + g_k,
 *   sum_k g_k (w_k - mu) = S_n (w_n - mu) - sum_{k < n} S_k (w_{k+1} - w_k),
 * so a draw can be forgotten when the next is made, and its gradient when it is in the sum.  gmu, S_{k-1} and the gradient
 * of the likelihood at w_k, becomes S_k; grho takes its term of the second sum; w becomes w_{k+1}.  Returns the sum of
 * -log P(w_k) and of -eps^2 / 2 of draw k + 1; in closed form nothing, since the complexity is known. */
INLINE double NAME(redraw_block)(const int mixed, const Call *call, const Param *p, const NAME(Prior) *prior, REAL gc, int64_t i, int m) {
    static const REAL zeros[BLOCK];
    const REAL *mu = (const REAL *)p->mu + i, *rho = (const REAL *)p->rho + i, *centre = (const REAL *)p->centre;
    REAL *w = (REAL *)p->w + i, *gmu = (REAL *)p->gmu + i, *grho = (REAL *)p->grho + i;
    const REAL *earlier = p->before ? grho : zeros;
    REAL eps[BLOCK], v[BLOCK], slope[BLOCK], factor[BLOCK], sum = 0, constants = 0;
    const int closed = CLOSED(p->kind);
    double total = 0;
    NAME(noise)(&call->key, (uint32_t)p->stream, call->draw, i, m, eps);
    if (closed) memset(slope, 0, m * sizeof(REAL));
    else {
        memcpy(v, w, m * sizeof(REAL));
        if (centre)
            for (int j = 0; j < m; j++) v[j] -= centre[i + j];
        if (mixed)
            for (int j = 0; j < m; j++) {
                constants += FIXED(rho[j]) ? R(1.0) : R(0.0);
                v[j] = FIXED(rho[j]) ? 0 : v[j];
            }
        total = NAME(prior_cost)(1, 0, p->kind, prior, m, constants, v, slope, factor);
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < m; j++) {
        REAL t, scale, next = mu[j] + NAME(softplus)(mixed, rho[j], &t, &scale) * eps[j], g = gmu[j] + gc * slope[j];
        sum -= FIXED(rho[j]) ? 0 : R(0.5) * eps[j] * eps[j];
        grho[j] = earlier[j] - g * (next - w[j]);
        gmu[j] = g;
        w[j] = next;
    }
    return closed ? 0 : total + (double)sum;
}

CLONES static double NAME(redraw)(const Call *call, const Param *p, int64_t first, int64_t count) {
    NAME(Prior) prior = NAME(prior)(p);
    double total = 0;
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        if (NAME(mixed)((const REAL *)p->rho + i, m)) total += NAME(redraw_block)(1, call, p, &prior, (REAL)call->gc, i, m);
        else total += NAME(redraw_block)(0, call, p, &prior, (REAL)call->gc, i, m);
    }
    return total;
}

/* sigma^2, into w. */
CLONES static double NAME(variance)(const Call *call, const Param *p, int64_t first, int64_t count) {
    (void)call;
    const REAL *rho = (const REAL *)p->rho;
    REAL *w = (REAL *)p->w;
#pragma omp simd
    for (int64_t i = first; i < first + count; i++) {
        REAL t, scale, sigma = NAME(softplus)(1, rho[i], &t, &scale);
        w[i] = sigma * sigma;
    }
    return 0;
}

/* Only the noise, of call->many draws, one after another in a [many, n] buffer. */
CLONES static double NAME(normal)(const Call *call, const Param *p, int64_t first, int64_t count) {
    for (int64_t k = 0; k < call->many; k++)
        for (int64_t i = first; i < first + count; i += BLOCK) {
            int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
            REAL eps[BLOCK];
            NAME(noise)(&call->key, (uint32_t)p->stream, call->draw + (uint32_t)k, i, m, eps);
            memcpy((REAL *)p->w + k * p->n + i, eps, m * sizeof(REAL));
        }
    return 0;
}

/* Only random signs: the top bit of each word. */
CLONES static double NAME(signs)(const Call *call, const Param *p, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        uint32_t x[4][BLOCK / 4];
        philox(&call->key, (uint32_t)(i / 4), (uint32_t)p->stream, call->draw, (m + 31) / 32 * 8, x);
        for (int j = 0; j < m; j++)
            ((REAL *)p->w)[i + j] = 1 - 2 * (REAL)(int32_t)(x[j % 32 / 8][j / 32 * 8 + j % 8] >> 31);
    }
    return 0;
}

/* call->many draws of w, one after another in a [many, n] buffer.  Returns the sum of -eps^2 / 2. */
CLONES static double NAME(draws)(const Call *call, const Param *p, int64_t first, int64_t count) {
    double total = 0;
    for (int64_t i = first; i < first + count; i += BLOCK) {
        int m = (int)(first + count - i < BLOCK ? first + count - i : BLOCK);
        const REAL *mu = (const REAL *)p->mu + i, *rho = (const REAL *)p->rho + i;
        REAL eps[BLOCK], sigma[BLOCK];
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL t, scale;
            sigma[j] = NAME(softplus)(1, rho[j], &t, &scale);
        }
        for (int64_t k = 0; k < call->many; k++) {
            REAL *w = (REAL *)p->w + k * p->n + i, sum = 0;
            NAME(noise)(&call->key, (uint32_t)p->stream, call->draw + (uint32_t)k, i, m, eps);
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < m; j++) {
                w[j] = mu[j] + sigma[j] * eps[j];
                sum -= sigma[j] > 0 ? R(0.5) * eps[j] * eps[j] : 0;
            }
            total += (double)sum;
        }
    }
    return total;
}

#include "cpu_layers.h"

#undef FIXED
#undef ADAM_OF
#undef REAL
#undef UINT
#undef R
#undef NAME
#undef MANTISSA
#undef EXP_LIMIT
#undef LN2_HIGH
#undef LN2_LOW
#undef SQRT
#undef ABS
#undef EXP
#undef LOG1P
#undef LOG
#undef SIN
#undef COS
#undef ERF
#undef ERFCX
#undef ERFCX_LIMIT
#undef POLY
#undef ROUND_MAGIC
