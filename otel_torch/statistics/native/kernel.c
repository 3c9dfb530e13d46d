/* Computes the row of a tensor in one read of its memory. Called with a pointer, without torch's dispatcher.
 *
 * Separate reductions read a tensor once per statistic, and dispatching each of them costs more than reducing a small
 * tensor does. The numbers are those of reduce.py, histogram.py and sketch.py. cpu_kernel.py calls this.
 *
 * Memory is read in chunks that fit into a core's cache. Chunks form pieces (those of the sketch), and pieces form
 * shares, each reduced by one thread. The shares are the same for any number of threads and are combined in order, so
 * that results are too, bit for bit. They do not depend on the processor either: the number of lanes is fixed, whatever
 * the width of its vectors, and no operations are contracted.
 */

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef WITHOUT_AVX512
#define WITHOUT_AVX512 0 /* 1 tests avx2.c on a processor that has both */
#endif
#ifndef SOURCE
#define SOURCE "unknown"
#endif

/* one copy of a function per processor generation, chosen when the library is loaded */
#if defined(__x86_64__) && !defined(ONE_TARGET)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define PUBLIC __attribute__((visibility("default")))

enum { BINS = 64, NUMBERS = 64, MOST_SHARES = 64, TABLES = 8, FOURS = (FOLD + 3) / 4 };
enum { WANT_SUMS = 1, WANT_HISTOGRAM = 2, WANT_SKETCH = 4 };

/* in the order of cpu_kernel.py's `CODES`; from BYTES on, dtypes of one byte, each with a table of its 256 values */
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT16, UINT16, INT32, UINT32, INT64, UINT64, BYTES };
enum { BYTE_TYPES = 16 };

static const uint8_t SIZES[] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8};
static float byte_values[BYTE_TYPES][256];
uint8_t signs[PIECE + STRIP];
uint16_t sign_bits[ROWS][STRIPS];
static uint8_t projection[FOURS][NUMBERS]; /* the signs of four columns: 1, 2, 4 and 8 where they are negative */

typedef struct {
    double low, high, sum, squares, magnitudes;
    int64_t nonfinite, nans, zeros;
} Sums;

typedef struct {
    Sums sums;
    int64_t counts[BINS];
    double folded[4 * FOURS]; /* the columns of the sketch, padded to a multiple of four */
} Partial;

typedef struct {
    const char *data;
    int64_t numel, start;
    int32_t code, wanted;
    const int32_t *shifts; /* for each piece of the whole tensor: twice its shift, plus 1 if its sign is positive */
    int64_t first_piece, pieces, shares;
    Partial *partials;
    atomic_int_fast64_t next;
} Task;

static const Vectors *vectors[BYTES + BYTE_TYPES]; /* by dtype, NULL where the code below is all there is */

INSIDE double as_double(uint64_t bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INSIDE uint64_t bits_of(double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INSIDE float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INSIDE float from_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

INSIDE float from_float16(uint16_t half) {
    uint32_t rest = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t normal = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    float subnormal = as_float(0x3f000000u | rest) - 0.5f; /* correct even if subnormals are flushed to zero */
    uint32_t bits;
    memcpy(&bits, &subnormal, sizeof bits);
    return as_float((rest < 0x400 ? bits : normal) | sign);
}

/* -- sums ------------------------------------------------------------------------------------------------------------ */

/* Adds one element to one lane. Extremes keep the type NUMBER and ignore NaN, which is counted afterwards. */
#define ADD(NUMBER, STORED, FROM, index, lane)                                                                             \
    do {                                                                                                                   \
        NUMBER number = FROM(((const STORED *)source)[index]);                                                             \
        double wide = number;                                                                                              \
        low[lane] = number < low[lane] ? number : low[lane];                                                               \
        high[lane] = number > high[lane] ? number : high[lane];                                                            \
        zeros[lane] += number == 0;                                                                                        \
        sum[lane] += wide;                                                                                                 \
        squares[lane] += wide * wide;                                                                                      \
        magnitudes[lane] += fabs(wide);                                                                                    \
        if (copy)                                                                                                          \
            copy[index] = wide;                                                                                            \
    } while (0)

/* Defines NAME(source, count, copy, begun, sums): add `count` elements to `sums`, and copy them to `copy` if it is not NULL.
 * `begun`: the lanes, if all groups of LANES elements have been added to them, else NULL. */
#define DEFINE_TAKE(NAME, NUMBER, COUNT, STORED, FROM)                                                                     \
    INSIDE void NAME(const void *restrict source, int64_t count, double *restrict copy, const Lanes *begun, Sums *sums) {  \
        NUMBER low[LANES], high[LANES];                                                                                    \
        COUNT zeros[LANES];                                                                                                \
        double sum[LANES], squares[LANES], magnitudes[LANES];                                                              \
        for (int lane = 0; lane < LANES; lane++) {                                                                         \
            low[lane] = begun ? begun->low[lane] : INFINITY, high[lane] = begun ? begun->high[lane] : -INFINITY;           \
            zeros[lane] = begun ? begun->zeros[lane] : 0, sum[lane] = begun ? begun->sum[lane] : 0;                        \
            squares[lane] = begun ? begun->squares[lane] : 0, magnitudes[lane] = begun ? begun->magnitudes[lane] : 0;      \
        }                                                                                                                  \
        int64_t index = begun ? count / LANES * LANES : 0;                                                                 \
        for (; index + LANES <= count; index += LANES)                                                                     \
            for (int lane = 0; lane < LANES; lane++)                                                                       \
                ADD(NUMBER, STORED, FROM, index + lane, lane);                                                             \
        for (int lane = 0; index < count; index++, lane++)                                                                 \
            ADD(NUMBER, STORED, FROM, index, lane);                                                                        \
        for (int half = LANES / 2; half; half /= 2)                                                                        \
            for (int lane = 0; lane < half; lane++) {                                                                      \
                low[lane] = low[lane + half] < low[lane] ? low[lane + half] : low[lane];                                   \
                high[lane] = high[lane + half] > high[lane] ? high[lane + half] : high[lane];                              \
                zeros[lane] += zeros[lane + half];                                                                         \
                sum[lane] += sum[lane + half];                                                                             \
                squares[lane] += squares[lane + half];                                                                     \
                magnitudes[lane] += magnitudes[lane + half];                                                               \
            }                                                                                                              \
        sums->low = low[0] < sums->low ? low[0] : sums->low;                                                               \
        sums->high = high[0] > sums->high ? high[0] : sums->high;                                                          \
        sums->zeros += zeros[0];                                                                                           \
        sums->sum += sum[0];                                                                                               \
        sums->squares += squares[0];                                                                                       \
        sums->magnitudes += magnitudes[0];                                                                                 \
        if (magnitudes[0] - magnitudes[0] != 0) /* NaN or Inf: only then count such elements   */                 \
            for (index = 0; index < count; index++) {                                                                      \
                NUMBER number = FROM(((const STORED *)source)[index]);                                                     \
                sums->nonfinite += number - number != 0;                                                                   \
                sums->nans += number != number;                                                                            \
            }                                                                                                              \
    }

#define AS_IT_IS(number) (number)

DEFINE_TAKE(take_float32, float, int32_t, float, AS_IT_IS)
DEFINE_TAKE(take_float64, double, int64_t, double, AS_IT_IS)
DEFINE_TAKE(take_float16, float, int32_t, uint16_t, from_float16)
DEFINE_TAKE(take_bfloat16, float, int32_t, uint16_t, from_bfloat16)

/* Integers and dtypes of one byte are converted to doubles first. */
#define WIDEN(STORED)                                                                                                      \
    for (int64_t index = 0; index < count; index++)                                                                        \
    wide[index] = (double)((const STORED *)source)[index]

INSIDE void widen(const void *restrict source, int32_t code, int64_t count, double *restrict wide) {
    switch (code) {
    case INT16: WIDEN(int16_t); break;
    case UINT16: WIDEN(uint16_t); break;
    case INT32: WIDEN(int32_t); break;
    case UINT32: WIDEN(uint32_t); break;
    case INT64: WIDEN(int64_t); break;
    case UINT64: WIDEN(uint64_t); break;
    default:
        for (int64_t index = 0; index < count; index++)
            wide[index] = byte_values[code - BYTES][((const uint8_t *)source)[index]];
    }
}

/* Adds a chunk to the sums. Returns its elements as doubles if `needed`, perhaps in `scratch`. */
INSIDE const double *take(const void *source, int32_t code, int64_t count, double *scratch, int needed, Sums *sums) {
#define TAKE(NAME) (needed ? NAME(source, count, scratch, NULL, sums) : NAME(source, count, NULL, NULL, sums))
    switch (code) {
    case FLOAT32: TAKE(take_float32); return scratch;
    case FLOAT16: TAKE(take_float16); return scratch;
    case BFLOAT16: TAKE(take_bfloat16); return scratch;
    case FLOAT64: take_float64(source, count, NULL, NULL, sums); return source;
    default:
        widen(source, code, count, scratch);
        take_float64(scratch, count, NULL, NULL, sums);
        return scratch;
    }
}

/* Adds a chunk to the sums by the processor's vectors. */
INSIDE void take_by_vectors(const void *source, int32_t code, int64_t count, Sums *sums) {
    Lanes lanes;
    vectors[code]->add(source, count / LANES * LANES, &lanes);
    switch (code) {
    case FLOAT32: take_float32(source, count, NULL, &lanes, sums); break;
    case FLOAT16: take_float16(source, count, NULL, &lanes, sums); break;
    case BFLOAT16: take_bfloat16(source, count, NULL, &lanes, sums); break;
    }
}

/* -- histogram ------------------------------------------------------------------------------------------------------- */

/* Counts elements by exponent. Zeros are counted in bin 1 and moved to bin 0 at the end. */
INSIDE void count_magnitudes(const double *numbers, int64_t count, int64_t *counts) {
    uint8_t bins[CHUNK];
    for (int64_t index = 0; index < count; index++) {
        int32_t exponent = (int32_t)(bits_of(numbers[index]) >> 52 & 2047);
        int32_t bin = exponent - (1023 - 42);
        bin = bin < 1 ? 1 : bin;
        bin = bin > 62 ? 62 : bin;
        bins[index] = (uint8_t)(exponent == 2047 ? 63 : bin);
    }
    /* several tables, because neighbors are often in the same bin, and each increment would wait for the last */
    uint32_t tables[TABLES][BINS] = {0};
    int64_t index = 0;
    for (; index + TABLES <= count; index += TABLES)
        for (int table = 0; table < TABLES; table++)
            tables[table][bins[index + table]]++;
    for (; index < count; index++)
        tables[0][bins[index]]++;
    for (int table = 0; table < TABLES; table++)
        for (int bin = 0; bin < BINS; bin++)
            counts[bin] += tables[table][bin];
}

/* -- sketch ---------------------------------------------------------------------------------------------------------- */

INSIDE double signed_element(const double *numbers, const uint8_t *sign, int64_t index) {
    return as_double(bits_of(numbers[index]) ^ (uint64_t)sign[index] << 56);
}

/* Adds a chunk to the columns of its piece, which are not shifted yet. `offset`: of the first element in the piece.
 * Prefetches `size` bytes at `next` a little at a time. */
INSIDE void fold(const double *restrict numbers, int64_t offset, int64_t count, double *restrict columns, const char *next,
                 int64_t size) {
    const uint8_t *restrict sign = signs + offset;
    if (count == CHUNK) { /* which starts in column 0 */
        for (int stretch = 0; stretch < STRETCHES; stretch++) {
            fetch_share(next, size, stretch);
            int first = STRETCH * stretch, end = first + STRETCH < FOLD ? first + STRETCH : FOLD;
            for (int column = first; column < end; column++)
                columns[column] +=
                    (signed_element(numbers, sign, column) + signed_element(numbers, sign, column + FOLD)) +
                    (signed_element(numbers, sign, column + 2 * FOLD) + signed_element(numbers, sign, column + 3 * FOLD));
        }
        return;
    }
    while (count) {
        int64_t column = offset % FOLD, length = FOLD - column < count ? FOLD - column : count;
        for (int64_t index = 0; index < length; index++)
            columns[column + index] += signed_element(numbers, sign, index);
        numbers += length, sign += length, offset += length, count -= length;
    }
}

/* Adds the columns of a piece, rotated by its shift and with its sign. */
INSIDE void rotate(const double *restrict columns, int32_t shift, double *restrict folded) {
    double sign = shift & 1 ? 1.0 : -1.0;
    int32_t first = shift >> 1;
    for (int column = 0; column < FOLD - first; column++)
        folded[column + first] += sign * columns[column];
    for (int column = FOLD - first; column < FOLD; column++)
        folded[column + first - FOLD] += sign * columns[column];
}

/* The 64 signed sums of the columns, by one lookup per four columns. Zero columns, the most in a small tensor, are skipped. */
static void project_anywhere(const double *folded, double *sums) {
    for (int four = 0; four < FOURS; four++) {
        const double *column = folded + 4 * four;
        if (column[0] == 0 && column[1] == 0 && column[2] == 0 && column[3] == 0)
            continue;
        double signed_sums[16]; /* by the signs of the four columns */
        for (int signs_of_four = 0; signs_of_four < 16; signs_of_four++)
            signed_sums[signs_of_four] =
                ((signs_of_four & 1 ? -column[0] : column[0]) + (signs_of_four & 2 ? -column[1] : column[1])) +
                ((signs_of_four & 4 ? -column[2] : column[2]) + (signs_of_four & 8 ? -column[3] : column[3]));
        for (int row = 0; row < NUMBERS; row++)
            sums[row] += signed_sums[projection[four][row]];
    }
}

#if defined(__x86_64__)
/* The same additions in the same order, with tables and sums in registers: no compiler vectorizes the lookup. */
__attribute__((target("avx512f"))) static void project_avx512(const double *folded, double *sums) {
    enum { VECTORS = NUMBERS / 8 };
    const __m512d sign_0 = _mm512_setr_pd(1, -1, 1, -1, 1, -1, 1, -1), sign_1 = _mm512_setr_pd(1, 1, -1, -1, 1, 1, -1, -1);
    const __m512d sign_2 = _mm512_setr_pd(1, 1, 1, 1, -1, -1, -1, -1);
    __m512d sum[VECTORS];
    for (int vector = 0; vector < VECTORS; vector++)
        sum[vector] = _mm512_setzero_pd();
    for (int four = 0; four < FOURS; four++) {
        const double *column = folded + 4 * four;
        if (column[0] == 0 && column[1] == 0 && column[2] == 0 && column[3] == 0)
            continue;
        __m512d signed_0 = _mm512_mul_pd(_mm512_set1_pd(column[0]), sign_0);
        __m512d signed_1 = _mm512_mul_pd(_mm512_set1_pd(column[1]), sign_1);
        __m512d first = _mm512_add_pd(signed_0, signed_1);
        __m512d third = _mm512_mul_pd(_mm512_set1_pd(column[2]), sign_2), fourth = _mm512_set1_pd(column[3]);
        __m512d lower = _mm512_add_pd(first, _mm512_add_pd(third, fourth));
        __m512d upper = _mm512_add_pd(first, _mm512_sub_pd(third, fourth));
        for (int vector = 0; vector < VECTORS; vector++) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(projection[four] + 8 * vector));
            __m512d signed_sums = _mm512_permutex2var_pd(lower, _mm512_cvtepu8_epi64(bytes), upper);
            sum[vector] = _mm512_add_pd(sum[vector], signed_sums);
        }
    }
    for (int vector = 0; vector < VECTORS; vector++)
        _mm512_storeu_pd(sums + 8 * vector, sum[vector]);
}
#endif

static void project(const double *folded, double *numbers) {
    double sums[NUMBERS] = {0};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        project_avx512(folded, sums);
    else
#endif
        project_anywhere(folded, sums);
    for (int row = 0; row < NUMBERS; row++)
        numbers[row] = sums[row] / 8; /* sqrt(64): a sketch has the length of its tensor */
}

/* -- shares ---------------------------------------------------------------------------------------------------------- */

static void clear(Partial *partial, int32_t wanted) {
    partial->sums = (Sums){.low = INFINITY, .high = -INFINITY};
    if (wanted & WANT_HISTOGRAM)
        memset(partial->counts, 0, sizeof partial->counts);
    if (wanted & WANT_SKETCH)
        memset(partial->folded, 0, sizeof partial->folded);
}

static void add(Partial *total, const Partial *partial, int32_t wanted) {
    Sums *sums = &total->sums;
    const Sums *added = &partial->sums;
    sums->low = added->low < sums->low ? added->low : sums->low;
    sums->high = added->high > sums->high ? added->high : sums->high;
    sums->sum += added->sum, sums->squares += added->squares, sums->magnitudes += added->magnitudes;
    sums->nonfinite += added->nonfinite, sums->nans += added->nans, sums->zeros += added->zeros;
    if (wanted & WANT_HISTOGRAM)
        for (int bin = 0; bin < BINS; bin++)
            total->counts[bin] += partial->counts[bin];
    if (wanted & WANT_SKETCH)
        for (int column = 0; column < FOLD; column++)
            total->folded[column] += partial->folded[column];
}

/* Measures the elements at flat positions `position` to `end`, all in one piece. */
FOR_EACH_PROCESSOR
static void measure_piece(const Task *task, int64_t position, int64_t end, Partial *partial) {
    double scratch[CHUNK], columns[COLUMNS];
    const int32_t wanted = task->wanted, code = task->code;
    const int64_t piece = position / PIECE, size = code < BYTES ? SIZES[code] : 1;
    const int by_vectors = !(wanted & WANT_HISTOGRAM) && vectors[code]; /* which return no doubles to count */
    if (wanted & WANT_SKETCH)
        memset(columns, 0, sizeof columns);
    while (position < end) {
        int64_t offset = position - piece * PIECE, length = CHUNK - offset % CHUNK;
        length = length < end - position ? length : end - position;
        const void *source = task->data + (position - task->start) * size;
        const char *next = (const char *)source + length * size;
        int64_t ahead = position + length < end ? CHUNK * size : 0;
        position += length;
        if (by_vectors && (length == CHUNK || !(wanted & WANT_SKETCH))) {
            take_by_vectors(source, code, length, &partial->sums);
            if (wanted & WANT_SKETCH)
                vectors[code]->fold(source, (int)(offset / FOLD), columns, next, ahead);
            continue;
        }
        const double *numbers = take(source, code, length, scratch, wanted & (WANT_HISTOGRAM | WANT_SKETCH), &partial->sums);
        if (wanted & WANT_HISTOGRAM) {
            if (!(wanted & WANT_SKETCH))
                fetch(next, ahead);
            count_magnitudes(numbers, length, partial->counts);
        }
        if (wanted & WANT_SKETCH)
            fold(numbers, offset, length, columns, next, ahead);
    }
    if (wanted & WANT_SKETCH)
        rotate(columns, task->shifts[piece], partial->folded);
}

static void measure_share(const Task *task, int64_t share, Partial *partial) {
    clear(partial, task->wanted);
    int64_t piece = task->first_piece + task->pieces * share / task->shares;
    int64_t last = task->first_piece + task->pieces * (share + 1) / task->shares;
    for (; piece < last; piece++) {
        int64_t first = piece * PIECE, end = first + PIECE;
        first = first > task->start ? first : task->start;
        end = end < task->start + task->numel ? end : task->start + task->numel;
        measure_piece(task, first, end, partial);
    }
}

static void work(void *data) {
    Task *task = data;
    int64_t share;
    while ((share = atomic_fetch_add(&task->next, 1)) < task->shares)
        measure_share(task, share, task->partials + share);
}

/* -- called by cpu_kernel.py -------------------------------------------------------------------------------------------- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel; /* GOMP_parallel of torch's OpenMP, whose threads exist already */

PUBLIC const char *kernel_source(void) { return SOURCE; }

__attribute__((constructor)) static void choose_vectors(void) {
#if defined(HAS_X86_VECTORS)
    __builtin_cpu_init();
    const Vectors *usable = WITHOUT_AVX512 ? NULL : avx512_vectors();
    usable = usable ? usable : avx2_vectors();
    if (usable) {
        vectors[FLOAT32] = usable + VECTOR_FLOAT32;
        vectors[FLOAT16] = usable + VECTOR_FLOAT16;
        vectors[BFLOAT16] = usable + VECTOR_BFLOAT16;
    }
#endif
}

PUBLIC const char *kernel_processor(void) {
#if defined(__x86_64__) && !defined(ONE_TARGET)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4"))
        return "avx512";
    if (__builtin_cpu_supports("x86-64-v3"))
        return "avx2";
    return "sse2";
#elif defined(__x86_64__)
    return "sse2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "generic";
#endif
}

PUBLIC void kernel_set_parallel(void *function) { *(void **)&parallel = function; }

/* Sets the 256 values of a dtype of one byte. */
PUBLIC void kernel_set_bytes(int32_t code, const float *values) { memcpy(byte_values[code - BYTES], values, 256 * sizeof(float)); }

/* Sets the signs, 1 where negative: of the PIECE elements of a piece, and of the 64 x FOLD projection, row by row. */
PUBLIC void kernel_set_signs(const uint8_t *of_elements, const uint8_t *of_projection) {
    for (int index = 0; index < PIECE; index++)
        signs[index] = of_elements[index] ? 128 : 0;
    memset(sign_bits, 0, sizeof sign_bits);
    for (int index = 0; index < PIECE; index++)
        if (of_elements[index])
            sign_bits[index / FOLD][index % FOLD / STRIP] |= 1 << index % FOLD % STRIP;
    memset(projection, 0, sizeof projection);
    for (int row = 0; row < NUMBERS; row++)
        for (int column = 0; column < FOLD; column++)
            if (of_projection[row * FOLD + column])
                projection[column / 4][row] |= 1 << column % 4;
}

/* What a Python thread passes to `kernel_measure`, and its results: the wanted ones of sums, histogram and sketch. */
typedef struct {
    int64_t start; /* flat position of the first element; this and the next for a sketch only */
    uint64_t shifts;
    double numbers[7 + BINS + NUMBERS];
} Request;

/* how: code + 256 * wanted + 65536 * threads. In one argument, because each costs a call from Python 0.1 µs. */
PUBLIC void kernel_measure(const void *data, int64_t numel, int64_t how, Request *request) {
    int32_t code = how & 255, wanted = how >> 8 & 255, threads = how >> 16;
    int64_t start = wanted & WANT_SKETCH ? request->start : 0;
    const int32_t *shifts = (const int32_t *)(uintptr_t)request->shifts;
    double *out = request->numbers;
    Task task = {.data = data, .numel = numel, .start = start, .code = code, .wanted = wanted, .shifts = shifts};
    task.first_piece = start / PIECE;
    task.pieces = (start + numel - 1) / PIECE - task.first_piece + 1;
    task.shares = task.pieces < MOST_SHARES ? task.pieces : MOST_SHARES;
    Partial total;
    if (task.shares == 1)
        measure_share(&task, 0, &total);
    else {
        clear(&total, wanted);
        if (threads > 1 && parallel && (task.partials = malloc(task.shares * sizeof(Partial)))) {
            parallel(work, &task, threads < task.shares ? threads : task.shares, 0);
            for (int64_t share = 0; share < task.shares; share++)
                add(&total, task.partials + share, wanted);
            free(task.partials);
        } else
            for (int64_t share = 0; share < task.shares; share++) {
                Partial partial;
                measure_share(&task, share, &partial);
                add(&total, &partial, wanted);
            }
    }
    const Sums *sums = &total.sums;
    if (wanted & WANT_SUMS) {
        *out++ = sums->nans ? NAN : sums->low;
        *out++ = sums->nans ? NAN : sums->high;
        *out++ = sums->sum;
        *out++ = sums->squares;
        *out++ = sums->magnitudes;
        *out++ = (double)sums->nonfinite;
        *out++ = (double)sums->zeros;
    }
    if (wanted & WANT_HISTOGRAM) {
        *out++ = (double)sums->zeros;
        *out++ = (double)(total.counts[1] - sums->zeros);
        for (int bin = 2; bin < BINS; bin++)
            *out++ = (double)total.counts[bin];
    }
    if (wanted & WANT_SKETCH)
        project(total.folded, out);
}
