/* Adds fp32, fp16 and bf16 elements to sums and sketches on processors with AVX-512: the bits of kernel.c.
 *
 * The lanes fill two vectors of doubles. Signs are bits that become masks: a sixteenth of the memory of signs as bytes.
 */

#include "vectors.h"

#if defined(HAS_X86_VECTORS)
#include <immintrin.h>
#include <stddef.h>

#define AVX512 __attribute__((target("arch=x86-64-v4")))
#define INSIDE_AVX512 INSIDE AVX512

enum { HALF = LANES / 2 };
#define LOWER(floats) _mm512_cvtps_pd(_mm512_castps512_ps256(floats))
#define UPPER(floats) _mm512_cvtps_pd(_mm512_extractf32x8_ps(floats, 1))

/* The wanted ones of sixteen elements as floats, the others as zeros. */
#define FROM_FLOAT32(source, wanted) _mm512_maskz_loadu_ps(wanted, source)
#define FROM_FLOAT16(source, wanted) _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(wanted, source))
#define FROM_BFLOAT16(source, wanted)                                                                                      \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, source)), 16))

typedef struct {
    __m512 low, high;
    int64_t zeros;
    __m512d sum[2], squares[2], magnitudes[2];
} Registers;

INSIDE_AVX512 Registers nothing(void) {
    const __m512 infinite = _mm512_set1_ps(__builtin_inff());
    return (Registers){.low = infinite, .high = -infinite};
}

INSIDE_AVX512 int count_zeros(__m512 numbers) {
    return __builtin_popcount(_mm512_cmp_ps_mask(numbers, _mm512_setzero_ps(), _CMP_EQ_OQ));
}

INSIDE_AVX512 void add_half(Registers *registers, int half, __m512d wide) {
    registers->sum[half] = _mm512_fmadd_pd(wide, _mm512_set1_pd(1), registers->sum[half]);
    registers->squares[half] = _mm512_fmadd_pd(wide, wide, registers->squares[half]);
    registers->magnitudes[half] = _mm512_add_pd(registers->magnitudes[half], _mm512_abs_pd(wide));
}

INSIDE_AVX512 void add_sixteen(Registers *registers, __m512 numbers) {
    registers->low = _mm512_min_ps(numbers, registers->low); /* the second one if either is NaN */
    registers->high = _mm512_max_ps(numbers, registers->high);
    registers->zeros += count_zeros(numbers);
    add_half(registers, 0, LOWER(numbers));
    add_half(registers, 1, UPPER(numbers));
}

INSIDE_AVX512 void store(const Registers *registers, Lanes *lanes) {
    *lanes = (Lanes){.zeros = {registers->zeros}};
    _mm512_storeu_ps(lanes->low, registers->low);
    _mm512_storeu_ps(lanes->high, registers->high);
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_pd(lanes->sum + HALF * half, registers->sum[half]);
        _mm512_storeu_pd(lanes->squares + HALF * half, registers->squares[half]);
        _mm512_storeu_pd(lanes->magnitudes + HALF * half, registers->magnitudes[half]);
    }
}

/* Defines NAME: see `Vectors.add`. */
#define DEFINE_ADD(NAME, STORED, FROM)                                                                                     \
    AVX512 static void NAME(const void *source, int64_t count, Lanes *lanes) {                                             \
        Registers registers = nothing();                                                                                   \
        for (const STORED *element = source, *end = element + count; element < end; element += LANES)                      \
            add_sixteen(&registers, FROM(element, -1));                                                                    \
        store(&registers, lanes);                                                                                          \
    }

DEFINE_ADD(add_float32, float, FROM_FLOAT32)
DEFINE_ADD(add_float16, uint16_t, FROM_FLOAT16)

/* Puts even and odd lanes in order. */
INSIDE_AVX512 void interleave(__m512d halves[2]) {
    const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), upper = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    const __m512d even = halves[0], odd = halves[1];
    halves[0] = _mm512_permutex2var_pd(even, lower, odd);
    halves[1] = _mm512_permutex2var_pd(even, upper, odd);
}

INSIDE_AVX512 __m512 interleaved(const __m256 halves[2]) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(_mm512_castps256_ps512(halves[0]), order, _mm512_castps256_ps512(halves[1]));
}

/* Thirty-two elements at a time: a shift makes floats of the even ones, a mask of the odd ones, and nothing is shuffled. */
AVX512 static void add_bfloat16(const void *source, int64_t count, Lanes *lanes) {
    Registers registers = nothing();
    const uint16_t *element = source, *end = element + count;
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    __m256 low[2] = {infinite, infinite}, high[2] = {-infinite, -infinite};
    for (; element + 2 * LANES <= end; element += 2 * LANES) {
        const __m512i pairs = _mm512_loadu_si512(element);
        const __m512 floats[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                                  _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)))};
        for (int group = 0; group < 2; group++) /* of sixteen */
            for (int half = 0; half < 2; half++) {
                __m256 numbers = group ? _mm512_extractf32x8_ps(floats[half], 1) : _mm512_castps512_ps256(floats[half]);
                low[half] = _mm256_min_ps(numbers, low[half]);
                high[half] = _mm256_max_ps(numbers, high[half]);
                add_half(&registers, half, _mm512_cvtps_pd(numbers));
            }
        for (int half = 0; half < 2; half++)
            registers.zeros += count_zeros(floats[half]);
    }
    interleave(registers.sum), interleave(registers.squares), interleave(registers.magnitudes);
    registers.low = interleaved(low), registers.high = interleaved(high);
    if (element < end)
        add_sixteen(&registers, FROM_BFLOAT16(element, -1));
    store(&registers, lanes);
}

INSIDE_AVX512 __m512d add_rows(const __m512d row[CHUNK_ROWS]) {
    return _mm512_add_pd(_mm512_add_pd(row[0], row[1]), _mm512_add_pd(row[2], row[3]));
}

/* Defines NAME like kernel.c's `fold` for a whole chunk, and SIXTEEN for the `wanted` ones of sixteen columns. */
#define DEFINE_FOLD(NAME, SIXTEEN, STORED, FROM)                                                                           \
    INSIDE_AVX512 void SIXTEEN(const STORED *elements, int first_row, int strip, __mmask16 wanted, double *columns) { \
        __m512d lower[CHUNK_ROWS], upper[CHUNK_ROWS];                                                                      \
        for (int row = 0; row < CHUNK_ROWS; row++) {                                                                       \
            __m512 numbers = FROM(elements + FOLD * row + STRIP * strip, wanted);                                          \
            numbers = _mm512_mask_xor_ps(numbers, sign_bits[first_row + row][strip], numbers, _mm512_set1_ps(-0.0f));      \
            lower[row] = LOWER(numbers), upper[row] = UPPER(numbers);                                                      \
        }                                                                                                                  \
        double *column = columns + STRIP * strip;                                                                          \
        _mm512_storeu_pd(column, _mm512_add_pd(_mm512_loadu_pd(column), add_rows(lower)));                                 \
        _mm512_storeu_pd(column + HALF, _mm512_add_pd(_mm512_loadu_pd(column + HALF), add_rows(upper)));                   \
    }                                                                                                                      \
    AVX512 static void NAME(const void *source, int first_row, double *columns, const char *next, int64_t size) {          \
        for (int strip = 0; strip < STRIPS - 1; strip++) {                                                                 \
            if (strip % (STRETCH / STRIP) == 0)                                                                            \
                fetch_share(next, size, strip / (STRETCH / STRIP));                                                        \
            SIXTEEN(source, first_row, strip, -1, columns);                                                                \
        }                                                                                                                  \
        SIXTEEN(source, first_row, STRIPS - 1, (1 << FOLD % STRIP) - 1, columns); /* nothing is read beyond the last row */ \
    }

DEFINE_FOLD(fold_float32, fold_sixteen_float32, float, FROM_FLOAT32)
DEFINE_FOLD(fold_float16, fold_sixteen_float16, uint16_t, FROM_FLOAT16)
DEFINE_FOLD(fold_bfloat16, fold_sixteen_bfloat16, uint16_t, FROM_BFLOAT16)

static const Vectors vectors[VECTOR_TYPES] = {
    [VECTOR_FLOAT32] = {add_float32, fold_float32},
    [VECTOR_FLOAT16] = {add_float16, fold_float16},
    [VECTOR_BFLOAT16] = {add_bfloat16, fold_bfloat16},
};

const Vectors *avx512_vectors(void) { return __builtin_cpu_supports("x86-64-v4") ? vectors : NULL; }
#endif
