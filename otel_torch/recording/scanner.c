/* Reads lines of a recording into arrays.

   Accepts the plain form that recordings have: one object per line, ASCII without escapes, fields of
   the expected types. `scanner_read` refuses text that has any other line, whether that is a record
   or not: the reader in Python decides what it is. It must never accept what Python would refuse,
   nor read another number. */

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *scanner_source(void) { return SOURCE; }

/* The fields of a row. The first ones make its kind, in the order of `RowKind`. */
enum {
  MODULE, TENSOR, MODEL, PHASE, CLASS, ARGUMENT, DTYPE, KIND_FIELDS,
  VALUE = KIND_FIELDS, PARENT, NONFINITE, NUMEL, L2,
  ABS_MEAN, MEAN, STD, RMS, SUM, MIN, MAX,
  LOOP, STEP, CALL,
  ORDER, SKETCH, BRANCH, STORAGE, ZEROS, HISTOGRAM, SHAPE,
  ROW_SKETCH, ROWS, PART_SKETCHES, HASHES, IDS, POSITIONS, REQUESTS, UPDATES, SHARD, UNKNOWN
};
#define FIELDS UNKNOWN

static const char *const NAMES[FIELDS] = {
  "module", "tensor", "model", "phase", "class", "argument", "dtype",
  "value", "parent", "nonfinite", "numel", "l2",
  "abs_mean", "mean", "std", "rms", "sum", "min", "max",
  "loop", "step", "call", "order", "sketch", "branch", "storage", "zeros", "histogram", "shape",
  "row_sketch", "rows", "part_sketches", "hashes", "ids", "positions", "requests", "updates", "shard",
};

/* The type that a field must have, if it is checked at all (see `is_checked`). */
typedef enum { TEXT, TEXT_OR_NULL, INTEGER, INDEX, COUNT, NUMBER, BASE64, INTEGERS, SIZES, REFUSED } Type;

static const Type TYPES[FIELDS] = {
  [MODULE] = TEXT, [TENSOR] = TEXT, [MODEL] = TEXT, [PHASE] = TEXT, [CLASS] = TEXT,
  [ARGUMENT] = TEXT_OR_NULL, [DTYPE] = TEXT,
  [VALUE] = INDEX, [PARENT] = INDEX, [NONFINITE] = COUNT, [NUMEL] = COUNT, [L2] = NUMBER,
  [ABS_MEAN] = NUMBER, [MEAN] = NUMBER, [STD] = NUMBER, [RMS] = NUMBER, [SUM] = NUMBER,
  [MIN] = NUMBER, [MAX] = NUMBER,
  [LOOP] = INTEGER, [STEP] = INTEGER, [CALL] = INTEGER, [BRANCH] = TEXT_OR_NULL, [STORAGE] = INDEX,
  [ZEROS] = COUNT, [HISTOGRAM] = INTEGERS, [SHAPE] = INTEGERS, [ROW_SKETCH] = BASE64,
  [ROWS] = BASE64, [PART_SKETCHES] = BASE64, [HASHES] = BASE64, [IDS] = INTEGERS,
  [POSITIONS] = INTEGERS, [REQUESTS] = INTEGERS, [UPDATES] = COUNT, [SHARD] = REFUSED,
};

/* the order of a column of `numbers` and of `statistics`; see `RowBatch` */
static const int8_t NUMBER_ROWS[] = {VALUE, PARENT, NONFINITE, NUMEL, L2};
static const int8_t STATISTIC_ROWS[] = {ABS_MEAN, MEAN, STD, RMS, SUM, L2, MIN, MAX};

#define LARGEST_INDEX (1LL << 53)
#define NOWHERE INT64_MIN
#define DEEPEST 32
#define MOST_KEY_BYTES 4096

typedef struct {
  const char *start;
  int64_t length; /* -1: null, or absent */
} Span;

typedef struct {
  uint64_t hash;
  char *key;
  int64_t length, number;
} Kind;

typedef struct {
  Kind *kinds; /* open addressing; key NULL: free */
  int64_t room, count;
} Scanner;

typedef struct {
  int64_t capacity, sketch_room;   /* the rows and bytes that the arrays have room for */
  int64_t is_full;                 /* read `statistics`, and check the fields beyond the header */
  int64_t size, is_last, sketch_count; /* set by `scanner_read` */
  int64_t *kinds;                  /* (capacity) */
  double *numbers;                 /* (5, capacity) */
  int64_t *order;                  /* (capacity, 2) */
  int64_t *places;                 /* (capacity, 3) */
  double *statistics;              /* (8, capacity) */
  int64_t *starts;                 /* (capacity + 1): where each line begins, and the last one ends */
  int64_t *sketched, *sketch_ends; /* (capacity) */
  uint8_t *sketches;
} Arrays;

EXPORT Scanner *scanner_new(void) {
  Scanner *scanner = calloc(1, sizeof(Scanner));
  if (scanner && !(scanner->kinds = calloc(scanner->room = 256, sizeof(Kind)))) {
    free(scanner);
    return NULL;
  }
  return scanner;
}

EXPORT void scanner_free(Scanner *scanner) {
  if (!scanner) return;
  for (int64_t i = 0; i < scanner->room; i++) free(scanner->kinds[i].key);
  free(scanner->kinds);
  free(scanner);
}

/* -- kinds */

static uint64_t hash_of(const char *key, int64_t length) {
  uint64_t hash = 0x9E3779B97F4A7C15u ^ (uint64_t)length, word;
  for (; length >= 8; key += 8, length -= 8) {
    memcpy(&word, key, 8);
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  word = 0;
  memcpy(&word, key, length);
  hash = (hash ^ word) * 0xC4CEB9FE1A85EC53u;
  return hash ^ hash >> 29;
}

static int grow(Scanner *scanner) {
  int64_t room = 2 * scanner->room;
  Kind *kinds = calloc(room, sizeof(Kind));
  if (!kinds) return 0;
  for (int64_t i = 0; i < scanner->room; i++) {
    Kind kind = scanner->kinds[i];
    if (!kind.key) continue;
    uint64_t place = kind.hash & (room - 1);
    while (kinds[place].key) place = (place + 1) & (room - 1);
    kinds[place] = kind;
  }
  free(scanner->kinds);
  scanner->kinds = kinds, scanner->room = room;
  return 1;
}

/* Return the number of a row's kind, in the order in which they first occurred; -1 without memory. */
static int64_t kind_of(Scanner *scanner, const Span *texts) {
  char key[MOST_KEY_BYTES];
  int64_t length = 0;
  for (int field = 0; field < KIND_FIELDS; field++) {
    int64_t size = texts[field].length;
    if (size < 0) {
      key[length++] = 1; /* no byte of a text */
      continue;
    }
    if (length + size + KIND_FIELDS + 1 > MOST_KEY_BYTES) return -1;
    memcpy(key + length, texts[field].start, size);
    length += size;
    key[length++] = 0;
  }
  uint64_t hash = hash_of(key, length), place = hash & (scanner->room - 1);
  for (Kind *kind; (kind = &scanner->kinds[place])->key; place = (place + 1) & (scanner->room - 1))
    if (kind->hash == hash && kind->length == length && !memcmp(kind->key, key, length))
      return kind->number;
  if (2 * scanner->count >= scanner->room) {
    if (!grow(scanner)) return -1;
    place = hash & (scanner->room - 1);
    while (scanner->kinds[place].key) place = (place + 1) & (scanner->room - 1);
  }
  char *copy = malloc(length);
  if (!copy) return -1;
  memcpy(copy, key, length);
  scanner->kinds[place] = (Kind){hash, copy, length, scanner->count};
  return scanner->count++;
}

/* -- JSON. Each function takes where a thing begins and returns where it ends, NULL if it is none
   or not of the plain form. The text ends with a zero byte, which no thing contains. */

static const char *skip_space(const char *p) {
  while (*p == ' ' || *p == '\t') p++;
  return p;
}

static uint8_t is_plain[256];     /* whether a byte may be part of a text */
static int8_t base64_values[256]; /* -1 for other characters */
static uint8_t fields[256];       /* by hash of their names, UNKNOWN where free */

static uint8_t hash_of_name(const char *name, int64_t length) {
  return (uint8_t)(31 * name[0] + 7 * name[length - 1] + 3 * name[length / 2] + length);
}

__attribute__((constructor)) static void make_tables(void) {
  static const char ALPHABET[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (int byte = 0x20; byte < 0x7F; byte++) is_plain[byte] = byte != '"' && byte != '\\';
  memset(base64_values, -1, sizeof base64_values);
  for (int i = 0; i < 64; i++) base64_values[(uint8_t)ALPHABET[i]] = (int8_t)i;
  memset(fields, UNKNOWN, sizeof fields);
  for (uint8_t field = 0; field < FIELDS; field++) {
    uint8_t place = hash_of_name(NAMES[field], strlen(NAMES[field]));
    while (fields[place] != UNKNOWN) place++;
    fields[place] = field;
  }
}

static const char *read_text(const char *p, Span *text) {
  if (*p++ != '"') return NULL;
  text->start = p;
  while (is_plain[(uint8_t)*p]) p++;
  text->length = p - text->start;
  return *p == '"' ? p + 1 : NULL;
}

/* A text whose bytes are checked later. */
static const char *find_text_end(const char *p, Span *text) {
  if (*p++ != '"') return NULL;
  const char *end = strchr(p, '"');
  text->start = p, text->length = end ? end - p : 0;
  return end ? end + 1 : NULL;
}

static int is_digit(char c) { return c >= '0' && c <= '9'; }

/* A number in JSON's grammar. */
static const char *skip_number(const char *p, int *is_integer) {
  *is_integer = 1;
  if (*p == '-') p++;
  if (*p == '0') p++;
  else if (is_digit(*p)) while (is_digit(*p)) p++;
  else return NULL;
  if (*p == '.') {
    *is_integer = 0;
    if (!is_digit(*++p)) return NULL;
    while (is_digit(*p)) p++;
  }
  if (*p == 'e' || *p == 'E') {
    *is_integer = 0;
    p++;
    if (*p == '+' || *p == '-') p++;
    if (!is_digit(*p)) return NULL;
    while (is_digit(*p)) p++;
  }
  return p;
}

static const char *read_integer(const char *p, int64_t *number) {
  int is_integer;
  const char *end = skip_number(p, &is_integer);
  if (!end || !is_integer || end - p > 18) return NULL;
  int is_negative = *p == '-';
  int64_t value = 0;
  for (p += is_negative; p < end; p++) value = 10 * value + (*p - '0');
  *number = is_negative ? -value : value;
  return end;
}

static const char *read_double(const char *p, double *number) {
  int is_integer;
  const char *end = skip_number(p, &is_integer);
  char *read_end;
  if (!end || (is_integer && *p == '-' && p[1] == '0')) return NULL; /* -0 has no sign in Python */
  *number = strtod(p, &read_end);
  return read_end == end && isfinite(*number) ? end : NULL; /* a locale may know another point */
}

static int is_word(const char *p, const char *word, int length) { return !strncmp(p, word, length); }

/* One of the words that stand for a number that JSON has not. */
static const char *read_special(const char *p, double *number) {
  if (is_word(p, "\"NaN\"", 5)) return *number = NAN, p + 5;
  if (is_word(p, "\"Infinity\"", 10)) return *number = INFINITY, p + 10;
  if (is_word(p, "\"-Infinity\"", 11)) return *number = -INFINITY, p + 11;
  return NULL;
}

static const char *read_integers(const char *p) {
  int64_t number;
  if (*p++ != '[') return NULL;
  p = skip_space(p);
  if (*p == ']') return p + 1;
  for (;;) {
    p = read_integer(p, &number);
    if (!p) return NULL;
    p = skip_space(p);
    if (*p == ']') return p + 1;
    if (*p++ != ',') return NULL;
    p = skip_space(p);
  }
}

static const char *skip_value(const char *p, int depth);

static const char *skip_items(const char *p, int depth, char close) {
  p = skip_space(p + 1);
  if (*p == close) return p + 1;
  for (;;) {
    if (close == '}') {
      Span key;
      if (!(p = read_text(p, &key))) return NULL;
      p = skip_space(p);
      if (*p++ != ':') return NULL;
      p = skip_space(p);
    }
    if (!(p = skip_value(p, depth + 1))) return NULL;
    p = skip_space(p);
    if (*p == close) return p + 1;
    if (*p++ != ',') return NULL;
    p = skip_space(p);
  }
}

static const char *skip_value(const char *p, int depth) {
  Span text;
  int is_integer;
  if (depth > DEEPEST) return NULL;
  switch (*p) {
    case '"': return read_text(p, &text);
    case '[': return skip_items(p, depth, ']');
    case '{': return skip_items(p, depth, '}');
    case 't': return is_word(p, "true", 4) ? p + 4 : NULL;
    case 'f': return is_word(p, "false", 5) ? p + 5 : NULL;
    case 'n': return is_word(p, "null", 4) ? p + 4 : NULL;
    default: return skip_number(p, &is_integer);
  }
}

/* Decode base64 with padding. Return the number of bytes, -1 if it is wrong or longer than `room`. */
static int64_t decode_base64(Span text, uint8_t *bytes, int64_t room) {
  int64_t length = text.length, count = 0;
  const char *p = text.start;
  if (length % 4 || length / 4 * 3 > room) return -1;
  int padding = length && p[length - 1] == '=' ? 1 + (p[length - 2] == '=') : 0;
  for (int64_t whole = length / 4 - (padding > 0); whole > 0; whole--, p += 4) {
    int32_t high = base64_values[(uint8_t)p[0]], second = base64_values[(uint8_t)p[1]];
    int32_t third = base64_values[(uint8_t)p[2]], low = base64_values[(uint8_t)p[3]];
    if ((high | second | third | low) < 0) return -1;
    uint32_t bits = (uint32_t)(high << 18 | second << 12 | third << 6 | low);
    bytes[count++] = (uint8_t)(bits >> 16);
    bytes[count++] = (uint8_t)(bits >> 8);
    bytes[count++] = (uint8_t)bits;
  }
  if (padding) {
    uint32_t bits = 0;
    for (int i = 0; i < 4 - padding; i++) {
      int value = base64_values[(uint8_t)p[i]];
      if (value < 0) return -1;
      bits |= (uint32_t)value << (18 - 6 * i);
    }
    bytes[count++] = (uint8_t)(bits >> 16);
    if (padding == 1) bytes[count++] = (uint8_t)(bits >> 8);
  }
  return count;
}

static int is_base64(Span text) {
  int64_t length = text.length;
  if (length % 4) return 0;
  if (length && text.start[length - 1] == '=') length -= 1 + (text.start[length - 2] == '=');
  for (int64_t i = 0; i < length; i++)
    if (base64_values[(uint8_t)text.start[i]] < 0) return 0;
  return 1;
}

/* -- rows */

typedef struct {
  Span texts[KIND_FIELDS], sketch;
  double numbers[MAX + 1]; /* by field */
  int64_t order[2], place[3]; /* place: loop, step, call */
  uint64_t seen;
} Row;

static int field_of(Span name) {
  if (!name.length) return UNKNOWN;
  uint8_t place = hash_of_name(name.start, name.length);
  for (int field; (field = fields[place]) != UNKNOWN; place++)
    if (!strncmp(NAMES[field], name.start, name.length) && !NAMES[field][name.length]) return field;
  return UNKNOWN;
}

static const char *read_order(const char *p, int64_t *order) {
  order[0] = order[1] = -1;
  if (is_word(p, "null", 4)) return p + 4;
  if (*p++ != '[') return NULL;
  for (int i = 0; i < 2; i++) {
    p = skip_space(p);
    if (is_word(p, "null", 4)) p += 4;
    else if (!(p = read_integer(p, &order[i])) || order[i] < 0 || order[i] > LARGEST_INDEX) return NULL;
    p = skip_space(p);
    if (*p++ != ",]"[i]) return NULL;
  }
  return p;
}

/* Read the value of a field; `is_full`: of one beyond the header, too. */
static const char *read_field(const char *p, int field, Row *row, int is_full) {
  Span text;
  int64_t integer;
  double number;
  int is_null = is_word(p, "null", 4);
  row->seen |= 1ull << field;
  if (field == ORDER) return read_order(p, row->order);
  if (field == SKETCH) {
    row->sketch.length = -1;
    return is_null ? p + 4 : find_text_end(p, &row->sketch); /* base64 decides on its bytes */
  }
  if (field >= LOOP && field <= CALL) {
    int64_t *place = &row->place[field - LOOP];
    *place = NOWHERE;
    return is_null ? p + 4 : read_integer(p, place);
  }
  if (field > L2 && !is_full) return skip_value(p, 0);
  if (is_null) {
    if (TYPES[field] == TEXT) return NULL;
    if (field < KIND_FIELDS) row->texts[field].length = -1;
    else if (field <= MAX) row->numbers[field] = NAN;
    return p + 4;
  }
  switch (TYPES[field]) {
    case TEXT:
    case TEXT_OR_NULL: return read_text(p, field < KIND_FIELDS ? &row->texts[field] : &text);
    case INDEX:
    case COUNT:
      p = read_integer(p, &integer);
      if (!p || (TYPES[field] == INDEX && (integer < 0 || integer > LARGEST_INDEX))) return NULL;
      if (field <= MAX) row->numbers[field] = (double)integer;
      return p;
    case NUMBER:
      p = *p == '"' ? read_special(p, &number) : read_double(p, &number);
      row->numbers[field] = number;
      return p;
    case INTEGERS: return read_integers(p);
    case BASE64: return (p = read_text(p, &text)) && is_base64(text) ? p : NULL;
    default: return NULL;
  }
}

static const char *read_row(const char *p, Row *row, int is_full) {
  Span name;
  for (int field = 0; field < KIND_FIELDS; field++) row->texts[field] = (Span){"", 0};
  row->texts[ARGUMENT].length = row->sketch.length = -1;
  memcpy(row->texts + PHASE, &(Span){"forward", 7}, sizeof(Span));
  for (int field = 0; field <= MAX; field++) row->numbers[field] = NAN;
  row->order[0] = row->order[1] = -1;
  row->place[0] = row->place[1] = row->place[2] = NOWHERE;
  row->seen = 0;
  p = skip_space(p);
  if (*p != '{') return NULL;
  do {
    p = skip_space(p + 1);
    if (!(p = read_text(p, &name))) return NULL;
    p = skip_space(p);
    if (*p != ':') return NULL;
    p = skip_space(p + 1);
    int field = field_of(name);
    p = field == UNKNOWN ? skip_value(p, 0) : read_field(p, field, row, is_full);
    if (!p) return NULL;
    p = skip_space(p);
  } while (*p == ',');
  if (*p != '}') return NULL;
  uint64_t required = 1ull << MODULE | 1ull << TENSOR | 1ull << STEP;
  return (row->seen & required) == required ? skip_space(p + 1) : NULL;
}

/* Read lines into arrays. Return the number of rows, -1 if there is a line of another form. */
static int64_t read_lines(Scanner *scanner, const char *text, int64_t size, Arrays *arrays) {
  const char *p = text, *end = text + size;
  const int64_t capacity = arrays->capacity;
  int64_t rows = 0, used = 0, sketches = 0;
  Row row;
  for (; p < end; rows++) {
    if (rows == capacity) return -1;
    arrays->starts[rows] = p - text;
    if (!(p = read_row(p, &row, arrays->is_full))) return -1;
    if (*p == '\r') p++;
    if (*p == '\n') p++;
    else if (p != end) return -1;
    if ((arrays->kinds[rows] = kind_of(scanner, row.texts)) < 0) return -1;
    for (int i = 0; i < 5; i++) arrays->numbers[i * capacity + rows] = row.numbers[NUMBER_ROWS[i]];
    memcpy(arrays->order + 2 * rows, row.order, sizeof row.order);
    memcpy(arrays->places + 3 * rows, row.place, sizeof row.place);
    if (arrays->is_full)
      for (int i = 0; i < 8; i++)
        arrays->statistics[i * capacity + rows] = row.numbers[STATISTIC_ROWS[i]];
    if (row.sketch.length < 0) continue;
    int64_t count = decode_base64(row.sketch, arrays->sketches + used, arrays->sketch_room - used);
    if (count < 0) return -1;
    used += count;
    arrays->sketched[sketches] = rows;
    arrays->sketch_ends[sketches++] = used;
  }
  arrays->starts[rows] = size;
  arrays->sketch_count = sketches;
  return rows;
}

/* Read the lines that begin at an offset of a file: as many as `text` has room for.

   One call does all that needs no Python, so that a thread waits for the interpreter once a block.
   text: room for `room` bytes and a zero byte.
   Returns the number of rows; -1 if the lines are of another form; -2 if a line is longer than
   `text`; -3 if the file cannot be read, with `errno` in `size`. `size` is otherwise that of the
   lines; `is_last`: whether the file ends after them. */
EXPORT int64_t scanner_read(
    Scanner *scanner, int file, int64_t offset, char *text, int64_t room, Arrays *arrays) {
  int64_t size = 0;
  while (size < room) {
    int64_t count = pread(file, text + size, room - size, offset + size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return arrays->size = errno, -3;
    if (!count) break;
    size += count;
  }
  if (!(arrays->is_last = size < room)) {
    while (size > 0 && text[size - 1] != '\n') size--;
    if (!size) return -2;
  }
  char next = text[size];
  text[arrays->size = size] = 0;
  int64_t rows = read_lines(scanner, text, size, arrays);
  text[size] = next;
  return rows;
}
