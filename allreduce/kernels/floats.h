/* The bits of floats, and 16-bit floats from and to float32, rounded to nearest. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define KERNEL __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when the library is loaded */
#else
#define KERNEL
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, sizeof value); return value; }

/* Float16 as F. Giesen: half to float done quick, 2012, with NumPy's bits of NaNs. */

INLINE float from_float16(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t normal = magnitude + (112u << 23), endless = magnitude + (224u << 23);
    uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    uint32_t bits = half & 0x7c00 ? normal : subnormal;
    bits = (half & 0x7c00) == 0x7c00 ? endless : bits;
    return float_of(bits | sign);
}

INLINE uint16_t to_float16(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t normal = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    uint32_t payload = magnitude >> 13 & 0x3ff, nan = 0x7c00 | (payload ? payload : 1);
    uint32_t half = magnitude < 113u << 23 ? subnormal : normal;
    half = magnitude >= 143u << 23 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? nan : half;
    return (uint16_t)(half | sign);
}

INLINE float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}
