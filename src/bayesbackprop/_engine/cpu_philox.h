/* philox_plain by hand for vectors of WIDTH words (8: AVX2, 16: AVX-512), since compilers shuffle too much.  The even and
 * the odd j are in the low halves of 64-bit lanes; the high halves hold whatever, which the multiplication does not read.
 * cpu.c includes this file once for each WIDTH.  With 16, a last group of 8 counters is computed beside 8 that nobody
 * reads: x has room for them. */
#if WIDTH == 8
#define VECTOR __m256i
#define V(operation) _mm256_##operation
#define XOR _mm256_xor_si256
#define EVERY_LANE _mm256_set1_epi64x
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define INTERLEAVE(even, odd) _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA)
#define EVEN _mm256_set_epi64x(6, 4, 2, 0)
#define PHILOX __attribute__((target("avx2"))) static void philox_8
#else
#define VECTOR __m512i
#define V(operation) _mm512_##operation
#define XOR _mm512_xor_si512
#define EVERY_LANE _mm512_set1_epi64
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define INTERLEAVE(even, odd) _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))
#define EVEN _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0)
#define PHILOX __attribute__((target("avx512f"))) static void philox_16
#endif

PHILOX(const Key *key, uint32_t first, uint32_t stream, uint32_t draw, int count, uint32_t x[4][BLOCK / 4]) {
    const VECTOR m0 = EVERY_LANE(MULTIPLIER0), m1 = EVERY_LANE(MULTIPLIER1), even = EVEN;
    VECTOR k0[10], k1[10];
    for (int i = 0; i < 10; i++) {
        k0[i] = V(set1_epi32)((int)(key->seed_low + (uint32_t)i * WEYL0));
        k1[i] = V(set1_epi32)((int)(key->seed_high + (uint32_t)i * WEYL1));
    }
    for (int j = 0; j < count; j += WIDTH) {
        VECTOR c[2][4];
        for (int odd = 0; odd < 2; odd++) {
            c[odd][0] = V(add_epi32)(V(set1_epi32)((int)(first + (uint32_t)(j + odd))), even);
            c[odd][1] = V(set1_epi32)((int)stream), c[odd][2] = V(set1_epi32)((int)key->step);
            c[odd][3] = V(set1_epi32)((int)draw);
        }
#pragma GCC unroll 10
        for (int i = 0; i < 10; i++)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                VECTOR *s = c[odd], p0 = V(mul_epu32)(s[0], m0), p1 = V(mul_epu32)(s[2], m1);
                s[0] = XOR(V(srli_epi64)(p1, 32), XOR(s[1], k0[i])), s[1] = p1;
                s[2] = XOR(V(srli_epi64)(p0, 32), XOR(s[3], k1[i])), s[3] = p0;
            }
        for (int i = 0; i < 4; i++) STORE(&x[i][j], INTERLEAVE(c[0][i], c[1][i]));
    }
}

#undef WIDTH
#undef VECTOR
#undef V
#undef XOR
#undef EVERY_LANE
#undef STORE
#undef INTERLEAVE
#undef EVEN
#undef PHILOX
