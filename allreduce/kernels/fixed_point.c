/* Sums in fixed point, whose bits do not depend on their order: allreduce/arrays/fixed_point.py describes them, and has
 * the same in NumPy. The terms are float32, float16 and bfloat16, whose integers a float64 holds, or float64, with int64.
 *
 * Block b has the elements edges[b] to edges[b + 1] - 1, at most SHARED of them. Each function returns 0, and does no
 * more, where the edges are no such ones. tests/collectives/test_kernels.py compares the bits.
 */
#include "floats.h"

#define SHARED 256

INLINE uint64_t bits_of_double(double value) { uint64_t bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE double double_of(uint64_t bits) { double value; memcpy(&value, &bits, sizeof value); return value; }

INLINE double power_of_two(int exponent) /* from -1074 to 1023 */
{
    return double_of(exponent < -1022 ? (uint64_t)1 << (exponent + 1074) : (uint64_t)(exponent + 1023) << 52);
}

INLINE int is_block(const int64_t *edges, size_t number, size_t size)
{
    int64_t start = edges[number], stop = edges[number + 1];
    return start >= 0 && start < stop && stop <= (int64_t)size && stop - start <= SHARED;
}

/* Terms of float32, and of 16-bit floats, which become float32 first. */

INLINE uint32_t largest_single(const float *values, size_t length, int finite)
{
    int32_t largest = 0;
    for (size_t i = 0; i < length; i++) {
        int32_t bits = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        bits = finite || bits < 0x7f800000 ? bits : 0;
        largest = bits > largest ? bits : largest;
    }
    return (uint32_t)largest >> 23;
}

INLINE void round_single(const float *values, size_t length, double factor, double rest, int first, int finite,
                         double *total)
{
    for (size_t i = 0; i < length; i++) {
        /* To the nearest integer, and zero is +0. Numbers that are too large for it are integers: they have 24 bits. */
        double value = (double)values[i] * factor * rest + 0x1.8p52 - 0x1.8p52;
        value = finite || (bits_of(values[i]) & 0x7fffffff) < 0x7f800000 ? value : 0;
        total[i] = first ? value : total[i] + value;
    }
}

INLINE double quotient_single(double integer, int64_t divisor) { return integer / (double)divisor; }

INLINE float to_odd(double value) /* `_to_odd` of fixed_point.py */
{
    float rounded = (float)value;
    double back = rounded;
    uint32_t bits = bits_of(rounded) - ((back < 0 ? -back : back) > (value < 0 ? -value : value));
    return float_of(bits | (back != value));
}

INLINE const float *read_float16(const uint16_t *values, size_t length, float *room)
{
    for (size_t i = 0; i < length; i++)
        room[i] = from_float16(values[i]);
    return room;
}

INLINE const float *read_bfloat16(const uint16_t *values, size_t length, float *room)
{
    for (size_t i = 0; i < length; i++)
        room[i] = from_bfloat16(values[i]);
    return room;
}

/* Terms of float64. */

INLINE uint32_t largest_double(const double *values, size_t length, int finite)
{
    int64_t largest = 0;
    for (size_t i = 0; i < length; i++) {
        int64_t bits = (int64_t)(bits_of_double(values[i]) & INT64_MAX);
        bits = finite || bits < 0x7ff0000000000000 ? bits : 0;
        largest = bits > largest ? bits : largest;
    }
    return (uint32_t)(largest >> 52);
}

INLINE void round_double(const double *values, size_t length, double factor, double rest, int first, int finite,
                         int64_t *total)
{
    for (size_t i = 0; i < length; i++) {
        double value = values[i] * factor * rest, magnitude = value < 0 ? -value : value;
        double whole = magnitude + 0x1p52 - 0x1p52;
        whole = magnitude < 0x1p52 ? whole : magnitude;
        whole = finite || (bits_of_double(values[i]) & INT64_MAX) < 0x7ff0000000000000 ? whole : 0;
        int64_t integer = value < 0 ? -(int64_t)whole : (int64_t)whole;
        total[i] = first ? integer : total[i] + integer;
    }
}

INLINE double quotient_double(int64_t integer, int64_t divisor) /* `quotient` of fixed_point.py */
{
    const int64_t exact = (int64_t)1 << 53;
    if (divisor == 1 || (integer < exact && integer > -exact))
        return (double)integer / (double)divisor;
    int64_t whole = integer / divisor, left = integer % divisor;
    if (left < 0) {
        whole--;
        left += divisor;
    }
    if (whole >= exact || whole <= -exact)
        return (double)(whole * 2 | (left != 0)) / 2;
    int64_t digits = (left << 34) / divisor | ((left << 34) % divisor != 0);
    return (double)whole + (double)digits * 0x1p-34;
}

#define AS_IT_IS(values, length, room) ((void)(room), (values))
#define TO_FLOAT(value) ((float)(value))
#define TO_FLOAT16(value) to_float16(to_odd(value))
#define TO_BFLOAT16(value) to_bfloat16(to_odd(value))
#define SAME(value) (value)

/* BIAS, LEAST: of Format in fixed_point.py. ALL_ONES: the exponent bits of infinities and NaN. */
#define WIDE float
#define CARRIER double
#define EXPONENT uint8_t
#define BIAS 126
#define LEAST -149
#define ALL_ONES 255
#define LARGEST largest_single
#define ROUND round_single
#define QUOTIENT quotient_single

#define NAME(function) function##_float32
#define TYPE float
#define READ AS_IT_IS
#define WRITE TO_FLOAT
#include "fixed_point.h"

#define NAME(function) function##_float16
#define TYPE uint16_t
#define READ read_float16
#define WRITE TO_FLOAT16
#include "fixed_point.h"

#define NAME(function) function##_bfloat16
#define TYPE uint16_t
#define READ read_bfloat16
#define WRITE TO_BFLOAT16
#include "fixed_point.h"

#undef WIDE
#undef CARRIER
#undef EXPONENT
#undef BIAS
#undef LEAST
#undef ALL_ONES
#undef LARGEST
#undef ROUND
#undef QUOTIENT
#define WIDE double
#define CARRIER int64_t
#define EXPONENT int32_t
#define BIAS 1022
#define LEAST -1074
#define ALL_ONES 2047
#define LARGEST largest_double
#define ROUND round_double
#define QUOTIENT quotient_double

#define NAME(function) function##_float64
#define TYPE double
#define READ AS_IT_IS
#define WRITE SAME
#include "fixed_point.h"
