/* Adds fp32 and bf16 elements to sums and sketches on processors with AVX2: the bits of kernel.c, in three quarters of the time.
 *
 * The sums of all 16 lanes need 18 vector registers where AVX2 has 16, so eight lanes are added at a time. Squares are added
 * by fused operations, which change no bit: the square of an fp32 number fits into a double. The sketch reads the tensor
 * itself, and not a copy as doubles, which would fill the L1 cache.
 */

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

/* as in kernel.c */
enum { LANES = 16, FOLD = 1021, STRETCH = 64, STRETCHES = (FOLD + STRETCH - 1) / STRETCH };
typedef struct {
    float low[LANES], high[LANES];
    int32_t zeros[LANES];
    double sum[LANES], squares[LANES], magnitudes[LANES];
} Lanes;

enum { HALF = LANES / 2, BLOCK = 1024 }; /* a block stays in the L1 cache until its second half is added */
#define AVX2 __attribute__((target("avx2,fma")))
#define LOWER(floats) _mm256_cvtps_pd(_mm256_castps256_ps128(floats))
#define UPPER(floats) _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1))

/* Eight elements as floats. */
#define FROM_FLOAT32(source, index) _mm256_loadu_ps((const float *)(source) + (index))
#define FROM_BFLOAT16(source, index)                                                                                       \
    _mm256_castsi256_ps(_mm256_slli_epi32(                                                                                 \
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)(source) + (index)))), 16))

int avx2_is_usable(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* Defines NAME(source, count, lanes): add `count` elements, a multiple of LANES. Extremes ignore NaN. */
#define DEFINE_ADD(NAME, FROM)                                                                                             \
    AVX2 void NAME(const void *restrict source, int64_t count, Lanes *restrict lanes) {                                    \
        const __m256d sign = _mm256_set1_pd(-0.0);                                                                         \
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
                    __m256 numbers = FROM(source, index);                                                                  \
                    low = _mm256_min_ps(numbers, low); /* the second one if either is NaN */                               \
                    high = _mm256_max_ps(numbers, high);                                                                   \
                    __m256 is_zero = _mm256_cmp_ps(numbers, _mm256_setzero_ps(), _CMP_EQ_OQ);                              \
                    zeros = _mm256_sub_epi32(zeros, _mm256_castps_si256(is_zero));                                         \
                    __m256d wide[] = {LOWER(numbers), UPPER(numbers)};                                                     \
                    for (int part = 0; part < 2; part++) {                                                                 \
                        sum[part] = _mm256_add_pd(sum[part], wide[part]);                                                  \
                        squares[part] = _mm256_fmadd_pd(wide[part], wide[part], squares[part]);                            \
                        magnitudes[part] = _mm256_add_pd(magnitudes[part], _mm256_andnot_pd(sign, wide[part]));            \
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

DEFINE_ADD(avx2_add_float32, FROM_FLOAT32)
DEFINE_ADD(avx2_add_bfloat16, FROM_BFLOAT16)

/* Adds four doubles, one of each row, to a column each. */
#define ADD_TO_COLUMNS(columns, row)                                                                                       \
    _mm256_storeu_pd(columns, _mm256_add_pd(_mm256_loadu_pd(columns),                                                      \
                                            _mm256_add_pd(_mm256_add_pd(row[0], row[1]), _mm256_add_pd(row[2], row[3]))))

/* Defines NAME(source, sign, columns, next, size): like kernel.c's `fold` for a whole chunk, which is four rows of FOLD
 * elements. Eight columns are added at a time; returns how many, because some are left over. */
#define DEFINE_FOLD(NAME, FROM)                                                                                            \
    AVX2 int NAME(const void *restrict source, const uint8_t *restrict sign, double *restrict columns, const char *next,   \
                  int64_t size) {                                                                                          \
        int column = 0;                                                                                                    \
        for (; column + 8 <= FOLD; column += 8) {                                                                          \
            if (column % STRETCH == 0) {                                                                                   \
                const char *ahead = next + size / STRETCHES * (column / STRETCH);                                          \
                for (int64_t offset = 0; offset < size / STRETCHES; offset += 64)                                          \
                    __builtin_prefetch(ahead + offset, 0, 2);                                                              \
            }                                                                                                              \
            __m256d lower[4], upper[4];                                                                                    \
            for (int row = 0; row < 4; row++) {                                                                            \
                int index = column + row * FOLD;                                                                           \
                __m128i bytes = _mm_loadl_epi64((const __m128i *)(sign + index));                                          \
                __m256 bits = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 24));                     \
                __m256 numbers = _mm256_xor_ps(FROM(source, index), bits);                                                 \
                lower[row] = LOWER(numbers), upper[row] = UPPER(numbers);                                                  \
            }                                                                                                              \
            ADD_TO_COLUMNS(columns + column, lower);                                                                       \
            ADD_TO_COLUMNS(columns + column + 4, upper);                                                                   \
        }                                                                                                                  \
        return column;                                                                                                     \
    }

DEFINE_FOLD(avx2_fold_float32, FROM_FLOAT32)
DEFINE_FOLD(avx2_fold_bfloat16, FROM_BFLOAT16)
#endif
