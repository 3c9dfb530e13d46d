/* Encodes compact rows as lines of a recording, the same bytes as `encode_rows` makes of their records.
 *
 * A record, its dict and its statistics are some thirty Python objects; here a row is text between numbers. The shortest decimal
 * form of a double is left to the JSON encoder that writes all other lines: `statistics` returns the numbers of all rows as one
 * list, that is encoded once, and `lines` puts the digits in their places.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

static const Header *header_of(Object row) { return (const Header *)python.bytes(python.in_tuple(row, ROW_DATA)); }

static const double *numbers_of(const Header *header) {
    return (const double *)((const int64_t *)(header + 1) + header->dimensions);
}

static int is_float(char statistic) { return statistic <= STATISTIC_L2; }

static int is_of_parity(Object row) { return python.tuple_size(row) > PLAIN_FIELDS; }

/* Returns whether a line has a statistic. In a parity recording only the first line of a tensor has its sketch. */
static int is_defined(char statistic, Object row) {
    if (statistic == STATISTIC_SKETCH && is_of_parity(row))
        return python.is_true(python.in_tuple(row, ROW_IS_NEW));
    return statistic != STATISTIC_STD || header_of(row)->numel >= 2;
}

/* as statistics/table.py defines them, operation by operation */
static double statistic_of(char statistic, const Header *header) {
    const double *row = numbers_of(header), numel = (double)header->numel;
    switch (statistic) {
    case STATISTIC_ABS_MEAN:
        return row[MAGNITUDES] / numel;
    case STATISTIC_SUM:
        return row[SUM];
    case STATISTIC_MIN:
        return row[MIN];
    case STATISTIC_MAX:
        return row[MAX];
    case STATISTIC_MEAN:
        return row[SUM] / numel;
    case STATISTIC_RMS:
        return sqrt(row[SQUARES] / numel);
    case STATISTIC_L2:
        return sqrt(row[SQUARES]);
    }
    if (row[MIN] == row[MAX] && isfinite(row[MIN]))
        return 0.0;
    double deviations = row[SQUARES] - row[SUM] * row[SUM] / numel;
    return deviations < 0 ? 0.0 : sqrt(deviations / (numel - 1));
}

/* statistics(rows, plan) -> the floats of the rows, in order. `plan`: one byte for each statistic of a line. */
static Object statistics(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    if (count != 2)
        return 0;
    Object rows = arguments[0];
    const char *plan = python.bytes(arguments[1]);
    intptr_t length = python.bytes_size(arguments[1]);
    Object result = python.new_list(0);
    for (intptr_t index = 0; result && index < python.list_size(rows); index++) {
        Borrowed row = python.in_list(rows, index);
        const Header *header = header_of(row);
        for (intptr_t place = 0; place < length; place++) {
            if (!is_float(plan[place]) || !is_defined(plan[place], row))
                continue;
            Object number = python.new_float(statistic_of(plan[place], header));
            if (!number || python.append(result, number)) {
                if (number)
                    python.release(number);
                python.release(result);
                return 0;
            }
            python.release(number);
        }
    }
    return result;
}

/* -- text ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *start, *next, *end;
} Text;

/* Makes room for a number of bytes; returns whether there is. */
static int reserve(Text *text, size_t bytes) {
    if ((size_t)(text->end - text->next) >= bytes)
        return 1;
    size_t used = (size_t)(text->next - text->start), size = 2 * (size_t)(text->end - text->start) + bytes;
    char *start = realloc(text->start, size);
    if (!start)
        return 0;
    *text = (Text){start, start + used, start + size};
    return 1;
}

static int write_bytes(Text *text, const char *bytes, size_t length) {
    if (!reserve(text, length))
        return 0;
    memcpy(text->next, bytes, length);
    text->next += length;
    return 1;
}

#define WRITE(text, literal) write_bytes(text, literal, sizeof literal - 1)

static int write_object(Text *text, Object bytes) {
    return write_bytes(text, python.bytes(bytes), (size_t)python.bytes_size(bytes));
}

static int write_whole(Text *text, int64_t number) {
    char digits[20], *first = digits + sizeof digits;
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do
        *--first = (char)('0' + rest % 10);
    while (rest /= 10);
    return (number >= 0 || WRITE(text, "-")) && write_bytes(text, first, (size_t)(digits + sizeof digits - first));
}

static int write_shape(Text *text, const Header *header) {
    const int64_t *shape = (const int64_t *)(header + 1);
    int written = WRITE(text, "[");
    for (int dimension = 0; written && dimension < header->dimensions; dimension++)
        written = (!dimension || WRITE(text, ",")) && write_whole(text, shape[dimension]);
    return written && WRITE(text, "]");
}

static int write_dtype(Text *text, Object names, const Header *header) {
    return write_object(text, python.in_list(names, header->code));
}

/* Writes a sketch as sketch_format.py encodes it: base64 of little-endian float32. */
static int write_sketch(Text *text, const Header *header) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const double *sketch = numbers_of(header) + (header->wanted & WANT_SUMS ? SUMS : 0) + (header->wanted & WANT_HISTOGRAM ? BINS : 0);
    enum { BYTES = 4 * NUMBERS, DIGITS = 4 * ((BYTES + 2) / 3) };
    unsigned char bytes[BYTES + 2] = {0};
    for (int index = 0; index < NUMBERS; index++) {
        float number = (float)sketch[index];
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        for (int byte = 0; byte < 4; byte++)
            bytes[4 * index + byte] = (unsigned char)(bits >> 8 * byte);
    }
    char encoded[DIGITS];
    for (int first = 0, digit = 0; first < BYTES; first += 3) {
        uint32_t group = (uint32_t)bytes[first] << 16 | (uint32_t)bytes[first + 1] << 8 | bytes[first + 2];
        for (int shift = 18; shift >= 0; shift -= 6)
            encoded[digit++] = digits[group >> shift & 63];
    }
    for (int missing = (3 - BYTES % 3) % 3; missing; missing--)
        encoded[DIGITS - missing] = '=';
    return WRITE(text, "\"") && write_bytes(text, encoded, DIGITS) && WRITE(text, "\"");
}

/* Copies a number from a JSON list of numbers, and moves on to the next. */
static int write_next(Text *text, const char **numbers) {
    const char *start = *numbers + 1, *end = start;
    while (*end != ',' && *end != ']')
        end++;
    *numbers = end;
    return write_bytes(text, start, (size_t)(end - start));
}

/* -- lines ------------------------------------------------------------------------------------------------------------ */

/* Returns the text for a key and a label: `texts[label][key]`, or made by `make_text(key, label)`. */
static Borrowed text_of(Object texts, Object make_text, Object key, Object label) {
    Borrowed by_key = python.in_dict(texts, label);
    Borrowed text = by_key ? python.in_dict(by_key, key) : 0;
    if (text)
        return text;
    Object made = python.call(make_text, key, label, (Object)0); /* which puts it into `texts` */
    if (made)
        python.release(made);
    return made;
}

static int write_optional(Text *text, Object number) {
    return number == none ? WRITE(text, "null") : write_whole(text, python.as_number(number));
}

/* Writes the position of a tensor in the run, after `start`, which has the module's class and the argument. */
static int write_position(Text *text, Object start, Object row) {
    Borrowed times = python.in_tuple(row, ROW_TIMES);
    return start && write_object(text, start) && WRITE(text, ",\"value\":") &&
           write_optional(text, python.in_tuple(row, ROW_VALUE)) && WRITE(text, ",\"storage\":") &&
           write_optional(text, python.in_tuple(row, ROW_STORAGE)) && WRITE(text, ",\"order\":[") &&
           write_optional(text, python.in_list(times, TIMES_ENTRY)) && WRITE(text, ",") &&
           write_optional(text, python.in_list(times, TIMES_EXIT)) && WRITE(text, "],\"parent\":") &&
           write_optional(text, python.in_list(times, TIMES_PARENT));
}

/* lines(rows, plan, keys, dtypes, numbers, texts, make_text, describe, signature_texts, make_signature_text) -> bytes. `keys`: the
 * text before each statistic; `numbers`: those of `statistics` as a JSON list; `texts`: the beginnings of lines, by label and
 * module; `describe(row)`: the text of the row's context before the call's number, and after it; `signature_texts`: of positions,
 * by label and signature. */
static Object lines(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    if (count != 10)
        return 0;
    Object rows = arguments[0], keys = arguments[2], dtypes = arguments[3];
    const char *plan = python.bytes(arguments[1]), *numbers = python.bytes(arguments[4]);
    intptr_t length = python.bytes_size(arguments[1]), size = python.list_size(rows);
    Text text = {0, 0, 0};
    Object described = 0, context = 0, result = 0;
    int written = reserve(&text, 400 * (size_t)size + 1);
    for (intptr_t index = 0; written && index < size; index++) {
        Borrowed row = python.in_list(rows, index);
        const Header *header = header_of(row);
        Borrowed start = text_of(arguments[5], arguments[6], python.in_tuple(row, ROW_NAME), python.in_tuple(row, ROW_LABEL));
        if (python.in_tuple(row, ROW_CONTEXT) != context) {
            if (described)
                python.release(described);
            described = python.call(arguments[7], row, (Object)0);
            context = python.in_tuple(row, ROW_CONTEXT);
        }
        written = start && described && write_object(&text, start) && write_object(&text, python.in_tuple(described, 0)) &&
                  write_whole(&text, header->call) && write_object(&text, python.in_tuple(described, 1));
        if (written && is_of_parity(row)) {
            Borrowed position = text_of(arguments[8], arguments[9], python.in_tuple(row, ROW_SIGNATURE), python.in_tuple(row, ROW_LABEL));
            written = write_position(&text, position, row);
        }
        for (intptr_t place = 0; written && place < length; place++) {
            char statistic = plan[place];
            if (!is_defined(statistic, row))
                continue;
            written = write_object(&text, python.in_tuple(keys, place)) &&
                      (is_float(statistic)                ? write_next(&text, &numbers)
                       : statistic == STATISTIC_NONFINITE     ? write_whole(&text, 0)
                       : statistic == STATISTIC_ZEROS         ? write_whole(&text, (int64_t)numbers_of(header)[ZEROS])
                       : statistic == STATISTIC_NUMEL               ? write_whole(&text, header->numel)
                       : statistic == STATISTIC_SHAPE               ? write_shape(&text, header)
                       : statistic == STATISTIC_SKETCH              ? write_sketch(&text, header)
                                                          : write_dtype(&text, dtypes, header));
        }
        written = written && WRITE(&text, "}\n");
    }
    if (described)
        python.release(described);
    if (written)
        result = python.new_bytes(text.start, text.next - text.start);
    free(text.start);
    return result;
}

/* Return `statistics` and `lines` as Python functions. */
PUBLIC Object lines_statistics(void) {
    static const Definition definition = {"statistics", statistics, FASTCALL, 0};
    return python.new_function(&definition, 0, 0);
}

PUBLIC Object lines_lines(void) {
    static const Definition definition = {"lines", lines, FASTCALL, 0};
    return python.new_function(&definition, 0, 0);
}
