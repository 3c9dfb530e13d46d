/* The numbers of a tensor of Python, without a line of Python in between.
 *
 * Of a tensor of a thousand values the arithmetic takes a tenth of a microsecond. Python takes ten to ask for its type, size
 * and address and to call kernel.c, where a model's own code has just filled the processor's caches. Here DLPack's exchange
 * table (github.com/dmlc/dlpack, version 1.3) answers all of it in one call. Whatever is not ordinary is left to Python.
 *
 * No header of Python or torch is needed, and so no build for each of their versions: Python's functions, all of its stable
 * ABI, are handed over by native.py.
 */

#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { SUMS = 7, BINS = 64, NUMBERS = 64, WANT_SUMS = 1, WANT_HISTOGRAM = 2, WANT_SKETCH = 4 };

extern void kernel_measure(const void *data, int64_t numel, int64_t how, void *request);

/* -- DLPack ----------------------------------------------------------------------------------------------------------- */

enum { VERSION = 1, ON_CPU = 1 };

typedef struct {
    void *data;
    int32_t device, device_number, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*from_object)(void *object, Tensor *tensor); /* borrows; not 0, with an error of Python's set, where it cannot */
} Exchange;

/* -- Python ----------------------------------------------------------------------------------------------------------- */

typedef void *Object;

/* in the order of native.py's `_PYTHON`; what is `Given` away is no longer the caller's */
typedef Object Given;
typedef struct {
    Object (*type)(Object);
    Object (*call)(Object function, ...);
    int (*is_true)(Object);
    void (*clear_error)(void);
    long long (*as_number)(Object);
    Object (*new_whole)(long long);
    Object (*new_float)(double);
    Object (*new_list)(intptr_t);
    int (*set_in_list)(Object, intptr_t, Given);
    Object (*new_tuple)(intptr_t);
    int (*set_in_tuple)(Object, intptr_t, Given);
    void (*keep)(Object);
    void (*release)(Object);
    Object (*new_function)(const void *definition, Object self, Object module);
} Python;

static Python python;
static const Exchange *exchange;
static Object none, types[2], is_negated, count_modes;
static int64_t most; /* elements, for Python's lock is kept */
static struct {
    Object name;
    int32_t kind, bits;
} dtypes[32];                 /* by the kernel's codes */
static const int32_t *shifts; /* of the first pieces of a sketch; NULL until all that a sketch needs is there */

/* -- measuring -------------------------------------------------------------------------------------------------------- */

static int code_of(const Tensor *tensor) {
    for (int code = 0; code < 32; code++)
        if (dtypes[code].name && dtypes[code].kind == tensor->kind && dtypes[code].bits == tensor->bits)
            return code;
    return -1;
}

/* The number of elements if they lie one behind the other, in logical order or, for what has no order, in any; else 0. */
static int64_t dense(const Tensor *tensor, int ordered) {
    int64_t numel = 1;
    uint64_t taken = 0;
    if (tensor->dimensions > 64)
        return 0;
    for (int left = tensor->dimensions; left; left--) { /* the dimension in which neighbours are `numel` apart */
        int dimension = tensor->dimensions - 1;
        for (; dimension >= 0; dimension--)
            if (!(taken >> dimension & 1)) {
                if (tensor->shape[dimension] == 1 || tensor->strides[dimension] == numel)
                    break;
                if (ordered)
                    return 0;
            }
        if (dimension < 0)
            return 0;
        taken |= 1ull << dimension;
        numel *= tensor->shape[dimension];
    }
    return numel;
}

/* 1 if the object is a tensor whose memory holds its numbers as they are; nobody sees that it is asked. */
static int find(Object object, Tensor *tensor) {
    Object type = python.type(object);
    python.release(type);
    if (type != types[0] && type != types[1])
        return 0;
    Object counted = python.call(count_modes, (Object)0); /* a mode of the program's would be asked in our place */
    int ordinary = counted && !python.is_true(counted) && !exchange->from_object(object, tensor);
    if (counted)
        python.release(counted);
    if (ordinary) {
        Object negated = python.call(is_negated, object, (Object)0); /* a view of another sign than its memory */
        ordinary = negated && !python.is_true(negated);
        if (negated)
            python.release(negated);
    }
    if (!ordinary)
        python.clear_error();
    return ordinary && tensor->device == ON_CPU && tensor->lanes == 1 && tensor->data && tensor->strides;
}

static Object list_of(const double *numbers, int count) {
    Object list = python.new_list(count);
    for (int index = 0; list && index < count; index++)
        python.set_in_list(list, index, python.new_float(numbers[index]));
    return list;
}

static Object shape_of(const Tensor *tensor) {
    Object list = python.new_list(tensor->dimensions);
    for (int dimension = 0; list && dimension < tensor->dimensions; dimension++)
        python.set_in_list(list, dimension, python.new_whole(tensor->shape[dimension]));
    return list;
}

static Object left_to_python(void) {
    python.keep(none);
    return none;
}

/* measure(tensor, wanted) -> (row, numel, shape, dtype), as native.py says; None where that is left to Python: of more than
 * `most` elements, of other memory than a CPU's, with gaps or, for a sketch, another order, of a type that has no code. */
static Object measure(Object self, const Object *arguments, intptr_t count) {
    Tensor tensor;
    (void)self;
    if (count != 2 || !find(arguments[0], &tensor))
        return left_to_python();
    int64_t wanted = python.as_number(arguments[1]), numel = dense(&tensor, wanted & WANT_SKETCH);
    int code = code_of(&tensor);
    if (code < 0 || numel < 1 || numel > most || (wanted & WANT_SKETCH && !shifts))
        return left_to_python();
    struct {
        int64_t start;
        uint64_t shifts;
        double numbers[SUMS + BINS + NUMBERS];
    } request = {.start = 0, .shifts = (uint64_t)(uintptr_t)shifts};
    kernel_measure((const char *)tensor.data + tensor.offset, numel, code | wanted << 8 | 1 << 16, &request);
    int size = (wanted & WANT_SUMS ? SUMS : 0) + (wanted & WANT_HISTOGRAM ? BINS : 0) + (wanted & WANT_SKETCH ? NUMBERS : 0);
    Object found = python.new_tuple(4);
    if (found) {
        python.keep(dtypes[code].name);
        python.set_in_tuple(found, 0, list_of(request.numbers, size));
        python.set_in_tuple(found, 1, python.new_whole(numel));
        python.set_in_tuple(found, 2, shape_of(&tensor));
        python.set_in_tuple(found, 3, dtypes[code].name);
    }
    return found;
}

/* -- what native.py calls, once --------------------------------------------------------------------------------------- */

/* What DLPack calls the dtype of a code, and what Python does. */
PUBLIC void tensor_set_dtype(int32_t code, int32_t kind, int32_t bits, Object name) {
    python.keep(name);
    dtypes[code].name = name, dtypes[code].kind = kind, dtypes[code].bits = bits;
}

PUBLIC void tensor_set_shifts(const int32_t *first) { shifts = first; }

/* `measure` as a function of Python's, for ever; what is passed is never let go of. None where torch has another table. */
PUBLIC Object tensor_measure(const Python *functions, const Exchange *table, int64_t limit, Object nothing, Object tensor,
                             Object parameter, Object is_neg, Object number_of_modes) {
    static const struct {
        const char *name;
        Object (*function)(Object, const Object *, intptr_t);
        int flags;
        const char *about;
    } definition = {"measure", measure, 0x80 /* METH_FASTCALL */, 0};
    python = *functions, exchange = table, most = limit;
    none = nothing, types[0] = tensor, types[1] = parameter, is_negated = is_neg, count_modes = number_of_modes;
    Object kept[] = {none, none, types[0], types[1], is_negated, count_modes};
    for (int index = 0; index < 6; index++)
        python.keep(kept[index]);
    return table->major == VERSION && table->from_object ? python.new_function(&definition, 0, 0) : none;
}
