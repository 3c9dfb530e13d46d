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

/* in the order of compact_rows.py's `STATISTICS` */
enum { ABS_MEAN, TOTAL, LOWEST, HIGHEST, MEAN, STD, RMS, L2, COUNT_NONFINITE, COUNT_ZEROS, NUMEL, SHAPE, DTYPE };

static const Header *header_of(Object row) { return (const Header *)python.bytes(python.in_tuple(row, ROW)); }

static const double *numbers_of(const Header *header) {
    return (const double *)((const int64_t *)(header + 1) + header->dimensions);
}

static int is_float(char statistic) { return statistic <= L2; }

static int is_defined(char statistic, const Header *header) { return statistic != STD || header->numel >= 2; }

/* as statistics/table.py defines them, operation by operation */
static double statistic_of(char statistic, const Header *header) {
    const double *row = numbers_of(header), numel = (double)header->numel;
    switch (statistic) {
    case ABS_MEAN:
        return row[MAGNITUDES] / numel;
    case TOTAL:
        return row[SUM];
    case LOWEST:
        return row[MIN];
    case HIGHEST:
        return row[MAX];
    case MEAN:
        return row[SUM] / numel;
    case RMS:
        return sqrt(row[SQUARES] / numel);
    case L2:
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
        const Header *header = header_of(python.in_list(rows, index));
        for (intptr_t place = 0; place < length; place++) {
            if (!is_float(plan[place]) || !is_defined(plan[place], header))
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

static int write_object(Text *text, Object bytes) {
    return write_bytes(text, python.bytes(bytes), (size_t)python.bytes_size(bytes));
}

static int write_whole(Text *text, int64_t number) {
    char digits[20], *first = digits + sizeof digits;
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do
        *--first = (char)('0' + rest % 10);
    while (rest /= 10);
    return (number >= 0 || write_bytes(text, "-", 1)) && write_bytes(text, first, (size_t)(digits + sizeof digits - first));
}

static int write_shape(Text *text, const Header *header) {
    const int64_t *shape = (const int64_t *)(header + 1);
    int written = write_bytes(text, "[", 1);
    for (int dimension = 0; written && dimension < header->dimensions; dimension++)
        written = (!dimension || write_bytes(text, ",", 1)) && write_whole(text, shape[dimension]);
    return written && write_bytes(text, "]", 1);
}

static int write_dtype(Text *text, Object names, const Header *header) {
    return write_object(text, python.in_list(names, header->code));
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

/* Returns the text before the step for a module and a label: `texts[label][name]`, or made by `make_text(name, label)`. */
static Borrowed text_of(Object texts, Object make_text, Object name, Object label) {
    Borrowed by_name = python.in_dict(texts, label);
    Borrowed text = by_name ? python.in_dict(by_name, name) : 0;
    if (text)
        return text;
    Object made = python.call(make_text, name, label, (Object)0); /* which puts it into `texts` */
    if (made)
        python.release(made);
    return made;
}

/* lines(rows, plan, keys, dtypes, numbers, texts, make_text, describe) -> bytes. `keys`: the text before each statistic;
 * `numbers`: those of `statistics` as a JSON list; `describe(row)`: the text of the row's context before the call's number, and
 * after it. */
static Object lines(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    if (count != 8)
        return 0;
    Object rows = arguments[0], keys = arguments[2], dtypes = arguments[3];
    const char *plan = python.bytes(arguments[1]), *numbers = python.bytes(arguments[4]);
    intptr_t length = python.bytes_size(arguments[1]), size = python.list_size(rows);
    Text text = {0, 0, 0};
    Object described = 0, context = 0, result = 0;
    int written = reserve(&text, 320 * (size_t)size + 1);
    for (intptr_t index = 0; written && index < size; index++) {
        Borrowed row = python.in_list(rows, index);
        const Header *header = header_of(row);
        Borrowed start = text_of(arguments[5], arguments[6], python.in_tuple(row, NAME), python.in_tuple(row, LABEL));
        if (python.in_tuple(row, CONTEXT) != context) {
            if (described)
                python.release(described);
            described = python.call(arguments[7], row, (Object)0);
            context = python.in_tuple(row, CONTEXT);
        }
        written = start && described && write_object(&text, start) && write_object(&text, python.in_tuple(described, 0)) &&
                  write_whole(&text, header->call) && write_object(&text, python.in_tuple(described, 1));
        for (intptr_t place = 0; written && place < length; place++) {
            char statistic = plan[place];
            if (!is_defined(statistic, header))
                continue;
            written = write_object(&text, python.in_tuple(keys, place)) &&
                      (is_float(statistic)                ? write_next(&text, &numbers)
                       : statistic == COUNT_NONFINITE     ? write_whole(&text, 0)
                       : statistic == COUNT_ZEROS         ? write_whole(&text, (int64_t)numbers_of(header)[ZEROS])
                       : statistic == NUMEL               ? write_whole(&text, header->numel)
                       : statistic == SHAPE               ? write_shape(&text, header)
                                                          : write_dtype(&text, dtypes, header));
        }
        written = written && write_bytes(&text, "}\n", 2);
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
