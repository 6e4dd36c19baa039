/* Sums of 16-bit floats, casts to and from them, and codes of 8 bits, in one pass over the memory.
 *
 * Each function has the bits of the NumPy functions beside its caller (allreduce/arrays/), also for NaNs, infinities and
 * subnormal numbers: values are added in the order of the arrays, nothing is contracted to fused operations
 * (-ffp-contract=off), and a result is rounded once. The one exception: of two NaNs that are added, either may remain.
 * tests/collectives/test_kernels.py compares them.
 *
 * The file needs no header of Python: ctypes calls the functions, without the GIL. Arrays are contiguous and aligned to
 * their elements. An output may be one of the inputs, element for element.
 */
#include "floats.h"

#define LANES 1024 /* elements of a sum that are rounded together */
#define BLOCK 2048 /* elements of a quantised block that stay in the first cache */

#define CAST(name, from, to, convert)                          \
    KERNEL void name(const from *source, to *out, size_t size) \
    {                                                          \
        for (size_t i = 0; i < size; i++)                      \
            out[i] = convert(source[i]);                       \
    }
CAST(cast_float16_float32, uint16_t, float, from_float16)
CAST(cast_float32_float16, float, uint16_t, to_float16)
CAST(cast_bfloat16_float32, uint16_t, float, from_bfloat16)
CAST(cast_float32_bfloat16, float, uint16_t, to_bfloat16)

/* Sums of 16-bit floats: outs[k][i] = (parts[0][i] + parts[1][i] + ...) * scale in float32, for all k. */

#define SUM(name, from, to)                                                                                    \
    INLINE void name##_lanes(const uint16_t *const *parts, size_t count, uint16_t *const *outs, size_t copies, \
                             size_t start, size_t length, float scale)                                         \
    {                                                                                                          \
        float total[LANES];                                                                                    \
        uint16_t rounded[LANES];                                                                               \
        size_t few = count < 4 ? count : 4; /* read in one loop, which a constant count unrolls */             \
        for (size_t i = 0; i < length; i++) {                                                                  \
            float value = from(parts[0][start + i]);                                                           \
            for (size_t part = 1; part < few; part++)                                                          \
                value = value + from(parts[part][start + i]);                                                  \
            total[i] = value;                                                                                  \
        }                                                                                                      \
        for (size_t part = few; part < count; part++) {                                                        \
            const uint16_t *values = parts[part] + start;                                                      \
            for (size_t i = 0; i < length; i++)                                                                \
                total[i] = total[i] + from(values[i]);                                                         \
        }                                                                                                      \
        for (size_t i = 0; i < length; i++)                                                                    \
            rounded[i] = to(total[i] * scale);                                                                 \
        for (size_t copy = 0; copy < copies; copy++)                                                           \
            memcpy(outs[copy] + start, rounded, length * sizeof *rounded);                                     \
    }                                                                                                          \
    KERNEL void name(const uint16_t *const *parts, size_t count, uint16_t *const *outs, size_t copies,         \
                     size_t size, double factor)                                                               \
    {                                                                                                          \
        float scale = (float)factor;                                                                           \
        for (size_t start = 0; start < size; start += LANES) {                                                 \
            size_t length = size - start < LANES ? size - start : LANES;                                       \
            if (count == 2)                                                                                    \
                name##_lanes(parts, 2, outs, copies, start, length, scale);                                    \
            else if (count == 3)                                                                               \
                name##_lanes(parts, 3, outs, copies, start, length, scale);                                    \
            else if (count == 4)                                                                               \
                name##_lanes(parts, 4, outs, copies, start, length, scale);                                    \
            else if (count > 4)                                                                                \
                name##_lanes(parts, count, outs, copies, start, length, scale);                                \
        }                                                                                                      \
    }
SUM(portable_sum_bfloat16, from_bfloat16, to_bfloat16)
SUM(portable_sum_float16, from_float16, to_float16)

/* The same by vectors, which compilers do not find: 2 to 3 times as many elements a second. They return how many elements
 * they have done. */

#define ARGUMENTS                                                                                                   \
    const uint16_t *const *parts, size_t count, uint16_t *const *outs, size_t copies, size_t size, double factor

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#define BY_VECTORS(known, name) ((known) ? name(parts, count, outs, copies, size, factor) : 0)
#define HALVES(array) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((array) + i)))
#define AHEAD 2048 /* elements; hardware loads fewer ahead, too few where another core has just written the memory */
#define FETCH(array) _mm_prefetch((const char *)((array) + i + AHEAD), _MM_HINT_T0) /* never faults */

__attribute__((target("avx,f16c"))) static size_t sum_float16_by_eights(ARGUMENTS)
{
    __m256 scale = _mm256_set1_ps((float)factor);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        __m256 total = HALVES(parts[0]);
        FETCH(parts[0]);
        for (size_t part = 1; part < count; part++) {
            total = _mm256_add_ps(total, HALVES(parts[part]));
            FETCH(parts[part]);
        }
        __m128i rounded = _mm256_cvtps_ph(_mm256_mul_ps(total, scale), _MM_FROUND_TO_NEAREST_INT);
        for (size_t copy = 0; copy < copies; copy++)
            _mm_storeu_si128((__m128i *)(outs[copy] + i), rounded);
    }
    return i;
}

static int has_f16c(void) /* older compilers have no __builtin_cpu_supports("f16c"); "avx" asks the system, too */
{
    static int known = -1; /* the instruction cpuid takes microseconds in a virtual machine */
    unsigned a, b, c, d;
    if (known < 0)
        known = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    return known;
}

#define AVX2 __attribute__((target("avx2"))) static inline

AVX2 __m256i to_bfloat16s(__m256 values) /* in the upper halves of 8 words; the lower halves are undefined */
{
    __m256i bits = _mm256_castps_si256(values), one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, half), odd);
    __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
    __m256i quiet = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc00000));
    __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan));
}

#define EVENS(words) _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
#define ODDS(words) _mm256_castsi256_ps(_mm256_and_si256(words, upper))

AVX2 size_t sum_bfloat16_by_sixteens(ARGUMENTS)
{
    __m256 scale = _mm256_set1_ps((float)factor);
    __m256i upper = _mm256_set1_epi32(-65536);
    size_t i = 0;
    for (; i + 16 <= size; i += 16) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(parts[0] + i));
        __m256 evens = EVENS(words), odds = ODDS(words);
        FETCH(parts[0]);
        for (size_t part = 1; part < count; part++) {
            words = _mm256_loadu_si256((const __m256i *)(parts[part] + i));
            FETCH(parts[part]);
            evens = _mm256_add_ps(evens, EVENS(words));
            odds = _mm256_add_ps(odds, ODDS(words));
        }
        __m256i low = _mm256_srli_epi32(to_bfloat16s(_mm256_mul_ps(evens, scale)), 16);
        __m256i packed = _mm256_blend_epi16(low, to_bfloat16s(_mm256_mul_ps(odds, scale)), 0xaa);
        for (size_t copy = 0; copy < copies; copy++)
            _mm256_storeu_si256((__m256i *)(outs[copy] + i), packed);
    }
    return i;
}
#else
#define BY_VECTORS(known, name) 0
#endif

#define SUM_BY_VECTORS(name, known, by_vectors)                                     \
    void name(ARGUMENTS)                                                            \
    {                                                                               \
        size_t done = BY_VECTORS(known, by_vectors);                                \
        const uint16_t *left[count];                                                \
        uint16_t *written[copies];                                                  \
        for (size_t part = 0; part < count; part++)                                 \
            left[part] = parts[part] + done;                                        \
        for (size_t copy = 0; copy < copies; copy++)                                \
            written[copy] = outs[copy] + done;                                      \
        portable_##name(left, count, written, copies, size - done, factor);         \
    }
SUM_BY_VECTORS(sum_float16, has_f16c(), sum_float16_by_eights)
SUM_BY_VECTORS(sum_bfloat16, __builtin_cpu_supports("avx2"), sum_bfloat16_by_sixteens)

/* Sums of other numbers, with the same arguments. Integers wrap around, and have no scale. */

#define PLAIN_SUM(name, type, scaled)                                                                      \
    INLINE void name##_lanes(const type *const *parts, size_t count, type *const *outs, size_t copies,     \
                             size_t start, size_t length, double factor)                                   \
    {                                                                                                      \
        type total[LANES]; /* the same vectors and remainder on all ranks, wherever their arrays begin */  \
        type scale = (type)factor;                                                                         \
        for (size_t i = 0; i < length; i++)                                                                \
            total[i] = parts[0][start + i] + parts[1][start + i];                                          \
        for (size_t part = 2; part < count; part++)                                                        \
            for (size_t i = 0; i < length; i++)                                                            \
                total[i] = total[i] + parts[part][start + i];                                              \
        for (size_t i = 0; scaled && i < length; i++)                                                      \
            total[i] = total[i] * scale;                                                                   \
        for (size_t copy = 0; copy < copies; copy++)                                                       \
            memcpy(outs[copy] + start, total, length * sizeof *total);                                     \
    }                                                                                                      \
    KERNEL void name(const type *const *parts, size_t count, type *const *outs, size_t copies, size_t size, \
                     double factor)                                                                        \
    {                                                                                                      \
        for (size_t start = 0; start < size; start += LANES)                                               \
            name##_lanes(parts, count, outs, copies, start, size - start < LANES ? size - start : LANES, factor); \
    }
PLAIN_SUM(sum_float32, float, 1)
PLAIN_SUM(sum_float64, double, 1)
PLAIN_SUM(sum_int32, uint32_t, 0)
PLAIN_SUM(sum_int64, uint64_t, 0)

/* Codes of 8 bits: a float32 scale for each block, as allreduce/arrays/quantize.py describes. */

/* Write the largest magnitude of each block, as an integer: there NaN is the largest. */
KERNEL void block_magnitudes(const float *values, size_t size, size_t block, float *magnitudes)
{
    for (size_t start = 0; start < size; start += block, magnitudes++) {
        size_t length = size - start < block ? size - start : block;
        int32_t largest = 0;
        for (size_t i = 0; i < length; i++) {
            int32_t bits = (int32_t)(bits_of(values[start + i]) & 0x7fffffff);
            largest = bits > largest ? bits : largest;
        }
        *magnitudes = float_of((uint32_t)largest);
    }
}

INLINE float floor_of(float value) /* of a number of at most 31 bits; a NaN becomes the least integer */
{
    float whole = (float)(int32_t)value;
    return whole > value ? whole - 1 : whole;
}

/* codes = floor(values / scales + random), and error = values - codes * scales unless it is null. */
KERNEL void encode(const float *values, size_t size, size_t block, const float *scales, const float *inverses,
                   const float *random, int8_t *codes, float *error)
{
    for (size_t start = 0; start < size; start += block, scales++, inverses++) {
        size_t length = size - start < block ? size - start : block;
        float scale = *scales, inverse = *inverses;
        float whole[BLOCK];
        for (size_t from = 0; from < length; from += BLOCK) {
            size_t count = length - from < BLOCK ? length - from : BLOCK;
            const float *given = values + start + from, *drawn = random + start + from;
            for (size_t i = 0; i < count; i++)
                whole[i] = floor_of(given[i] * inverse + drawn[i]);
            int8_t *written = codes + start + from;
            for (size_t i = 0; i < count; i++)
                written[i] = (int8_t)(int32_t)whole[i];
            if (error)
                for (size_t i = 0; i < count; i++)
                    error[start + from + i] = given[i] - whole[i] * scale;
        }
    }
}

KERNEL void decode(const int8_t *codes, size_t size, size_t block, const float *scales, float *out)
{
    for (size_t start = 0; start < size; start += block, scales++) {
        size_t length = size - start < block ? size - start : block;
        float scale = *scales;
        for (size_t i = 0; i < length; i++)
            out[start + i] = (float)codes[start + i] * scale;
    }
}

KERNEL void add_decoded(const int8_t *codes, size_t size, size_t block, const float *scales, float *total)
{
    for (size_t start = 0; start < size; start += block, scales++) {
        size_t length = size - start < block ? size - start : block;
        float scale = *scales;
        for (size_t i = 0; i < length; i++)
            total[start + i] = total[start + i] + (float)codes[start + i] * scale;
    }
}

int version(void) { return 9; } /* of these functions and their arguments: see __init__.py */
