/* The functions of fixed_point.c for one dtype of the terms, which includes this file once for each. */

/* Write the largest exponent bits of each block of the terms. */
KERNEL int NAME(fixed_exponents)(const TYPE *const *terms, size_t count, size_t size, const int64_t *edges,
                                 size_t blocks, EXPONENT *found)
{
    WIDE room[SHARED];
    for (size_t b = 0; b < blocks; b++) {
        if (!is_block(edges, b, size))
            return 0;
        size_t start = (size_t)edges[b], length = (size_t)edges[b + 1] - start;
        uint32_t largest = 0;
        for (size_t term = 0; term < count; term++) {
            uint32_t own = LARGEST(READ(terms[term] + start, length, room), length, 1);
            largest = own > largest ? own : largest;
        }
        found[b] = (EXPONENT)largest;
    }
    return 1;
}

/* Write the sums of the terms times factors[b] * rests[b], each rounded to an integer. */
KERNEL int NAME(fixed_add)(const TYPE *const *terms, size_t count, size_t size, const int64_t *edges, size_t blocks,
                           const double *factors, const double *rests, CARRIER *out)
{
    WIDE room[SHARED];
    for (size_t b = 0; b < blocks; b++) {
        if (!is_block(edges, b, size))
            return 0;
        size_t start = (size_t)edges[b], length = (size_t)edges[b + 1] - start;
        for (size_t term = 0; term < count; term++) {
            const WIDE *values = READ(terms[term] + start, length, room);
            if (term == 0)
                ROUND(values, length, factors[b], rests[b], 1, 1, out + start);
            else
                ROUND(values, length, factors[b], rests[b], 0, 1, out + start);
        }
    }
    return 1;
}

INLINE void NAME(write)(const CARRIER *integers, size_t length, double factor, int64_t divisor, TYPE *out)
{
    if (sizeof(WIDE) == sizeof(float) && (divisor & (divisor - 1)) == 0) { /* exact, and faster than quotients */
        factor = factor / (double)divisor;
        divisor = 1;
    }
    if (divisor == 1)
        for (size_t i = 0; i < length; i++)
            out[i] = WRITE(((double)integers[i] + 0.0) * factor);
    else
        for (size_t i = 0; i < length; i++)
            out[i] = WRITE((QUOTIENT(integers[i], divisor) + 0.0) * factor);
}

/* Write the integers / divisor * factors[b]. */
KERNEL int NAME(fixed_finish)(const CARRIER *integers, size_t size, const int64_t *edges, size_t blocks,
                              const double *factors, size_t divisor, TYPE *out)
{
    for (size_t b = 0; b < blocks; b++) {
        if (!is_block(edges, b, size))
            return 0;
        NAME(write)(integers + edges[b], (size_t)(edges[b + 1] - edges[b]), factors[b], (int64_t)divisor, out + edges[b]);
    }
    return 1;
}

INLINE uint32_t NAME(largest_of)(const TYPE *const *terms, size_t count, size_t start, size_t length, int finite)
{
    WIDE room[SHARED];
    uint32_t largest = 0;
    for (size_t term = 0; term < count; term++) {
        uint32_t own = LARGEST(READ(terms[term] + start, length, room), length, finite);
        largest = own > largest ? own : largest;
    }
    return largest;
}

/* Write the infinities and NaN of the terms of a block. */
INLINE void NAME(add_special)(const TYPE *const *terms, size_t count, size_t start, size_t length, TYPE *sums)
{
    WIDE room[SHARED];
    uint8_t signs[SHARED] = {0}; /* 1: positive, 2: negative, 3: NaN */
    for (size_t term = 0; term < count; term++) {
        const WIDE *values = READ(terms[term] + start, length, room);
        for (size_t i = 0; i < length; i++)
            if (values[i] - values[i] != 0)
                signs[i] |= values[i] > 0 ? 1 : values[i] < 0 ? 2 : 3;
    }
    const double value[] = {0, __builtin_inf(), -__builtin_inf(), __builtin_nan("")};
    for (size_t i = 0; i < length; i++)
        if (signs[i])
            sums[i] = WRITE(value[signs[i]]);
}

/* Do all of it: write the sums of the terms, or their means, to `outs`, which may be the terms. bits: of the integers of
 * one term. divisor: of a mean, else 1. */
KERNEL int NAME(fixed_sum)(const TYPE *const *terms, size_t count, TYPE *const *outs, size_t copies, size_t size,
                           const int64_t *edges, size_t blocks, size_t bits, size_t divisor)
{
    WIDE room[SHARED];
    CARRIER total[SHARED];
    TYPE sums[SHARED];
    for (size_t b = 0; b < blocks; b++) {
        if (!is_block(edges, b, size))
            return 0;
        size_t start = (size_t)edges[b], length = (size_t)edges[b + 1] - start;
        uint32_t largest = NAME(largest_of)(terms, count, start, length, 1);
        int finite = largest != ALL_ONES;
        if (!finite)
            largest = NAME(largest_of)(terms, count, start, length, 0);
        int unit = (int)largest - BIAS - (int)bits > LEAST ? (int)largest - BIAS - (int)bits : LEAST;
        int half = -unit >= BIAS ? -unit / 2 : 0; /* 2^1024 is no float64 */
        double factor = power_of_two(-unit - half), rest = power_of_two(half), back = power_of_two(unit);
        for (size_t term = 0; term < count; term++) {
            const WIDE *values = READ(terms[term] + start, length, room);
            if (finite && term == 0)
                ROUND(values, length, factor, rest, 1, 1, total);
            else if (finite)
                ROUND(values, length, factor, rest, 0, 1, total);
            else
                ROUND(values, length, factor, rest, term == 0, 0, total);
        }
        NAME(write)(total, length, back, (int64_t)divisor, sums);
        if (!finite)
            NAME(add_special)(terms, count, start, length, sums);
        for (size_t copy = 0; copy < copies; copy++)
            memcpy(outs[copy] + start, sums, length * sizeof *sums);
    }
    return 1;
}

#undef NAME
#undef TYPE
#undef READ
#undef WRITE
