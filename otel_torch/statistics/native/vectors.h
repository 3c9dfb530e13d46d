/* What kernel.c shares with avx2.c and avx512.c, which compute the same bits with the vectors of a processor.
 *
 * kernel.c defines lanes, chunks and pieces. The vector code adds squares by fused operations, which changes no bit, because the
 * square of an fp32 number fits into a double. It adds sums by fused operations that multiply by 1, because the units that only add
 * are busy converting.
 */

#include <stdint.h>

enum { LANES = 16, FOLD = 1021, ROWS = 128, CHUNK_ROWS = 4, CHUNK = FOLD * CHUNK_ROWS, PIECE = FOLD * ROWS };
enum { STRIP = 16, STRIPS = (FOLD + STRIP - 1) / STRIP, COLUMNS = STRIP * STRIPS }; /* columns, padded to whole strips */
enum { STRETCH = 64, STRETCHES = (FOLD + STRETCH - 1) / STRETCH };

/* The sums of every sixteenth element. */
typedef struct {
    float low[LANES], high[LANES];
    int32_t zeros[LANES];
    double sum[LANES], squares[LANES], magnitudes[LANES];
} Lanes;

/* The functions for one dtype. */
typedef struct {
    /* Sets `lanes` to the sums of `count` elements, a multiple of LANES. Extremes ignore NaN. */
    void (*add)(const void *source, int64_t count, Lanes *lanes);
    /* Adds a whole chunk to the columns of its piece, in which it starts at `row`. Prefetches `size` bytes at `next`. */
    void (*fold)(const void *source, int row, double *columns, const char *next, int64_t size);
} Vectors;

/* The signs of a piece's elements: 0 or 128, padded for whole reads of the last strip, and as bits of a strip. */
extern uint8_t signs[PIECE + STRIP];
extern uint16_t sign_bits[ROWS][STRIPS];

#if defined(__x86_64__) && !defined(ONE_TARGET)
#define HAS_X86_VECTORS
/* fp32, fp16 and bf16; NULL if the processor cannot run them */
enum { VECTOR_FLOAT32, VECTOR_FLOAT16, VECTOR_BFLOAT16, VECTOR_TYPES };
const Vectors *avx2_vectors(void);
const Vectors *avx512_vectors(void);
#endif

#define INSIDE static inline __attribute__((always_inline))

/* Prefetches memory, so that it arrives while the current chunk is processed. */
INSIDE void fetch(const char *memory, int64_t size) {
    for (int64_t offset = 0; offset < size; offset += 64)
        __builtin_prefetch(memory + offset, 0, 2);
}

/* Prefetches a stretch's share of `size` bytes at `next`: more at a time than a core can have in flight would stall it. */
INSIDE void fetch_share(const char *next, int64_t size, int stretch) {
    fetch(next + size / STRETCHES * stretch, size / STRETCHES);
}
