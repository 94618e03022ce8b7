/* A step of IVON, for one real type: the equations are in optim/ivon.py.  cpu_real.h includes this file. */

/* rho such that softplus(rho) = sigma: sigma + log(1 - exp(-sigma)); near 0, where that would lose digits, the same as
 * log sigma + sigma / 2 + log(sinh(sigma / 2) / (sigma / 2)), whose last term is a series in sigma^2. */
#define LOG_SINH R(0.041666666666666667), R(-0.00034722222222222222), R(5.5114638447971781e-6), R(-1.0333994708994709e-7), \
    R(2.0876756987868099e-9), R(-4.4034917822300e-11)
INLINE REAL NAME(inverse_softplus)(REAL sigma) {
    const int near = sigma < R(0.5);
    REAL z = near ? sigma * sigma : 0, series = sigma * R(0.5) + z * POLY(z, LOG_SINH);
    REAL of = near ? sigma : 1 - NAME(exp_minus)(sigma);
    return NAME(log)(of) + (near ? series : sigma);
}
#undef LOG_SINH

/* mu, rho and mu_m, the running mean of the gradient, from gmu and grho, those of the free energy.  gc: 1 / lambda;  a: the
 * sigma of the prior;  mu_rate: alpha;  mu_scale: 1 / (1 - beta1^t).  Constant weights, and those whose sigma is no normal
 * number, stay as they are. */
CLONES static double NAME(ivon)(const Call *call, const Param *p, int64_t first, int64_t count) {
    const REAL delta = (REAL)(call->gc / (p->a * p->a)), spread = (REAL)((1 - p->mu_beta2) / call->gc), rate = (REAL)(p->mu_rate / call->gc);
    const REAL beta1 = (REAL)p->mu_beta1, new1 = (REAL)(1 - p->mu_beta1), scale1 = (REAL)p->mu_scale;
    REAL *mu = (REAL *)p->mu + first, *rho = (REAL *)p->rho + first, *g = (REAL *)p->mu_m + first;
    const REAL *gmu = (const REAL *)p->gmu + first, *grho = (const REAL *)p->grho + first;
    const REAL *centre = p->centre ? (const REAL *)p->centre + first : NULL;
    for (int64_t i = 0; i < count; i += BLOCK) {
        int m = (int)(count - i < BLOCK ? count - i : BLOCK);
        REAL pull[BLOCK];
        memcpy(pull, mu + i, m * sizeof(REAL));
        if (centre)
            for (int j = 0; j < m; j++) pull[j] -= centre[i + j];
#pragma omp simd
        for (int j = 0; j < m; j++) {
            REAL t, scale, old = rho[i + j], sigma = NAME(softplus)(0, old, &t, &scale), to_prior = delta * pull[j];
            REAL r = spread * grho[i + j] * ((1 + t) * scale); /* sigma / (dsigma / drho) */
            sigma /= SQRT(1 + r * (1 + R(0.5) * r));
            REAL mean = beta1 * g[i + j] + new1 * (gmu[i + j] - to_prior);
            REAL step = rate * (mean * scale1 + to_prior) * (sigma * sigma), changed = NAME(inverse_softplus)(sigma);
            const int random = !(old < -EXP_LIMIT);
            g[i + j] = mean;
            mu[i + j] -= random ? step : 0;
            rho[i + j] = random ? changed : old;
        }
    }
    return 0;
}
