/* Fused kernels for variational weights  w = mu + softplus(rho) * eps  on the CPU, as a Python extension (abi3).
 * eps is a pure function of (seed, stream, step, draw, element), so nothing but mu and rho is ever stored.
 * Every kernel takes a table of parameters and runs over all of them in one call, in chunks shared out by OpenMP;
 * the chunks do not depend on the number of threads, hence neither do the results. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 256           /* elements held on the stack at a time: a multiple of 32 */
#define CHUNK 8192          /* elements of one task: a multiple of BLOCK */
#define PARALLEL_FROM 32768 /* elements below which the calling thread works alone, holding the GIL */

#define INLINE static inline __attribute__((always_inline))
/* On x86-64 the kernels are compiled for three instruction sets, and the best is taken when the module is loaded.  Tests
 * compile one alone, with -march and -DVECTORS=n: n words in a vector of Philox (0: plain, 8: AVX2, 16: AVX-512). */
#if defined(__x86_64__) && defined(__linux__) && !defined(VECTORS)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define VECTORS 16
#else
#define CLONES
#endif
#ifndef VECTORS
#define VECTORS 0
#endif
#if VECTORS
#include <immintrin.h>
#endif

#define CONSTANT(rho) ((rho) < -1000) /* as in posterior.py */

/* The priors by number; parameters.py numbers them in the order of PRIORS, which is handed to it.  Of those that end in _KL
 * the complexity is not sampled at w: it is KL[q || P], in closed form. */
#define PRIORS(X) X(NONE) X(NORMAL) X(MIXTURE) X(LAPLACE) X(NORMAL_KL) X(MIXTURE_KL) X(LAPLACE_KL)
#define AS_CONSTANT(name) name,
enum { PRIORS(AS_CONSTANT) };
#define CLOSED(kind) ((kind) >= NORMAL_KL)

/* What the closed form of a mixture needs: its wider component, and the bump log(1 + narrow / wide) as Gaussians
 * area_k / s_k exp(-w^2 / (2 s_k^2)), of which the last has the area and the spread of all together. */
#define GAUSSIANS 8
typedef struct { double wide, weight, areas[GAUSSIANS + 1], squares[GAUSSIANS + 1]; } Bump;
#define WIDE_FROM 6 /* of a sigma in spreads of the bump: from here on the last Gaussian stands for all, to 1e-4 of the bump */

/* One row of the table that Python hands over, fields of 8 bytes each.  This is their only definition: Python is handed
 * the names and types and builds its rows from them.  A kernel reads only the pointers it needs.
 *   wide: the tensors are float64, else float32;  deviates: w holds w - mu;  a, b, c: the numbers of the prior (Normal: sigma; mixture: pi, sigma1,
 *   sigma2; Laplace: scale);  bump: of MIXTURE_KL, a Bump;  gw, gm, gv: the gradients of w, of mu where it is used beside w (null: as that of w), and
 *   of sigma^2;  slope: -d log P(w) / dw where the prior is NONE, which grho may overwrite;  centre, gw, gv and slope may be null;  before: how many draws gmu and grho have from redraw already;  what
 *   begins with mu_ or rho_: of a step of Adam on mu and on rho. */
#define FIELDS(INTEGER, POINTER, REAL_NUMBER) \
    INTEGER(n) INTEGER(stream) INTEGER(wide) INTEGER(deviates) INTEGER(before) INTEGER(kind) \
    REAL_NUMBER(a) REAL_NUMBER(b) REAL_NUMBER(c) POINTER(bump) \
    POINTER(mu) POINTER(rho) POINTER(centre) POINTER(w) POINTER(gw) POINTER(gm) POINTER(gv) POINTER(slope) POINTER(gmu) POINTER(grho) \
    ADAM(POINTER, REAL_NUMBER, mu) ADAM(POINTER, REAL_NUMBER, rho)
/* step: how many there were, always a float;  m, v: the running means of the gradient and its square;  rate: lr, and for the
 * kernels lr / (1 - beta1^t);  scale: for the kernels 1 / sqrt(1 - beta2^t);  keep: 1 - lr * decay. */
#define ADAM(POINTER, REAL_NUMBER, x) POINTER(x##_step) POINTER(x##_m) POINTER(x##_v) REAL_NUMBER(x##_rate) REAL_NUMBER(x##_scale) \
    REAL_NUMBER(x##_beta1) REAL_NUMBER(x##_beta2) REAL_NUMBER(x##_eps) REAL_NUMBER(x##_keep)
#define AS_INTEGER(name) int64_t name;
#define AS_POINTER(name) void *name;
#define AS_REAL(name) double name;
typedef struct { FIELDS(AS_INTEGER, AS_POINTER, AS_REAL) } Param;

/* The functions between layers by number, in the order of FUNCTIONS, and a row of the table of layers: a linear layer and the
 * function after it.  function: of x w^T + b, which gives y;  gy, gx, gw, gb: the gradients by these; gy is overwritten;  b,
 * gx and gb may be null. */
#define FUNCTIONS(X) X(IDENTITY) X(RELU) X(TANH) X(SIGMOID)
enum { FUNCTIONS(AS_CONSTANT) };
#define LAYER(INTEGER, POINTER) INTEGER(inputs) INTEGER(outputs) INTEGER(function) \
    POINTER(x) POINTER(w) POINTER(b) POINTER(y) POINTER(gy) POINTER(gx) POINTER(gw) POINTER(gb)
typedef struct { LAYER(AS_INTEGER, AS_POINTER) } Layer;

/* The likelihoods by number, in the order of LIKELIHOODS, and what their cost needs to know: outputs [batch, width], targets
 * of columns numbers in a row, and with actions (else 0) one more before them;  number: the noise, or what it never falls
 * below;  slope: where the gradient by the output goes. */
#define LIKELIHOODS(X) X(GAUSSIAN) X(GAUSSIAN_PER_INPUT) X(BERNOULLI)
enum { LIKELIHOODS(AS_CONSTANT) };
#define COST(INTEGER, POINTER, REAL_NUMBER) INTEGER(wide) INTEGER(batch) INTEGER(width) INTEGER(kind) INTEGER(columns) INTEGER(actions) \
    REAL_NUMBER(number) POINTER(output) POINTER(target) POINTER(slope)
typedef struct { COST(AS_INTEGER, AS_POINTER, AS_REAL) } Cost;
#define HALF_LOG_2PI 0.91893853320467274
static inline double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

/* As wide as the registers that the compiler has for them: vectors that are wider it keeps in memory. */
#define VECTOR_BYTES (VECTORS ? 32 : 16)

#define MULTIPLIER0 0xD2511F53u
#define MULTIPLIER1 0xCD9E8D57u
#define WEYL0 0x9E3779B9u
#define WEYL1 0xBB67AE85u

typedef struct { uint32_t seed_low, seed_high, step; } Key;

typedef struct {
    Key key;
    uint32_t draw;
    double gc;    /* backward, redraw, backward_adam: the gradient of the complexity of a draw */
    int64_t many; /* draws, normal: how many */
} Call;

/* Philox4x32-10 at the counters (first + j, stream, step, draw) for j < count, a multiple of 8. */
typedef void Philox(const Key *key, uint32_t first, uint32_t stream, uint32_t draw, int count, uint32_t x[4][BLOCK / 4]);

static void philox_plain(const Key *key, uint32_t first, uint32_t stream, uint32_t draw, int count, uint32_t x[4][BLOCK / 4]) {
    for (int j = 0; j < count; j++) {
        uint32_t c0 = first + (uint32_t)j, c1 = stream, c2 = key->step, c3 = draw, k0 = key->seed_low, k1 = key->seed_high;
        for (int round = 0; round < 10; round++, k0 += WEYL0, k1 += WEYL1) {
            uint64_t p0 = (uint64_t)c0 * MULTIPLIER0, p1 = (uint64_t)c2 * MULTIPLIER1;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
        }
        x[0][j] = c0, x[1][j] = c1, x[2][j] = c2, x[3][j] = c3;
    }
}

#if VECTORS >= 8
#define WIDTH 8
#include "cpu_philox.h"
#endif
#if VECTORS >= 16
#define WIDTH 16
#include "cpu_philox.h"
#endif
static Philox *philox = philox_plain; /* chosen when the module is loaded */

#define REAL float
#define UINT uint32_t
#define R(x) x##f
#define NAME(x) x##_f32
#define MANTISSA 23
#define SQRT sqrtf
#define ABS fabsf
#define EXP_LIMIT R(87.0)
#define LN2_HIGH R(0.693359375)
#define LN2_LOW R(-0.000212194440)
#define EXP R(1.0), R(1.00000004), R(0.500000005), R(0.166664053), R(0.0416663401), R(0.00837596823), R(0.00139421598)
#define LOG1P R(0.999999995), R(-0.499998926), R(0.333297105), R(-0.249516163), R(0.196632743), R(-0.152696671), \
    R(0.105436238), R(-0.0563736128), R(0.0195425273), R(-0.00317605702)
#define LOG R(0.666666856), R(0.39988551), R(0.295903174)
#define SIN R(6.28318529), R(-41.3416626), R(81.5925429), R(-75.4016127)
#define COS R(1.0), R(-19.7392087), R(64.9393161), R(-85.4428447), R(59.220169)
#define ERF R(1.12837917), R(-0.376126258), R(0.112835852), R(-0.0268538146), R(0.00518833048), R(-0.00080102027), \
    R(0.0000785384983)
#define ERFCX_LIMIT R(4.0)
#define ERFCX R(0.986126808), R(-1.0482085), R(0.792590645), R(-0.431675218), R(0.16413092), R(-0.0409971748), \
    R(0.00600492861), R(-0.000388867631)
#include "cpu_real.h"

#define REAL double
#define UINT uint64_t
#define R(x) x
#define NAME(x) x##_f64
#define MANTISSA 52
#define SQRT sqrt
#define ABS fabs
#define EXP_LIMIT R(708.0)
#define LN2_HIGH R(0x1.62e42fee00000p-1)
#define LN2_LOW R(0x1.a39ef35793c76p-33)
#define EXP R(1.0), R(1.0), R(0.50000000000000203), R(0.16666666666666682), R(0.041666666666473292), \
    R(0.0083333333333184623), R(0.0013888888956219215), R(0.00019841269893049545), R(0.000024801481344570323), \
    R(0.00000275572377367406), R(0.00000027634155490989483), R(0.000000025111203257471139)
#define LOG1P R(0.99999999999999999), R(-0.49999999999999079), R(0.33333333333197525), R(-0.24999999992009523), \
    R(0.19999999749856523), R(-0.16666661848248539), R(0.14285651975275926), R(-0.12499427063514381), \
    R(0.11107211585299538), R(-0.099797680965865683), R(0.090090958151986325), R(-0.080709545784302058), \
    R(0.070152962365264714), R(-0.057189785341939059), R(0.041925709853904157), R(-0.026398779480743217), \
    R(0.013598778090617254), R(-0.0054217339910016097), R(0.0015535244034334334), R(-0.00028274211393741072), \
    R(0.000024437973948580947)
#define LOG R(0.66666666666666666), R(0.40000000000000941), R(0.2857142857076445), R(0.22222222400547757), \
    R(0.18181794700897794), R(0.15386290534659227), R(0.13267418596469616), R(0.13100721383550755)
#define SIN R(6.2831853071795865), R(-41.341702240399636), R(81.605249275948035), R(-76.705859704274551), \
    R(42.058685020160894), R(-15.093804209987112), R(3.7808689593022706)
#define COS R(1.0), R(-19.739208802178717), R(64.939394022668291), R(-85.45681720669355), R(60.244641371818105), \
    R(-26.426256772545438), R(7.9035351947629579), R(-1.7143161879285277), R(0.279458671475288)
#define ERF R(1.1283791670955126), R(-0.3761263890318352), R(0.112837916709442), R(-0.026866170643113414), \
    R(0.0052239776061308422), R(-0.00085483259297662443), R(0.0001205529358693695), R(-0.000014924712439534814), \
    R(0.0000016447132699786621), R(-0.00000016206318752969209), R(0.000000013710988704190523), \
    R(-0.00000000077794629717615969)
#define ERFCX_LIMIT R(5.9)
#define ERFCX R(0.99999606617020954), R(-1.1283335649387637), R(0.99975002116395646), R(-0.75139014007237783), \
    R(0.49789496135297663), R(-0.2970318573250826), R(0.16109277148703249), R(-0.079503959289866402), \
    R(0.035496374173479959), R(-0.014184514893504438), R(0.0050054243199338811), R(-0.0015370123596155848), \
    R(0.00040443535566303699), R(-0.000089716859609396023), R(0.000016474891087141035), \
    R(-0.0000024498728046651826), R(0.00000028667000336407534), R(-0.000000025343134971759007), \
    R(0.0000000015877664417605542), R(-0.000000000062714911385748921), R(0.0000000000011725087240756787)
#include "cpu_real.h"

typedef double Kernel(const Call *, const Param *, int64_t first, int64_t count);

static int64_t chunks(const Param *p) { return (p->n + CHUNK - 1) / CHUNK; }

static double one_chunk(Kernel *const kernels[2], const Call *call, const Param *p, int64_t c) {
    for (; c >= chunks(p); p++) c -= chunks(p);
    int64_t first = c * CHUNK;
    return kernels[p->wide](call, p, first, p->n - first < CHUNK ? p->n - first : CHUNK);
}

/* Runs the kernel over every parameter and sums what the chunks return, always in the same order. */
static double run(Kernel *const kernels[2], const Call *call, const Param *table, int64_t rows, int threads) {
    int64_t count = 0;
    double total = 0;
    for (int64_t i = 0; i < rows; i++) count += chunks(table + i);
    double *sums = threads > 1 ? malloc(count * sizeof(double)) : NULL;
    if (!sums) {
        for (int64_t c = 0; c < count; c++) total += one_chunk(kernels, call, table, c);
        return total;
    }
    /* A thread takes neighbours, so that the processor can read ahead; few of them, so that all threads end at once. */
    int64_t together = count / (8 * threads);
    together = together < 1 ? 1 : together > 8 ? 8 : together;
#pragma omp parallel for schedule(dynamic, together) num_threads(threads)
    for (int64_t c = 0; c < count; c++) sums[c] = one_chunk(kernels, call, table, c);
    for (int64_t c = 0; c < count; c++) total += sums[c];
    free(sums);
    return total;
}

/* The next step of Adam, once for all chunks of a parameter. */
#define COUNT_STEP(p, x) do {                                                         \
        double t = ++*(float *)(p)->x##_step;                                         \
        (p)->x##_rate /= 1 - pow((p)->x##_beta1, t);                                  \
        (p)->x##_scale = pow(1 - pow((p)->x##_beta2, t), -0.5);                       \
    } while (0)

/* Arguments of every function: table (bytearray), threads, seed, step, draw, and one of its own.  It is a step of Adam on
 * nothing, on mu, or on mu and rho. */
static PyObject *launch(Kernel *const kernels[2], const int updates, PyObject *const *args, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "expected 6 arguments, got %zd", n);
    Py_ssize_t size = PyByteArray_Check(args[0]) ? PyByteArray_Size(args[0]) : -1;
    if (size % (Py_ssize_t)sizeof(Param)) return PyErr_Format(PyExc_TypeError, "the table must be a bytearray of rows of %zu bytes", sizeof(Param));
    int64_t rows = size / (Py_ssize_t)sizeof(Param), total = 0;
    long threads = PyLong_AsLong(args[1]);
    uint64_t seed = PyLong_AsUnsignedLongLongMask(args[2]);
    uint32_t step = (uint32_t)PyLong_AsUnsignedLongMask(args[3]), draw = (uint32_t)PyLong_AsUnsignedLongMask(args[4]);
    double own = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    Call call = {{(uint32_t)seed, (uint32_t)(seed >> 32), step}, draw, own, own >= 1 && own < 0x1p62 ? (int64_t)own : 0};
    Param *table = malloc(size + 1); /* a copy: Python may change its own while the GIL is released */
    if (!table) return PyErr_NoMemory();
    memcpy(table, PyByteArray_AsString(args[0]), size);
    for (Param *p = table; p < table + rows; p++) {
        total += p->n, p->wide = !!p->wide;
        if (updates > 0 && p->n) COUNT_STEP(p, mu);
        if (updates > 1 && p->n) COUNT_STEP(p, rho);
    }
    double result;
    if (total < PARALLEL_FROM) {
        result = run(kernels, &call, table, rows, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS
        result = run(kernels, &call, table, rows, (int)threads);
        Py_END_ALLOW_THREADS
    }
    free(table);
    return PyFloat_FromDouble(result);
}

typedef double LayersKernel(const Layer *, int64_t count, int64_t batch, void *panel);

/* Arguments: table of layers (bytearray), batch, wide.  For small networks: the calling thread works alone, with the GIL. */
static PyObject *launch_layers(LayersKernel *const kernels[2], PyObject *const *args, Py_ssize_t n) {
    if (n != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", n);
    Py_ssize_t size = PyByteArray_Check(args[0]) ? PyByteArray_Size(args[0]) : -1;
    if (size % (Py_ssize_t)sizeof(Layer)) return PyErr_Format(PyExc_TypeError, "the table must be a bytearray of rows of %zu bytes", sizeof(Layer));
    int64_t count = size / (Py_ssize_t)sizeof(Layer), batch = PyLong_AsLongLong(args[1]), longest = batch;
    long wide = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    const Layer *layers = (const Layer *)PyByteArray_AsString(args[0]);
    for (const Layer *l = layers; l < layers + count; l++) {
        if (l->inputs > longest) longest = l->inputs;
        if (l->outputs > longest) longest = l->outputs;
    }
    void *panel = aligned_alloc(64, (longest + 1) * 64); /* two vectors of 32 bytes for each */
    if (!panel) return PyErr_NoMemory();
    double result = kernels[!!wide](layers, count, batch, panel);
    free(panel);
    return PyFloat_FromDouble(result);
}

/* Argument: a row of what the cost needs to know (bytes). */
static PyObject *py_cost(PyObject *Py_UNUSED(self), PyObject *row) {
    if (!PyBytes_Check(row) || PyBytes_Size(row) != (Py_ssize_t)sizeof(Cost)) return PyErr_Format(PyExc_TypeError, "expected %zu bytes", sizeof(Cost));
    Cost cost;
    memcpy(&cost, PyBytes_AsString(row), sizeof cost);
    return PyFloat_FromDouble(cost.wide ? cost_f64(&cost) : cost_f32(&cost));
}

#define LAYERS_FUNCTION(name)                                                         \
    static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) { \
        static LayersKernel *const kernels[2] = {name##_f32, name##_f64};             \
        return launch_layers(kernels, args, n);                                       \
    }
LAYERS_FUNCTION(layers_forward)
LAYERS_FUNCTION(layers_backward)

#define FUNCTION(name, updates)                                                       \
    static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) { \
        static Kernel *const kernels[2] = {name##_f32, name##_f64};                   \
        return launch(kernels, updates, args, n);                                     \
    }
FUNCTION(draw, 0)
FUNCTION(draws, 0)
FUNCTION(redraw, 0)
FUNCTION(backward, 0)
FUNCTION(adam, 1)
FUNCTION(backward_adam, 2)
FUNCTION(ivon, 0)
FUNCTION(variance, 0)
FUNCTION(normal, 0)
FUNCTION(signs, 0)

#define METHOD(name, doc) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, doc}
static PyMethodDef methods[] = {
    METHOD(draw, "(table, threads, seed, step, draw, 0) -> log q(w|theta) - log P(w): w = mu + softplus(rho) * eps"),
    METHOD(draws, "(table, threads, seed, step, draw, many) -> sum of -eps^2 / 2: w[k] = mu + softplus(rho) * eps of draw + k"),
    METHOD(redraw, "(table, threads, seed, step, draw, gc) -> a part of the complexities: w of draw, the one before to gmu, grho"),
    METHOD(backward, "(table, threads, 0, 0, 0, gc) -> the rest of the complexities, if before: gmu and grho from gw"),
    METHOD(adam, "(table, threads, 0, 0, 0, 0): a step of Adam on mu, whatever that is, from gmu"),
    METHOD(backward_adam, "(table, threads, 0, 0, 0, gc): as backward, and a step of Adam on mu and rho"),
    METHOD(ivon, "(table, threads, 0, 0, 0, 1 / lambda): a step of IVON on mu and rho from gmu and grho"),
    METHOD(variance, "(table, threads, 0, 0, 0, 0): w = softplus(rho)^2"),
    METHOD(normal, "(table, threads, seed, step, draw, many): w[k] = eps of draw + k"),
    METHOD(signs, "(table, threads, seed, step, draw, 0): w = random signs"),
    METHOD(layers_forward, "(layers, batch, wide): y of each layer, from the first to the last"),
    METHOD(layers_backward, "(layers, batch, wide) -> the sum of squares of gw and gb: these, and gx, from the last to the first"),
    {"cost", py_cost, METH_O, "(row) -> the likelihood cost, and its slope by the output"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__cpu(void) {
#if VECTORS >= 8
    if (__builtin_cpu_supports("avx2")) philox = philox_8;
#endif
#if VECTORS >= 16
    if (__builtin_cpu_supports("avx512f")) philox = philox_16;
#endif
    int quick = 0; /* whether the products of layers are: the vectors must fit the registers */
#if VECTORS
    quick = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    PyObject *m = PyModule_Create(&module);
    /* "name:type" of each field, in the letters of Python's struct, and the names of priors, functions and likelihoods. */
#define IN_Q(name) #name ":q "
#define IN_D(name) #name ":d "
#define IN_WORDS(name) #name " "
    if (m && (PyModule_AddStringConstant(m, "FIELDS", FIELDS(IN_Q, IN_Q, IN_D)) ||
              PyModule_AddStringConstant(m, "LAYER", LAYER(IN_Q, IN_Q)) ||
              PyModule_AddStringConstant(m, "COST", COST(IN_Q, IN_Q, IN_D)) ||
              PyModule_AddStringConstant(m, "LIKELIHOODS", LIKELIHOODS(IN_WORDS)) ||
              PyModule_AddIntConstant(m, "QUICK_PRODUCTS", quick) ||
              PyModule_AddStringConstant(m, "PRIORS", PRIORS(IN_WORDS)) ||
              PyModule_AddStringConstant(m, "FUNCTIONS", FUNCTIONS(IN_WORDS)))) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
