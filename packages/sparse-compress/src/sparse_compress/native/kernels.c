/* Selection, error feedback, addition, putting back and packing of float32, in one pass over memory each.
 *
 * Every function gives the bits of the NumPy function that it stands in for (selection.py, merge.py, vectors.py,
 * accumulator.py, rounding.py, elias_fano.py), which is the reference that tests hold it to; of a NaN that arithmetic
 * makes out of two NaNs only that it is one.
 * Keys are magnitudes as integers: a float's bits without the sign. Memory is the caller's, at any address; nothing is
 * allocated here and nothing is kept, so any number of threads may call at once. Needs nothing but memcpy, memmove and
 * memset, which are in every process: no library is linked.
 *
 * Three levels, chosen once by sc_use: plain C, AVX2, AVX-512. Only what the compiler cannot make of plain C (keeping
 * some elements of a vector) is written for each of them.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SAME_PLACE _Pragma("clang loop vectorize(assume_safety)")
#else
#define SAME_PLACE _Pragma("GCC ivdep") /* in and out may be the same array: element i depends on element i alone */
#endif

/* Tensors begin where their owner wants them to, and are read as floats and as bits. */
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));

enum { PLAIN, AVX2, AVX512 };
enum { FLOAT32, BFLOAT16, FLOAT16 };
enum {
    MAGNITUDE = 0x7FFFFFFF,
    QUIET = 0x00400000,    /* of a NaN */
    SLACK = 64,            /* entries that may be overwritten beyond the last one */
    BLOCK = 1024,          /* elements that are advanced, looked at and cleared while they are in L1 */
    AHEAD = 512,           /* elements that are fetched beforehand, 2 KB, */
    NEXT = 32,             /* entries whose places are fetched beforehand */
    PART = 256,            /* so many at a time where the compiler makes the loop */
    MIN_SAMPLE = 1024,     /* elements: reading each costs a cache miss */
    MAX_SAMPLE = 32768,
    RUN = 4,               /* neighbours that are read together */
    KEY_SAMPLE = 2048,     /* of keys that are in memory anyway */
    DIGITS = 2048,         /* a histogram that stays in L1 */
    STREAMS = 4,           /* of a merge, */
    PIECES = 128,          /* bytes that say where theirs are */
    TURN = 16,             /* so many entries of each before it fetches, */
    LATER = 256,           /* elements beforehand */
    WINDOW = 1024,         /* elements of a dense tensor that are put back at a time, */
    LINE = 16              /* of the cache, in elements */
};

typedef struct {
    const f32 *v, *u; /* of a step: residual and velocity (or NULL) before it, */
    const void *g;    /* the gradient, */
    int kind;         /* in this dtype, */
    float m;
    f32 *vo, *uo; /* and residual and velocity after it. Without a step vo is what is selected from. */
    int clears;   /* whether what is found is taken out of vo and uo */
    int64_t n, k, base;
    uint32_t least;
    i32 *index; /* what was found: positions, in order, */
    u32 *bits, *velocity;
    i32 *cut_index; /* as many again */
    u32 *cut_bits, *spare;
    int64_t found, room;
} Selecting;

typedef int64_t collect_f(const u32 *x, int64_t n, int64_t base, uint32_t least, i32 *index, u32 *bits);
typedef int64_t between_f(const u32 *bits, int64_t n, uint32_t low, uint32_t high, u32 *keys, int64_t *above);
typedef int64_t split_f(const i32 *index, const u32 *bits, int64_t n, uint32_t kth, int64_t *ties, i32 *kept_index,
                        u32 *kept_bits, int64_t kept_room, i32 *cut_index, u32 *cut_bits, int64_t cut_room);
typedef void advance_f(const f32 *v, const f32 *u, const void *g, int kind, float m, f32 *vo, f32 *uo, int64_t n);
typedef int64_t step_f(Selecting *s, int64_t start, int64_t n);

INLINE void fetch(const void *x) { __builtin_prefetch(x); } /* past the end too, where it does nothing */
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- 16-bit gradients --------------------------------------------------------------------------------------------- */

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float widened_bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }

INLINE float widened_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7FFF) << 13;
    uint32_t normal = rest + 0x38000000;                                              /* 112 more in the exponent */
    uint32_t tiny = to_bits(from_bits(rest + 0x38800000) - from_bits(0x38800000));    /* 2^-14 more, and less, exactly */
    uint32_t huge = rest | 0x7F800000;
    uint32_t bits = rest < 0x00800000 ? tiny : rest >= 0x0F800000 ? huge : normal;
    return from_bits(sign | bits);
}

/* ---- Accumulation: u <- m u + g; v <- v + u, or without momentum v <- v + g --------------------------------------- */

#define ADVANCE(GRADIENT)                      \
    if (u) {                                   \
        SAME_PLACE                             \
        for (int64_t i = 0; i < n; i++) {      \
            float w = u[i] * m;                \
            w = w + (GRADIENT);                \
            uo[i] = w;                         \
            vo[i] = v[i] + w;                  \
        }                                      \
    } else {                                   \
        SAME_PLACE                             \
        for (int64_t i = 0; i < n; i++)        \
            vo[i] = v[i] + (GRADIENT);         \
    }

INLINE void advance_body(const f32 *v, const f32 *u, const void *g, int kind, float m, f32 *vo, f32 *uo, int64_t n) {
    const f32 *whole = g;
    const u16 *half = g;
    if (kind == FLOAT32) {
        ADVANCE(whole[i])
    } else if (kind == BFLOAT16) {
        ADVANCE(widened_bf16(half[i]))
    } else {
        ADVANCE(widened_fp16(half[i]))
    }
}

static void advance_plain(const f32 *v, const f32 *u, const void *g, int kind, float m, f32 *vo, f32 *uo, int64_t n) {
    advance_body(v, u, g, kind, m, vo, uo, n);
}

/* ---- Fewer bytes: values ------------------------------------------------------------------------------------------ */

enum { INF = 0x7F800000, NONE = -128 }; /* NONE: the step of what is not finite */

/* float32 to the nearest bfloat16, ties to even; too large a one to the largest, NaN to one NaN. */
INLINE void to_bf16_body(const void *values, int64_t n, void *out) {
    const u32 *bits = values;
    u16 *half = out;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = bits[i], key = word & MAGNITUDE, near = word + 0x7FFF + (word >> 16 & 1);
        near = key < INF && key >= 0x7F7F8000 ? (word & ~(uint32_t)MAGNITUDE) | 0x7F7F0000 : near;
        near = key > INF ? 0x7FC00000 : near;
        half[i] = (uint16_t)(near >> 16);
    }
}

INLINE void of_bf16_body(const void *half, int64_t n, void *out) {
    for (int64_t i = 0; i < n; i++)
        ((u32 *)out)[i] = (uint32_t)((const u16 *)half)[i] << 16;
}

/* float32 as steps of a power of two, the least with which the largest finite one is 127 steps or is cut to that; ties to
 * even, NONE for what is not finite. Returns the power. */
INLINE int to_int8_body(const void *values, int64_t n, void *out) {
    const u32 *bits = values;
    int8_t *steps = out;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t key = (int32_t)(bits[i] & MAGNITUDE);
        key = key < INF ? key : 0;
        largest = key > largest ? key : largest;
    }
    int power = (largest >> 23) - 126 - 7; /* of a half more, as 2^7 steps reach */
    power = power < -126 ? -126 : power;
    const float scale = from_bits((uint32_t)(127 - power) << 23), whole = 12582912; /* 1.5 * 2^23: rounds to integers */
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = bits[i];
        int finite = (word & MAGNITUDE) < INF;
        float near = (from_bits(finite ? word : 0) * scale + whole) - whole;
        near = near > 127 ? 127 : near < -127 ? -127 : near;
        steps[i] = (int8_t)(finite ? (int32_t)near : NONE);
    }
    return power;
}

/* Steps of 2^power, -126 to 126, as float32. */
INLINE void of_int8_body(const void *steps, int64_t n, int power, void *out) {
    const float scale = from_bits((uint32_t)(127 + power) << 23);
    for (int64_t i = 0; i < n; i++) {
        int32_t step = ((const int8_t *)steps)[i];
        ((u32 *)out)[i] = step == NONE ? 0x7FC00000 : to_bits((float)step * scale);
    }
}

/* out <- value - rounded, 0 where that is not finite. */
INLINE void leftover_body(const void *values, const void *rounded, int64_t n, void *out) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t error = to_bits(((const f32 *)values)[i] - ((const f32 *)rounded)[i]);
        ((u32 *)out)[i] = (error & MAGNITUDE) < INF ? error : 0;
    }
}

#ifdef X86
#define WIDE __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,popcnt,bmi,bmi2")))
#define BY_LEVEL(CALL)                                                                  \
    static CALL(plain) __attribute__((target("avx2"))) static CALL(avx2) WIDE static CALL(avx512)
#else
#define BY_LEVEL(CALL) static CALL(plain)
#endif

/* The compiler makes vectors of these at each level. */
#define TO_BF16_AT(L) void to_bf16_##L(const void *x, int64_t n, void *out) { to_bf16_body(x, n, out); }
#define OF_BF16_AT(L) void of_bf16_##L(const void *x, int64_t n, void *out) { of_bf16_body(x, n, out); }
#define TO_INT8_AT(L) int to_int8_##L(const void *x, int64_t n, void *out) { return to_int8_body(x, n, out); }
#define OF_INT8_AT(L) void of_int8_##L(const void *x, int64_t n, int p, void *out) { of_int8_body(x, n, p, out); }
#define LEFTOVER_AT(L) \
    void leftover_##L(const void *x, const void *y, int64_t n, void *out) { leftover_body(x, y, n, out); }
BY_LEVEL(TO_BF16_AT)
BY_LEVEL(OF_BF16_AT)
BY_LEVEL(TO_INT8_AT)
BY_LEVEL(OF_INT8_AT)
BY_LEVEL(LEFTOVER_AT)

/* ---- Filters ------------------------------------------------------------------------------------------------------ */

/* Index and bits of the elements whose key is `least` or more, in order; index and bits have SLACK to spare. */
static int64_t collect_plain(const u32 *x, int64_t n, int64_t base, uint32_t least, i32 *index, u32 *bits) {
    int32_t bound = (int32_t)(least - 1); /* signed: what every processor compares in vectors */
    int64_t found = 0, i = 0;
    while (i < n) {
        int64_t end = least_of(i + 32, n);
        if (end == i + 32) {
            int32_t any = 0;
            for (int j = 0; j < 32; j++)
                any |= -((int32_t)(x[i + j] & MAGNITUDE) > bound);
            if (!any) {
                i = end;
                continue;
            }
        }
        for (; i < end; i++) {
            index[found] = (int32_t)(base + i);
            bits[found] = x[i];
            found += (int32_t)(x[i] & MAGNITUDE) > bound;
        }
    }
    return found;
}

/* The keys from low to high, in any order; how many are higher. keys has SLACK to spare. */
static int64_t between_plain(const u32 *bits, int64_t n, uint32_t low, uint32_t high, u32 *keys, int64_t *above) {
    int64_t found = 0, higher = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = bits[i] & MAGNITUDE;
        keys[found] = key;
        found += (key - low) <= (high - low);
        higher += key > high;
    }
    *above = higher;
    return found;
}

/* Entries of a key above kth, and the first `ties` of those equal to it, are kept; the others are cut. Both in order.
 * Kept may be where the entries are. Nothing is written beyond the rooms. Returns how many were kept; ties: what is left
 * of them. */
INLINE int64_t split_rest(const i32 *index, const u32 *bits, int64_t i, int64_t n, uint32_t kth, int64_t *ties,
                          i32 *kept_index, u32 *kept_bits, int64_t kept, i32 *cut_index, u32 *cut_bits, int64_t cut) {
    for (; i < n; i++) {
        uint32_t key = bits[i] & MAGNITUDE;
        int tie = key == kth, keep = key > kth || (tie && *ties > 0);
        *ties -= tie;
        if (keep) {
            kept_index[kept] = index[i];
            kept_bits[kept++] = bits[i];
        } else {
            cut_index[cut] = index[i];
            cut_bits[cut++] = bits[i];
        }
    }
    return kept;
}

static int64_t split_plain(const i32 *index, const u32 *bits, int64_t n, uint32_t kth, int64_t *ties, i32 *kept_index,
                           u32 *kept_bits, int64_t kept_room, i32 *cut_index, u32 *cut_bits, int64_t cut_room) {
    int64_t i = 0, kept = 0, cut = 0, tied = *ties;
    for (; i < n && kept < kept_room && cut < cut_room; i++) {
        uint32_t key = bits[i] & MAGNITUDE, word = bits[i];
        int32_t at = index[i];
        int tie = key == kth, keep = (key > kth) | (tie & (tied > 0));
        tied -= tie;
        cut_index[cut] = at; /* before kept, which may be where the entries are */
        cut_bits[cut] = word;
        kept_index[kept] = at;
        kept_bits[kept] = word;
        kept += keep;
        cut += !keep;
    }
    *ties = tied;
    return split_rest(index, bits, i, n, kth, ties, kept_index, kept_bits, kept, cut_index, cut_bits, cut);
}

INLINE void take_out(Selecting *s, int64_t found) {
    u32 *vo = (u32 *)s->vo, *uo = (u32 *)s->uo;
    for (int64_t i = s->found; i < s->found + found; i++) {
        int64_t at = s->index[i];
        vo[at] = 0;
        if (uo) {
            s->velocity[i] = uo[at];
            uo[at] = 0;
        }
    }
}

/* n elements from `start` on are advanced, looked at and cleared while they are in L1. Returns how many were found. */
INLINE int64_t step_body(Selecting *s, int64_t start, int64_t n, advance_f *advance, collect_f *collect) {
    int64_t width = s->kind == FLOAT32 ? 4 : 2;
    if (s->g)
        for (int64_t i = start; i < start + n; i += PART) {
            const char *g = (const char *)s->g + i * width;
            for (int64_t ahead = AHEAD; ahead < AHEAD + PART; ahead += 16) {
                fetch(s->v + i + ahead);
                fetch(g + ahead * width);
                if (s->u)
                    fetch(s->u + i + ahead);
            }
            advance(s->v + i, s->u ? s->u + i : NULL, g, s->kind, s->m, s->vo + i, s->u ? s->uo + i : NULL,
                    least_of(PART, start + n - i));
        }
    int64_t found = collect((u32 *)(s->vo + start), n, start, s->least, s->index + s->found, s->bits + s->found);
    if (s->clears)
        take_out(s, found);
    return found;
}

static int64_t step_plain(Selecting *s, int64_t start, int64_t n) {
    return step_body(s, start, n, advance_plain, collect_plain);
}

#ifdef X86
static uint8_t places[256][8]; /* of the bits that are set, first ones first */

__attribute__((target("avx2"))) static void advance_avx2(const f32 *v, const f32 *u, const void *g, int kind, float m,
                                                         f32 *vo, f32 *uo, int64_t n) {
    advance_body(v, u, g, kind, m, vo, uo, n);
}

__attribute__((target("avx2,popcnt"))) static int64_t collect_avx2(const u32 *x, int64_t n, int64_t base,
                                                                   uint32_t least, i32 *index, u32 *bits) {
    const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE), below = _mm256_set1_epi32((int32_t)(least - 1));
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int64_t found = 0, i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i word[4];
        uint32_t hits[4];
        for (int j = 0; j < 4; j++) {
            word[j] = _mm256_loadu_si256((const __m256i *)(x + i + 8 * j));
            __m256i reach = _mm256_cmpgt_epi32(_mm256_and_si256(word[j], magnitude), below);
            hits[j] = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reach));
        }
        if (!(hits[0] | hits[1] | hits[2] | hits[3]))
            continue;
        for (int j = 0; j < 4; j++) {
            __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)places[hits[j]]));
            __m256i at = _mm256_add_epi32(_mm256_set1_epi32((int32_t)(base + i + 8 * j)), lanes);
            _mm256_storeu_si256((__m256i *)(index + found), _mm256_permutevar8x32_epi32(at, order));
            _mm256_storeu_si256((__m256i *)(bits + found), _mm256_permutevar8x32_epi32(word[j], order));
            found += __builtin_popcount(hits[j]);
        }
    }
    return found + collect_plain(x + i, n - i, base + i, least, index + found, bits + found);
}

__attribute__((target("avx2,popcnt"))) static int64_t step_avx2(Selecting *s, int64_t start, int64_t n) {
    return step_body(s, start, n, advance_avx2, collect_avx2);
}

WIDE static void advance_avx512(const f32 *v, const f32 *u, const void *g, int kind, float m, f32 *vo, f32 *uo,
                                int64_t n) {
    advance_body(v, u, g, kind, m, vo, uo, n);
}

WIDE static int64_t collect_avx512(const u32 *x, int64_t n, int64_t base, uint32_t least, i32 *index, u32 *bits) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), bound = _mm512_set1_epi32((int32_t)least);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 inside = n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
        __m512i word = _mm512_maskz_loadu_epi32(inside, x + i);
        fetch(x + i + AHEAD);
        __mmask16 hits = _mm512_mask_cmpge_epu32_mask(inside, _mm512_and_si512(word, magnitude), bound);
        __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int32_t)(base + i)), lanes);
        _mm512_storeu_si512(index + found, _mm512_maskz_compress_epi32(hits, at));
        _mm512_storeu_si512(bits + found, _mm512_maskz_compress_epi32(hits, word));
        found += __builtin_popcount(hits);
    }
    return found;
}

/* Advances, compares, clears and collects vector by vector. */
INLINE WIDE int64_t fused(Selecting *s, int64_t start, int64_t n, int momentum) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), bound = _mm512_set1_epi32((int32_t)s->least);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 m = _mm512_set1_ps(s->m);
    const f32 *v = s->v + start, *u = momentum ? s->u + start : NULL, *g = (const f32 *)s->g + start;
    f32 *vo = s->vo + start, *uo = momentum ? s->uo + start : NULL;
    i32 *index = s->index + s->found;
    u32 *bits = s->bits + s->found, *velocity = s->velocity + s->found;
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 inside = n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
        fetch(v + i + AHEAD);
        fetch(g + i + AHEAD);
        __m512 w = _mm512_maskz_loadu_ps(inside, g + i);
        if (momentum) {
            fetch(u + i + AHEAD);
            w = _mm512_add_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(inside, u + i), m), w);
        }
        __m512i word = _mm512_castps_si512(_mm512_add_ps(_mm512_maskz_loadu_ps(inside, v + i), w));
        __mmask16 hits = _mm512_mask_cmpge_epu32_mask(inside, _mm512_and_si512(word, magnitude), bound);
        __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int32_t)(start + i)), lanes);
        _mm512_mask_storeu_epi32(vo + i, inside, _mm512_maskz_mov_epi32((__mmask16)~hits, word));
        _mm512_storeu_si512(index + found, _mm512_maskz_compress_epi32(hits, at));
        _mm512_storeu_si512(bits + found, _mm512_maskz_compress_epi32(hits, word));
        if (momentum) {
            _mm512_mask_storeu_ps(uo + i, inside, _mm512_maskz_mov_ps((__mmask16)~hits, w));
            _mm512_storeu_si512(velocity + found, _mm512_maskz_compress_epi32(hits, _mm512_castps_si512(w)));
        }
        found += __builtin_popcount(hits);
    }
    return found;
}

WIDE static int64_t step_avx512(Selecting *s, int64_t start, int64_t n) {
    if (!s->g || s->kind != FLOAT32)
        return step_body(s, start, n, advance_avx512, collect_avx512);
    return s->u ? fused(s, start, n, 1) : fused(s, start, n, 0);
}

WIDE static int64_t between_avx512(const u32 *bits, int64_t n, uint32_t low, uint32_t high, u32 *keys,
                                   int64_t *above) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE);
    const __m512i least = _mm512_set1_epi32((int32_t)low), most = _mm512_set1_epi32((int32_t)high);
    int64_t found = 0, higher = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 inside = n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
        __m512i key = _mm512_and_si512(_mm512_maskz_loadu_epi32(inside, bits + i), magnitude);
        __mmask16 over = _mm512_mask_cmpgt_epu32_mask(inside, key, most);
        __mmask16 hits = _mm512_mask_cmpge_epu32_mask(inside, key, least) & ~over;
        _mm512_storeu_si512(keys + found, _mm512_maskz_compress_epi32(hits, key));
        found += __builtin_popcount(hits);
        higher += __builtin_popcount(over);
    }
    *above = higher;
    return found;
}

WIDE static int64_t split_avx512(const i32 *index, const u32 *bits, int64_t n, uint32_t kth, int64_t *ties,
                                 i32 *kept_index, u32 *kept_bits, int64_t kept_room, i32 *cut_index, u32 *cut_bits,
                                 int64_t cut_room) {
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), bound = _mm512_set1_epi32((int32_t)kth);
    int64_t i = 0, kept = 0, cut = 0;
    for (; i + 16 <= n && kept + 16 <= kept_room && cut + 16 <= cut_room; i += 16) {
        __m512i word = _mm512_loadu_si512(bits + i), at = _mm512_loadu_si512(index + i);
        __m512i key = _mm512_and_si512(word, magnitude);
        __mmask16 keep = _mm512_cmpgt_epu32_mask(key, bound), equal = _mm512_cmpeq_epu32_mask(key, bound);
        if (equal && *ties > 0) {
            uint32_t first = *ties >= 16 ? equal : _pdep_u32((1u << *ties) - 1, equal);
            keep |= (__mmask16)first;
            *ties -= __builtin_popcount(first);
        }
        _mm512_storeu_si512(cut_index + cut, _mm512_maskz_compress_epi32((__mmask16)~keep, at));
        _mm512_storeu_si512(cut_bits + cut, _mm512_maskz_compress_epi32((__mmask16)~keep, word));
        _mm512_storeu_si512(kept_index + kept, _mm512_maskz_compress_epi32(keep, at));
        _mm512_storeu_si512(kept_bits + kept, _mm512_maskz_compress_epi32(keep, word));
        kept += __builtin_popcount(keep);
        cut += 16 - __builtin_popcount(keep);
    }
    return split_rest(index, bits, i, n, kth, ties, kept_index, kept_bits, kept, cut_index, cut_bits, cut);
}
#endif

/* ---- Levels ------------------------------------------------------------------------------------------------------- */

static struct {
    int level;
    step_f *step;
    between_f *between;
    split_f *split;
    void (*to_bf16)(const void *values, int64_t n, void *out);
    void (*of_bf16)(const void *half, int64_t n, void *out);
    int (*to_int8)(const void *values, int64_t n, void *out);
    void (*of_int8)(const void *steps, int64_t n, int power, void *out);
    void (*leftover)(const void *values, const void *rounded, int64_t n, void *out);
} use;

#define USE_CODING(L)                                                                             \
    use.to_bf16 = to_bf16_##L, use.of_bf16 = of_bf16_##L, use.to_int8 = to_int8_##L;              \
    use.of_int8 = of_int8_##L, use.leftover = leftover_##L;

#ifndef SOURCE
#define SOURCE "unknown"
#endif

/* Which source this was compiled from. */
EXPORT const char *sc_source(void) { return SOURCE; }

#ifdef X86
/* What processor and system have, asked here: the compiler's own __builtin_cpu_supports needs a library. */
static int supported(void) {
    unsigned a, b, c, d, low, high;
    const unsigned saved = 1u << 27, avx = 1u << 28, popcnt = 1u << 23; /* leaf 1, ecx */
    const unsigned avx2 = 1u << 5, wide = 1u << 3 | 1u << 8 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* leaf 7, ebx */
    if (!__get_cpuid(1, &a, &b, &c, &d) || ~c & (saved | avx | popcnt))
        return PLAIN;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* which registers the system keeps for a process */
    if (~low & 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~b & avx2)
        return PLAIN;
    return ~low & 0xE6 || ~b & wide ? AVX2 : AVX512; /* wide: bmi, bmi2, avx512f, dq, bw, vl */
}
#endif

/* The best level that this processor has, `most` at most; to be called once before the others. Returns the level. */
EXPORT int sc_use(int most) {
    use.level = PLAIN;
    use.step = step_plain, use.between = between_plain, use.split = split_plain;
    USE_CODING(plain)
#ifdef X86
    for (int set = 0; set < 256; set++)
        for (int bit = 0, place = 0; bit < 8; bit++)
            if (set >> bit & 1)
                places[set][place++] = (uint8_t)bit;
    int best = supported();
    if (least_of(most, best) >= AVX2) {
        use.level = AVX2;
        use.step = step_avx2;
        USE_CODING(avx2)
    }
    if (least_of(most, best) >= AVX512) {
        use.level = AVX512;
        use.step = step_avx512, use.between = between_avx512, use.split = split_avx512;
        USE_CODING(avx512)
    }
#else
    (void)most;
#endif
    return use.level;
}

/* ---- The k-th largest key ----------------------------------------------------------------------------------------- */

/* The rank-th largest (from 1) of keys that all lie in low ... high; the keys are overwritten. Digit by digit of a
 * histogram over the range that is left, so linear whatever the keys are. rank becomes its place among equal ones. */
static uint32_t ranked(u32 *keys, int64_t n, int64_t *place, uint32_t low, uint32_t high) {
    int64_t rank = *place;
    uint32_t counts[DIGITS];
    while (low < high) {
        int width = 32 - __builtin_clz(high - low), shift = width > 11 ? width - 11 : 0;
        uint32_t digit = (high - low) >> shift;
        memset(counts, 0, (digit + 1) * sizeof *counts);
        for (int64_t i = 0; i < n; i++)
            counts[(keys[i] - low) >> shift]++;
        while (counts[digit] < rank)
            rank -= counts[digit--];
        uint32_t base = low + (digit << shift);
        high = (uint32_t)least_of(high, (int64_t)base + ((int64_t)1 << shift) - 1);
        low = base;
        if (shift) {
            int64_t left = 0;
            for (int64_t i = 0; i < n; i++) {
                uint32_t key = keys[i];
                keys[left] = key;
                left += (key - low) <= (high - low);
            }
            n = left;
        }
    }
    *place = rank;
    return low;
}

static uint32_t ranked_of_all(const u32 *bits, int64_t n, int64_t *rank, u32 *scratch) {
    uint32_t low = MAGNITUDE, high = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = bits[i] & MAGNITUDE;
        low = key < low ? key : low;
        high = key > high ? key : high;
        scratch[i] = key;
    }
    return ranked(scratch, n, rank, low, high);
}

/* Of a sample e keys are expected above some key; most likely they are at most this many more or fewer. */
INLINE double spread(double expected) { return 4 * __builtin_sqrt(expected + 1) + 2; }

/* The k-th largest key, 0 < k <= n (Floyd and Rivest, CACM 1975): a sample's keys most likely enclose it, so only
 * what lies between is looked at again. scratch: n entries and SLACK. ties: how many of the keys that equal it are among
 * the k largest. */
static uint32_t kth_key(const u32 *bits, int64_t n, int64_t k, u32 *scratch, int64_t *ties) {
    *ties = k;
    if (n < 4 * KEY_SAMPLE)
        return ranked_of_all(bits, n, ties, scratch);
    uint32_t sample[KEY_SAMPLE], ends[2] = {0, MAGNITUDE};
    double expected = (double)KEY_SAMPLE * (double)k / (double)n;
    double off = spread(expected < KEY_SAMPLE - expected ? expected : KEY_SAMPLE - expected);
    for (int end = 0; end < 2; end++) {
        int64_t rank = (int64_t)(end ? expected - off : expected + off + 1);
        if (rank < 1 || rank > KEY_SAMPLE)
            continue;
        for (int64_t i = 0; i < KEY_SAMPLE; i++)
            sample[i] = bits[i * (n / KEY_SAMPLE)];
        ends[end] = ranked_of_all((u32 *)sample, KEY_SAMPLE, &rank, scratch);
    }
    int64_t above, left = use.between(bits, n, ends[0], ends[1], scratch, &above);
    if (k <= above || k > above + left)
        return ranked_of_all(bits, n, ties, scratch);
    *ties = k - above;
    return ranked(scratch, left, ties, ends[0], ends[1]);
}

/* ---- Selection, alone or as a step of error feedback -------------------------------------------------------------- */

/* Entries that are collected before the k largest of them are parted from the others. */
static int64_t room_of(int64_t n, int64_t k) { return least_of(2 * k + n / 64, n) + 4 * BLOCK; }

/* Bytes of scratch memory that a selection takes. */
EXPORT int64_t sc_scratch(int64_t n, int64_t k) { return 24 * (room_of(n, k) + SLACK); }

static void lay_out(Selecting *s, void *scratch) {
    s->room = room_of(s->n, s->k);
    s->index = scratch;
    s->bits = (u32 *)scratch + (s->room + SLACK);
    s->velocity = (u32 *)scratch + 2 * (s->room + SLACK);
    s->cut_index = (i32 *)scratch + 3 * (s->room + SLACK);
    s->cut_bits = (u32 *)scratch + 4 * (s->room + SLACK);
    s->spare = (u32 *)scratch + 5 * (s->room + SLACK);
    s->found = 0;
}

/* n elements get back what was taken out of them. */
static void put_back(Selecting *s, const i32 *index, const u32 *bits, const u32 *velocity, int64_t n) {
    u32 *vo = (u32 *)s->vo, *uo = (u32 *)s->uo;
    for (int64_t i = 0; i < n; i++) {
        if (i + NEXT < n)
            fetch(vo + index[i + NEXT]);
        vo[index[i]] = bits[i];
    }
    for (int64_t i = 0; uo && i < n; i++) {
        if (i + NEXT < n)
            fetch(uo + index[i + NEXT]);
        uo[index[i]] = velocity[i];
    }
}

/* Leaves the k largest of what was found, ties to the lowest index; what is not among them goes back. Later elements
 * must then be larger than the k-th: an equal one would come after k that are at least as large. */
static void shrink(Selecting *s) {
    int64_t ties, cut = s->found - s->k;
    uint32_t kth = kth_key(s->bits, s->found, s->k, s->spare, &ties);
    if (s->uo) { /* velocities are parted as the bits are: by the same keys */
        u32 *keys = s->spare;
        int64_t kept = 0, back = 0, left = ties;
        for (int64_t i = 0; i < s->found; i++) {
            uint32_t key = s->bits[i] & MAGNITUDE, velocity = s->velocity[i];
            int tie = key == kth, keep = (key > kth) | (tie & (left > 0));
            left -= tie;
            keys[back] = velocity;
            s->velocity[kept] = velocity;
            kept += keep;
            back += !keep;
        }
        memcpy(s->velocity + s->k, keys, (size_t)cut * 4);
    }
    use.split(s->index, s->bits, s->found, kth, &ties, s->index, s->bits, s->k, s->cut_index, s->cut_bits, cut);
    if (s->clears)
        put_back(s, s->cut_index, s->cut_bits, s->velocity + s->k, cut);
    s->found = s->k;
    s->least = kth + 1;
}

static void sweep(Selecting *s) {
    for (int64_t start = 0; start < s->n; start += BLOCK) {
        int64_t n = least_of(BLOCK, s->n - start);
        if (s->found + n > s->room)
            shrink(s);
        s->found += use.step(s, start, n);
    }
}

static float foreseen(const Selecting *s, int64_t i) {
    if (!s->g)
        return s->vo[i];
    float g = s->kind == FLOAT32    ? ((const f32 *)s->g)[i]
              : s->kind == BFLOAT16 ? widened_bf16(((const u16 *)s->g)[i])
                                    : widened_fp16(((const u16 *)s->g)[i]);
    return s->v[i] + (s->u ? s->u[i] * s->m + g : g);
}

/* A key that little more than k elements most likely reach: of a sample, as in threshold.py, but in runs of RUN: each
 * costs one cache miss. The stride between them is odd: rows of even length do not put the sample into few columns. */
static uint32_t sampled(Selecting *s) {
    int64_t size = least_of(most_of(s->n / 512, MIN_SAMPLE), MAX_SAMPLE), stride = s->n / size * RUN | 1, taken = 0;
    if (s->n <= 4 * size)
        return 0;
    for (int64_t i = 0; i + RUN <= s->n; i += stride)
        for (int64_t j = i; j < i + RUN; j++)
            s->bits[taken++] = to_bits(foreseen(s, j));
    double expected = (double)taken * (double)s->k / (double)s->n;
    int64_t rank = (int64_t)(expected + spread(expected)) + 1;
    return rank < taken ? ranked_of_all(s->bits, taken, &rank, s->spare) : 0;
}

static int64_t selected(Selecting *s, int64_t least, i32 *index, u32 *bits) {
    uint32_t asked = least < 0 ? 0 : (uint32_t)least, likely = sampled(s);
    s->least = likely > asked ? likely : asked; /* of many that reach what is asked only the largest are looked at */
    sweep(s);
    if (likely > asked && s->found < s->k) { /* the sample misled: once more, of all that is asked */
        if (s->clears)
            put_back(s, s->index, s->bits, s->velocity, s->found);
        s->found = 0, s->least = asked, s->g = NULL;
        sweep(s);
    }
    if (s->found > s->k)
        shrink(s);
    memcpy(index, s->index, (size_t)s->found * 4);
    memcpy(bits, s->bits, (size_t)s->found * 4);
    if (s->base)
        for (int64_t i = 0; i < s->found; i++)
            index[i] += (int32_t)s->base;
    return s->found;
}

/* The k largest of n elements, or (least >= 0) those whose key reaches `least`, the k largest of them if more.
 * index, bits: room for k; base is added to the indices. scratch: sc_scratch(n, k) bytes. Returns their number. */
EXPORT int64_t sc_select(const void *x, int64_t n, int64_t k, int64_t least, int64_t base, void *index, void *bits,
                         void *scratch) {
    Selecting s = {.vo = (f32 *)(uintptr_t)x, .n = n, .k = k, .base = base};
    lay_out(&s, scratch);
    return selected(&s, least, index, bits);
}

/* Accumulates n elements from number `base` on, selects as sc_select does, and clears what it has selected. v, u, g, vo,
 * uo: of all elements; u, uo: NULL without momentum; vo, uo: where v, u are, or other memory. */
EXPORT int64_t sc_step(const void *v, const void *u, const void *g, int kind, float m, void *vo, void *uo, int64_t n,
                       int64_t k, int64_t least, int64_t base, void *index, void *bits, void *scratch) {
    Selecting s = {.v = (const f32 *)v + base, .u = u ? (const f32 *)u + base : NULL,
                   .g = (const char *)g + base * (kind == FLOAT32 ? 4 : 2), .kind = kind, .m = m,
                   .vo = (f32 *)vo + base, .uo = uo ? (f32 *)uo + base : NULL, .clears = 1,
                   .n = n, .k = k, .base = base};
    lay_out(&s, scratch);
    return selected(&s, least, index, bits);
}

/* ---- Sums of sparse vectors --------------------------------------------------------------------------------------- */

/* a + b; of two NaNs a, quieted, which a compiler that swaps operands would not keep. */
INLINE float sum_of(float a, float b) {
#ifdef X86
    __asm__("addss %1, %0" : "+x"(a) : "x"(b));
    return a;
#else
    return a != a ? from_bits(to_bits(a) | QUIET) : a + b;
#endif
}

/* Of the first d entries of both, merged: how many are of a. An equal index is not parted: *j gets b's. */
static int64_t parted(const i32 *ai, int64_t na, const i32 *bi, int64_t nb, int64_t d, int64_t *j) {
    int64_t low = most_of(0, d - nb), high = least_of(d, na);
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ai[middle] <= bi[d - 1 - middle])
            low = middle + 1;
        else
            high = middle;
    }
    *j = d - low;
    *j += low > 0 && *j < nb && ai[low - 1] == bi[*j];
    return low;
}

/* Where each stream begins in a and b; the last one's end behind them. */
static void streams_of(const i32 *ai, int64_t na, const i32 *bi, int64_t nb, int64_t *i, int64_t *j) {
    i[0] = j[0] = 0, i[STREAMS] = na, j[STREAMS] = nb;
    for (int s = 1; s < STREAMS; s++)
        i[s] = parted(ai, na, bi, nb, (na + nb) * s / STREAMS, &j[s]);
}

/* The entry of the smaller index, or of both with a + b, to place o of stream S. By masks, because of a choice compilers
 * make a branch, which is taken one way as often as the other. */
#define MERGE_ONE(S)                                                             \
    {                                                                            \
        int32_t a = ai[i##S], b = bi[j##S];                                      \
        uint32_t x = ((const u32 *)av)[i##S], y = ((const u32 *)bv)[j##S];       \
        uint32_t sum = to_bits(sum_of(from_bits(x), from_bits(y)));              \
        uint32_t from_a = -(uint32_t)(a <= b), from_b = -(uint32_t)(b <= a);     \
        x ^= (x ^ sum) & from_b;                                                 \
        index[at##S + o] = b ^ ((a ^ b) & (int32_t)from_a);                      \
        value[at##S + o] = y ^ ((y ^ x) & from_a);                               \
        i##S += from_a & 1;                                                      \
        j##S += from_b & 1;                                                      \
    }

/* What stream S reads and writes in a while: they are more streams than a processor foresees by itself. */
#define FETCH_AHEAD(S)                                        \
    {                                                         \
        fetch(ai + i##S + LATER), fetch(av + i##S + LATER);   \
        fetch(bi + j##S + LATER), fetch(bv + j##S + LATER);   \
        __builtin_prefetch(index + at##S + o + LATER, 1);     \
        __builtin_prefetch(value + at##S + o + LATER, 1);     \
    }

/* Entries in STREAMS pieces, at the start of scratch memory of PIECES + 12 (entries + SLACK) bytes: where each begins and
 * ends; behind it their indices, their values, and memory to select from them, each with room for so many. */
typedef struct {
    int64_t at[2 * STREAMS];
    i32 *index;
    u32 *value, *spare;
} Pieces;

INLINE Pieces *pieces_of(void *scratch, int64_t entries) {
    Pieces *pieces = scratch;
    pieces->index = (i32 *)((char *)scratch + PIECES);
    pieces->value = (u32 *)pieces->index + (entries + SLACK);
    pieces->spare = pieces->value + (entries + SLACK);
    return pieces;
}

/* a + b over the union of their indices, which increase, in pieces: a stream waits for its own loads, so they take turns.
 * scratch: for the pieces of na + nb entries; the values between pieces are 0. Returns the entries of all. */
EXPORT int64_t sc_union(const void *a_index, const void *a_value, int64_t na, const void *b_index, const void *b_value,
                        int64_t nb, void *scratch) {
    const i32 *ai = a_index, *bi = b_index;
    const f32 *av = a_value, *bv = b_value;
    Pieces *pieces = pieces_of(scratch, na + nb);
    i32 *index = pieces->index;
    u32 *value = pieces->value;
    int64_t i[STREAMS + 1], j[STREAMS + 1], o = 0, entries = 0;
    streams_of(ai, na, bi, nb, i, j);
    int64_t i0 = 0, i1 = i[1], i2 = i[2], i3 = i[3], j0 = 0, j1 = j[1], j2 = j[2], j3 = j[3];
    const int64_t at0 = 0, at1 = i1 + j1, at2 = i2 + j2, at3 = i3 + j3;
    for (;;) {
        int64_t first = least_of(least_of(i[1] - i0, j[1] - j0), least_of(i[2] - i1, j[2] - j1));
        int64_t second = least_of(least_of(i[3] - i2, j[3] - j2), least_of(i[4] - i3, j[4] - j3));
        int64_t end = o + least_of(least_of(first, second), TURN);
        if (end <= o)
            break;
        FETCH_AHEAD(0)
        FETCH_AHEAD(1)
        FETCH_AHEAD(2)
        FETCH_AHEAD(3)
        for (; o < end; o++) {
            MERGE_ONE(0)
            MERGE_ONE(1)
            MERGE_ONE(2)
            MERGE_ONE(3)
        }
    }
    const int64_t is[STREAMS] = {i0, i1, i2, i3}, js[STREAMS] = {j0, j1, j2, j3}, done = o;
    for (int s = 0; s < STREAMS; s++) { /* what is left of each */
        int64_t iS = is[s], jS = js[s], atS = i[s] + j[s];
        for (o = done; iS < i[s + 1] && jS < j[s + 1]; o++)
            MERGE_ONE(S)
        o += atS;
        int64_t a = i[s + 1] - iS, b = j[s + 1] - jS, room = i[s + 1] + j[s + 1];
        memcpy(index + o, ai + iS, (size_t)a * 4), memcpy(value + o, av + iS, (size_t)a * 4);
        o += a;
        memcpy(index + o, bi + jS, (size_t)b * 4), memcpy(value + o, bv + jS, (size_t)b * 4);
        o += b;
        memset(value + o, 0, (size_t)(room - o) * 4);
        pieces->at[2 * s] = atS, pieces->at[2 * s + 1] = o;
        entries += o - atS;
    }
    return entries;
}

/* The entry of a, kept where b has not its index. */
#define KEEP_ONE(S)                            \
    {                                          \
        int32_t a = ai[i##S], b = bi[j##S];    \
        index[o##S] = a;                       \
        value[o##S] = av[i##S];                \
        o##S += a < b;                         \
        i##S += a <= b;                        \
        j##S += b <= a;                        \
    }

/* The entries of a whose index b does not have, in pieces; see sc_union. */
EXPORT int64_t sc_without(const void *a_index, const void *a_value, int64_t na, const void *b_index, int64_t nb,
                          void *scratch) {
    const i32 *ai = a_index, *bi = b_index;
    const u32 *av = a_value;
    Pieces *pieces = pieces_of(scratch, na + nb);
    i32 *index = pieces->index;
    u32 *value = pieces->value;
    int64_t i[STREAMS + 1], j[STREAMS + 1], entries = 0;
    streams_of(ai, na, bi, nb, i, j);
    int64_t i0 = 0, i1 = i[1], i2 = i[2], i3 = i[3], j0 = 0, j1 = j[1], j2 = j[2], j3 = j[3];
    int64_t o0 = 0, o1 = i1 + j1, o2 = i2 + j2, o3 = i3 + j3;
    for (;;) {
        int64_t first = least_of(least_of(i[1] - i0, j[1] - j0), least_of(i[2] - i1, j[2] - j1));
        int64_t second = least_of(least_of(i[3] - i2, j[3] - j2), least_of(i[4] - i3, j[4] - j3));
        int64_t steps = least_of(first, second);
        if (steps <= 0)
            break;
        for (; steps; steps--) {
            KEEP_ONE(0)
            KEEP_ONE(1)
            KEEP_ONE(2)
            KEEP_ONE(3)
        }
    }
    const int64_t is[STREAMS] = {i0, i1, i2, i3}, js[STREAMS] = {j0, j1, j2, j3}, os[STREAMS] = {o0, o1, o2, o3};
    for (int s = 0; s < STREAMS; s++) { /* what is left of each */
        int64_t iS = is[s], jS = js[s], oS = os[s];
        while (iS < i[s + 1] && jS < j[s + 1])
            KEEP_ONE(S)
        size_t left = (size_t)(i[s + 1] - iS);
        memcpy(index + oS, ai + iS, left * 4), memcpy(value + oS, av + iS, left * 4);
        pieces->at[2 * s] = i[s] + j[s], pieces->at[2 * s + 1] = oS + (int64_t)left;
        entries += pieces->at[2 * s + 1] - pieces->at[2 * s];
    }
    return entries;
}

/* The entries of all pieces, one after the other. */
EXPORT void sc_join(const void *scratch, void *out_index, void *out_bits) {
    const Pieces *pieces = scratch;
    i32 *at = out_index;
    u32 *word = out_bits;
    for (int s = 0; s < STREAMS; s++) {
        int64_t start = pieces->at[2 * s], n = pieces->at[2 * s + 1] - start;
        memcpy(at, pieces->index + start, (size_t)n * 4);
        memcpy(word, pieces->value + start, (size_t)n * 4);
        at += n, word += n;
    }
}

/* How many of n indices, which increase, are below high. */
static int64_t below(const i32 *index, int64_t n, int64_t high) {
    int64_t low = 0;
    while (low < n) {
        int64_t middle = (low + n) / 2;
        if (index[middle] < high)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* Parts the entries of pieces into the largest of every block, as many as its budget, ties to the lowest index, and the
 * others; both in order. Block b ends before index highs[b], and the last one holds the last entry. kept and cut: room
 * for what they get, and no more. Returns 0, and leaves kept and cut unfinished, where a block has fewer entries than its
 * budget. */
EXPORT int sc_split(void *scratch, const int64_t *highs, const int64_t *budgets, int64_t blocks, void *kept_index,
                    void *kept_bits, void *cut_index, void *cut_bits) {
    const Pieces *pieces = scratch;
    const i32 *at = pieces->index;
    const u32 *word = pieces->value;
    i32 *kept_at = kept_index, *cut_at = cut_index;
    u32 *kept = kept_bits, *cut = cut_bits;
    int64_t start[STREAMS], end[STREAMS], ties = 0;
    uint32_t kth = 0;
    for (int s = 0; s < STREAMS; s++)
        end[s] = pieces->at[2 * s];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t all = 0, k = budgets[b], first = -1, last = 0;
        for (int s = 0; s < STREAMS; s++) {
            start[s] = end[s];
            end[s] += below(at + start[s], pieces->at[2 * s + 1] - start[s], highs[b]);
            if (end[s] > start[s])
                first = first < 0 ? start[s] : first, last = end[s];
            all += end[s] - start[s];
        }
        int64_t others = all - k;
        if (others < 0)
            return 0;
        if (k && others) /* what lies between pieces is 0, and so never larger than the k-th of them */
            kth = kth_key(word + first, last - first, k, pieces->spare, &ties);
        for (int s = 0; s < STREAMS; s++) {
            int64_t n = end[s] - start[s], keeps = k ? n : 0;
            if (k && others) {
                keeps = use.split(at + start[s], word + start[s], n, kth, &ties, kept_at, kept, k, cut_at, cut, others);
            } else {
                memcpy(k ? kept_at : cut_at, at + start[s], (size_t)n * 4);
                memcpy(k ? kept : cut, word + start[s], (size_t)n * 4);
            }
            kept_at += keeps, kept += keeps, cut_at += n - keeps, cut += n - keeps;
            k -= keeps, others -= n - keeps;
        }
    }
    return 1;
}

/* Entries of a key above kth, and the first `ties` of those equal to it. kept: room for n and SLACK; nothing is written
 * where all are kept. scratch: 8 bytes for n and SLACK. Returns how many. */
EXPORT int64_t sc_filter(const void *index, const void *bits, int64_t n, int32_t kth, int64_t ties, void *kept_index,
                         void *kept_bits, void *scratch) {
    const u32 *word = bits;
    int32_t above = 0, equal = 0; /* negative: as comparing vectors counts */
    for (int64_t i = 0; i < n; i++) {
        above -= (int32_t)(word[i] & MAGNITUDE) > kth;
        equal -= (int32_t)(word[i] & MAGNITUDE) == kth;
    }
    if (least_of(ties, -equal) - above == n)
        return n;
    int64_t room = n + SLACK;
    return use.split(index, bits, n, (uint32_t)kth, &ties, kept_index, kept_bits, room, scratch,
                     (u32 *)scratch + room, room);
}

/* The keys of n floats that are `least` or larger, the smallest first. keys, scratch: room for n and SLACK each. Returns
 * how many. Digit by digit of their range, the last digit first. */
EXPORT int64_t sc_sorted(const void *bits, int64_t n, uint32_t least, void *keys, void *scratch) {
    u32 *from = scratch, *to = keys;
    int64_t higher, m = use.between(bits, n, least, MAGNITUDE, from, &higher);
    uint32_t low = MAGNITUDE, high = 0, counts[4][DIGITS];
    for (int64_t i = 0; i < m; i++) {
        low = from[i] < low ? from[i] : low;
        high = from[i] > high ? from[i] : high;
    }
    int width = m && high > low ? 32 - __builtin_clz(high - low) : 1, digits = (width + 10) / 11;
    int size = (width + digits - 1) / digits, places = 1 << size;
    digits += !(digits & 1); /* an odd number of turns ends in keys */
    memset(counts, 0, sizeof counts);
    for (int64_t i = 0; i < m; i++)
        for (int d = 0; d < digits; d++)
            counts[d][(uint64_t)(from[i] - low) >> (d * size) & (places - 1)]++;
    for (int d = 0; d < digits; d++) {
        uint32_t sum = 0;
        for (int p = 0; p < places; p++) {
            uint32_t count = counts[d][p];
            counts[d][p] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < m; i++)
            to[counts[d][(uint64_t)(from[i] - low) >> (d * size) & (places - 1)]++] = from[i];
        u32 *swapped = from;
        from = to, to = swapped;
    }
    return m;
}

/* How many of n keys are `least` or larger. */
INLINE int64_t at_least_of(const i32 *keys, int64_t n, int64_t least) {
    int32_t below_it = (int32_t)least_of(least, MAGNITUDE), found = 0; /* negative: as comparing vectors counts */
    for (int64_t i = 0; i < n; i++)
        found -= keys[i] >= below_it;
    return least > MAGNITUDE ? 0 : -(int64_t)found;
}

/* Keys that are spread over ranks: samples enclose the k-th largest (kth_largest.py of sparse-collectives). rows: of
 * each rank how many keys it has, and `samples` of them, every g-th, g = ceil(keys / samples), smallest or largest first.
 * ends: the two keys that enclose it. spans: of each rank the first and the last of its keys that may be it, the largest
 * first. */
EXPORT void sc_bracket(const void *rows, int64_t ranks, int64_t samples, int64_t k, int64_t *ends, int64_t *spans) {
    const i32 *row = rows;
    int64_t width = 1 + samples, more = 0;
#define GAP(ROW) (most_of(((ROW)[0] + samples - 1) / samples, 1))
    for (int64_t r = 0; r < ranks; r++)
        more += GAP(row + r * width) - 1;
    for (int end = 0; end < 2; end++) {
        int64_t wanted = end ? k - more : k, low = -1, high = MAGNITUDE; /* low is reached by as many as are wanted */
        while (wanted > 0 && low < high) {
            int64_t middle = low + (high - low + 1) / 2, reached = 0;
            for (const i32 *own = row; own < row + ranks * width; own += width)
                reached += GAP(own) * at_least_of(own + 1, own[0] / GAP(own), middle);
            if (reached >= wanted)
                low = middle;
            else
                high = middle - 1;
        }
        ends[end] = wanted > 0 ? low : MAGNITUDE;
    }
    for (int64_t r = 0; r < ranks; r++) {
        const i32 *own = row + r * width;
        int64_t gap = GAP(own), taken = own[0] / gap;
        int64_t first = gap * at_least_of(own + 1, taken, ends[1]);
        int64_t last = least_of(gap * at_least_of(own + 1, taken, ends[0] + 1) + gap - 1, own[0]);
        spans[2 * r] = first, spans[2 * r + 1] = most_of(first, last);
    }
#undef GAP
}

/* What a rank says of its n keys, the smallest first: how many are larger than high, equal it, and equal low; then those
 * from `first` to `last` of the largest. */
EXPORT void sc_say(const void *keys, int64_t n, int64_t low, int64_t high, int64_t first, int64_t last, void *out) {
    const i32 *own = keys;
    i32 *said = out;
    int64_t upto_high = below(own, n, high + 1), upto_low = below(own, n, low + 1);
    said[0] = (int32_t)(n - upto_high);
    said[1] = (int32_t)(upto_high - below(own, n, high));
    said[2] = (int32_t)(upto_low - below(own, n, low));
    if (last > first) /* else there may be no memory to point to */
        memcpy(said + 3, own + (n - last), (size_t)(last - first) * 4);
}

/* The k-th largest of keys that are spread over ranks. rows: of each rank, one after the other, `lengths` numbers: how
 * many of its keys are larger than high, equal it, and equal low, then keys, of which those between low and high count.
 * larger, equal: how many of each rank's keys are larger than it, and equal it. scratch: 8 bytes for each number, and
 * SLACK. */
EXPORT int64_t sc_settle(const void *rows, const int64_t *lengths, int64_t ranks, int64_t low, int64_t high, int64_t k,
                         int64_t *larger, int64_t *equal, void *scratch) {
    const i32 *row = rows;
    u32 *inside = scratch;
    int64_t wanted = k, m = 0, ties;
    for (int64_t r = 0; r < ranks; row += lengths[r++]) {
        int64_t before = m;
        for (int64_t i = 3; i < lengths[r]; i++) {
            inside[m] = (uint32_t)row[i];
            m += row[i] > low && row[i] < high;
        }
        larger[r] = (int64_t)row[0] + row[1], equal[r] = m - before;
        wanted -= larger[r];
    }
    const int64_t between = m;
    int64_t found = 0;
    if (wanted > 0 && wanted <= m)
        found = (int64_t)kth_key(inside, m, wanted, inside + m + SLACK, &ties);
    row = rows;
    for (int64_t r = 0; r < ranks; inside += m, row += lengths[r++]) {
        m = equal[r];
        if (wanted <= 0)
            larger[r] = row[0], equal[r] = row[1], found = high;
        else if (wanted > between)
            larger[r] += m, equal[r] = row[2], found = low;
        else
            for (int64_t i = equal[r] = 0; i < m; i++) {
                larger[r] += inside[i] > (uint32_t)found;
                equal[r] += inside[i] == (uint32_t)found;
            }
    }
    return found;
}

/* Whether n indices increase strictly, from low on and below high. */
EXPORT int sc_increasing(const void *index, int64_t n, int64_t low, int64_t high) {
    const i32 *at = index;
    int32_t wrong = 0;
    for (int64_t i = 1; i < n; i++)
        wrong |= at[i] <= at[i - 1];
    return !wrong && (!n || (at[0] >= low && at[n - 1] < high));
}

/* Every `step`-th of n entries from `first` on. */
EXPORT void sc_every(const void *index, const void *value, int64_t n, int64_t first, int64_t step, void *out_index,
                     void *out_value) {
    const i32 *at = index;
    const u32 *x = value;
    i32 *out_at = out_index;
    u32 *out = out_value;
    for (int64_t i = first; i < n; i += step) {
        *out_at++ = at[i];
        *out++ = x[i];
    }
}

/* ---- Between sparse and dense ------------------------------------------------------------------------------------- */

/* out <- 0, and value / divisor at the indices, which increase; n elements. A window at a time, while it is in L1; the
 * next one is fetched for writing, since out is mostly a gradient that was used shortly before. */
EXPORT void sc_put(void *out, int64_t n, const void *index, const void *value, int64_t count, float divisor) {
    f32 *dense = out;
    const i32 *at = index;
    const f32 *x = value;
    for (int64_t start = 0, i = 0; start < n; start += WINDOW) {
        int64_t length = least_of(WINDOW, n - start), end = start + length;
        for (int64_t ahead = WINDOW; ahead < 2 * WINDOW; ahead += LINE)
            __builtin_prefetch(dense + start + ahead, 1);
        memset(dense + start, 0, (size_t)length * 4);
        if (divisor == 1) /* as it is, whatever NaN */
            for (; i < count && at[i] < end; i++)
                ((u32 *)dense)[at[i]] = ((const u32 *)x)[i];
        else
            for (; i < count && at[i] < end; i++)
                dense[at[i]] = x[i] / divisor;
    }
}

/* Whether none of n values is NaN or inf. */
EXPORT int sc_finite(const void *values, int64_t n) {
    const u32 *bits = values;
    uint32_t huge = 0;
    for (int64_t i = 0; i < n; i++)
        huge |= (bits[i] & MAGNITUDE) >= 0x7F800000;
    return !huge;
}

/* out <- out + value at the indices. */
EXPORT void sc_add_at(void *out, const void *index, const void *value, int64_t count) {
    f32 *sums = out;
    const i32 *at = index;
    const f32 *x = value;
    for (int64_t i = 0; i < count; i++) {
        if (i + NEXT < count)
            fetch(sums + at[i + NEXT]);
        sums[at[i]] = sums[at[i]] + x[i];
    }
}

/* v <- v - value at the indices, 0 where that is not finite, and u <- 0 there; without u where it is null. */
EXPORT void sc_take_out(void *v, void *u, const void *index, const void *value, int64_t count) {
    f32 *residual = v, *velocity = u;
    const i32 *at = index;
    const f32 *x = value;
    for (int64_t i = 0; i < count; i++) {
        f32 left = residual[at[i]] - x[i];
        residual[at[i]] = left - left == 0 ? left : 0;
        if (velocity)
            velocity[at[i]] = 0;
    }
}

/* ---- Fewer bytes -------------------------------------------------------------------------------------------------- */

EXPORT void sc_to_bf16(const void *values, int64_t n, void *out) { use.to_bf16(values, n, out); }
EXPORT void sc_of_bf16(const void *half, int64_t n, void *out) { use.of_bf16(half, n, out); }
EXPORT int sc_to_int8(const void *values, int64_t n, void *out) { return use.to_int8(values, n, out); }
EXPORT void sc_of_int8(const void *steps, int64_t n, int power, void *out) { use.of_int8(steps, n, power, out); }
EXPORT void sc_leftover(const void *values, const void *rounded, int64_t n, void *out) {
    use.leftover(values, rounded, n, out);
}

/* ---- Fewer bytes: indices (elias_fano.py) ------------------------------------------------------------------------- */

/* 8 bytes, the first the lowest. */
INLINE uint64_t load(const uint8_t *at) {
    uint64_t word = 0;
    for (int b = 0; b < 8; b++)
        word |= (uint64_t)at[b] << (8 * b);
    return word;
}

INLINE void store(uint8_t *at, uint64_t word) {
    for (int b = 0; b < 8; b++, word >>= 8)
        at[b] = (uint8_t)word;
}

INLINE int64_t ones(uint64_t word) {
    word -= word >> 1 & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
    return (int64_t)(((word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * 0x0101010101010101u >> 56);
}

/* 8 bytes of 8 bits, the first in the lowest, with rows and columns exchanged (Warren, Hacker's Delight, 7-3). */
INLINE uint64_t transposed(uint64_t x) {
    uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAu;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCu;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0u;
    return x ^ t ^ (t << 28);
}

/* n increasing indices: their `low` lowest bits in planes of whole bytes, and the rest in `high` bits of unary. */
EXPORT void sc_pack_indices(const void *index, int64_t n, int low, int64_t high, void *out) {
    const i32 *at = index;
    uint8_t *plane = out;
    int64_t width = (n + 7) / 8;
    for (int64_t i = 0; i < n; i += 8)
        for (int first = 0; first < low; first += 8) {
            uint64_t rows = 0;
            for (int64_t j = 0; j < least_of(8, n - i); j++)
                rows |= (uint64_t)((uint32_t)at[i + j] >> first & 0xFF) << (8 * j);
            rows = transposed(rows);
            for (int bit = first; bit < low && bit < first + 8; bit++, rows >>= 8)
                plane[bit * width + i / 8] = (uint8_t)rows;
        }
    uint8_t *unary = plane + low * width;
    if (n) /* else there is no memory to point to */
        memset(unary, 0, (size_t)((high + 7) / 8));
    uint64_t word = 0;
    int64_t place = 0; /* of the word, in bits */
    for (int64_t i = 0; i < n; i++) {
        int64_t bit = (int64_t)(at[i] >> low) + i;
        if (bit - place >= 64) {
            store(unary + place / 8, word); /* what follows has this bit, so there is room */
            place = bit & ~(int64_t)63;
            word = 0;
        }
        word |= (uint64_t)1 << (bit - place);
    }
    for (; word; word >>= 8, place += 8)
        unary[place / 8] |= (uint8_t)word;
}

/* The n indices that sc_pack_indices has packed. Returns how many there are: where not n, out is unfinished. */
EXPORT int64_t sc_unpack_indices(const void *packed, int64_t n, int low, int64_t high, void *out) {
    const uint8_t *plane = packed, *unary;
    u32 *at = out;
    int64_t width = (n + 7) / 8, found = 0, all = 0;
    unary = plane + low * width;
    for (int64_t place = 0; place < high; place += 64) {
        uint64_t word = 0;
        if (high - place >= 64)
            word = load(unary + place / 8);
        else
            for (int64_t b = place; b < high; b++)
                word |= (uint64_t)(unary[b / 8] >> (b & 7) & 1) << (b - place);
        all += ones(word);
        if (all > n)
            continue; /* only counted */
        for (; word; word &= word - 1, found++)
            at[found] = (uint32_t)(place + __builtin_ctzll(word) - found) << low;
    }
    if (all != n)
        return all;
    for (int first = 0; first < low; first += 8)
        for (int64_t i = 0; i < n; i += 8) {
            uint64_t rows = 0;
            for (int bit = first; bit < low && bit < first + 8; bit++)
                rows |= (uint64_t)plane[bit * width + i / 8] << (8 * (bit - first));
            rows = transposed(rows);
            for (int64_t j = 0; j < least_of(8, n - i); j++, rows >>= 8)
                at[i + j] |= (uint32_t)(rows & 0xFF) << first;
        }
    return n;
}
