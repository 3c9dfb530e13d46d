/* Adds fp32, fp16 and bf16 elements to sums and sketches on processors with AVX2: the bits of kernel.c.
 *
 * The sums of all 16 lanes need 18 vector registers where AVX2 has 16, so eight lanes are added at a time. The sketch reads the
 * tensor itself, and not a copy as doubles, which would fill the L1 cache.
 */

#include "vectors.h"

#if defined(HAS_X86_VECTORS)
#include <immintrin.h>
#include <stddef.h>
#include <string.h>

enum { HALF = LANES / 2, BLOCK = 1024 }; /* a block stays in the L1 cache until its second half is added */
#define AVX2 __attribute__((target("arch=x86-64-v3")))
#define LOWER(floats) _mm256_cvtps_pd(_mm256_castps256_ps128(floats))
#define UPPER(floats) _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1))

/* Eight elements as floats. */
#define FROM_FLOAT32(source) _mm256_loadu_ps(source)
#define FROM_FLOAT16(source) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source)))
#define FROM_BFLOAT16(source)                                                                                              \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source))), 16))

/* Defines NAME: see `Vectors.add`. */
#define DEFINE_ADD(NAME, STORED, FROM)                                                                                     \
    AVX2 static void NAME(const void *source, int64_t count, Lanes *lanes) {                                               \
        const __m256d minus = _mm256_set1_pd(-0.0), one = _mm256_set1_pd(1);                                               \
        *lanes = (Lanes){0};                                                                                               \
        for (int lane = 0; lane < LANES; lane++)                                                                           \
            lanes->low[lane] = __builtin_inff(), lanes->high[lane] = -__builtin_inff();                                    \
        for (int64_t start = 0; start < count; start += BLOCK) {                                                           \
            int64_t end = start + BLOCK < count ? start + BLOCK : count;                                                   \
            for (int first = 0; first < LANES; first += HALF) {                                                            \
                float *low_at = lanes->low + first, *high_at = lanes->high + first;                                        \
                __m256i *zeros_at = (__m256i *)(lanes->zeros + first);                                                     \
                double *sum_at = lanes->sum + first, *squares_at = lanes->squares + first;                                 \
                double *magnitudes_at = lanes->magnitudes + first;                                                         \
                __m256 low = _mm256_loadu_ps(low_at), high = _mm256_loadu_ps(high_at);                                     \
                __m256i zeros = _mm256_loadu_si256(zeros_at);                                                              \
                __m256d sum[] = {_mm256_loadu_pd(sum_at), _mm256_loadu_pd(sum_at + 4)};                                    \
                __m256d squares[] = {_mm256_loadu_pd(squares_at), _mm256_loadu_pd(squares_at + 4)};                        \
                __m256d magnitudes[] = {_mm256_loadu_pd(magnitudes_at), _mm256_loadu_pd(magnitudes_at + 4)};               \
                for (int64_t index = start + first; index < end; index += LANES) {                                         \
                    __m256 numbers = FROM((const STORED *)source + index);                                                 \
                    low = _mm256_min_ps(numbers, low); /* the second one if either is NaN */                               \
                    high = _mm256_max_ps(numbers, high);                                                                   \
                    __m256 is_zero = _mm256_cmp_ps(numbers, _mm256_setzero_ps(), _CMP_EQ_OQ);                              \
                    zeros = _mm256_sub_epi32(zeros, _mm256_castps_si256(is_zero));                                         \
                    __m256d wide[] = {LOWER(numbers), UPPER(numbers)};                                                     \
                    for (int part = 0; part < 2; part++) {                                                                 \
                        sum[part] = _mm256_fmadd_pd(wide[part], one, sum[part]);                                           \
                        squares[part] = _mm256_fmadd_pd(wide[part], wide[part], squares[part]);                            \
                        magnitudes[part] = _mm256_add_pd(magnitudes[part], _mm256_andnot_pd(minus, wide[part]));           \
                    }                                                                                                      \
                }                                                                                                          \
                _mm256_storeu_ps(low_at, low), _mm256_storeu_ps(high_at, high);                                            \
                _mm256_storeu_si256(zeros_at, zeros);                                                                      \
                _mm256_storeu_pd(sum_at, sum[0]), _mm256_storeu_pd(sum_at + 4, sum[1]);                                    \
                _mm256_storeu_pd(squares_at, squares[0]), _mm256_storeu_pd(squares_at + 4, squares[1]);                    \
                _mm256_storeu_pd(magnitudes_at, magnitudes[0]), _mm256_storeu_pd(magnitudes_at + 4, magnitudes[1]);        \
            }                                                                                                              \
        }                                                                                                                  \
    }

DEFINE_ADD(add_float32, float, FROM_FLOAT32)
DEFINE_ADD(add_float16, uint16_t, FROM_FLOAT16)
DEFINE_ADD(add_bfloat16, uint16_t, FROM_BFLOAT16)

/* Adds four doubles, one of each row, to a column each. */
#define ADD_TO_COLUMNS(columns, row)                                                                                       \
    _mm256_storeu_pd(columns, _mm256_add_pd(_mm256_loadu_pd(columns),                                                      \
                                            _mm256_add_pd(_mm256_add_pd(row[0], row[1]), _mm256_add_pd(row[2], row[3]))))

/* Defines NAME like kernel.c's `fold` for a whole chunk, eight columns at a time; and EIGHT for `elements` of four rows, which
 * are `stride` elements apart. */
#define DEFINE_FOLD(NAME, EIGHT, STORED, FROM)                                                                             \
    AVX2 static inline void EIGHT(const STORED *elements, int stride, const uint8_t *sign, double *columns) {              \
        __m256d lower[CHUNK_ROWS], upper[CHUNK_ROWS];                                                                      \
        for (int row = 0; row < CHUNK_ROWS; row++) {                                                                       \
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(sign + FOLD * row));                                         \
            __m256 bits = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 24));                         \
            __m256 numbers = _mm256_xor_ps(FROM(elements + stride * row), bits);                                           \
            lower[row] = LOWER(numbers), upper[row] = UPPER(numbers);                                                      \
        }                                                                                                                  \
        ADD_TO_COLUMNS(columns, lower);                                                                                    \
        ADD_TO_COLUMNS(columns + 4, upper);                                                                                \
    }                                                                                                                      \
    AVX2 static void NAME(const void *source, int first_row, double *columns, const char *next, int64_t size) {            \
        const STORED *elements = source;                                                                                   \
        const uint8_t *sign = signs + FOLD * first_row;                                                                    \
        int column = 0;                                                                                                    \
        for (; column + 8 <= FOLD; column += 8) {                                                                          \
            if (column % STRETCH == 0)                                                                                     \
                fetch_share(next, size, column / STRETCH);                                                                 \
            EIGHT(elements + column, FOLD, sign + column, columns + column);                                               \
        }                                                                                                                  \
        STORED last[CHUNK_ROWS][8] = {0}; /* nothing is read beyond the last row */                                        \
        for (int row = 0; row < CHUNK_ROWS; row++)                                                                         \
            memcpy(last[row], elements + FOLD * row + column, (FOLD - column) * sizeof(STORED));                           \
        EIGHT(last[0], 8, sign + column, columns + column);                                                                \
    }

DEFINE_FOLD(fold_float32, fold_eight_float32, float, FROM_FLOAT32)
DEFINE_FOLD(fold_float16, fold_eight_float16, uint16_t, FROM_FLOAT16)
DEFINE_FOLD(fold_bfloat16, fold_eight_bfloat16, uint16_t, FROM_BFLOAT16)

static const Vectors vectors[VECTOR_TYPES] = {
    [VECTOR_FLOAT32] = {add_float32, fold_float32},
    [VECTOR_FLOAT16] = {add_float16, fold_float16},
    [VECTOR_BFLOAT16] = {add_bfloat16, fold_bfloat16},
};

const Vectors *avx2_vectors(void) { return __builtin_cpu_supports("x86-64-v3") ? vectors : NULL; }
#endif
