/* Measures a Python tensor object, with no line of Python in between.
 *
 * For a tensor of a thousand values the arithmetic takes 0.1 µs. Python takes 10 µs to ask for its dtype, size and address
 * and to call kernel.c, once a model's own code has filled the processor's caches. Here DLPack's exchange table
 * (github.com/dmlc/dlpack, version 1.3) answers all questions in one call. Unusual tensors are left to Python.
 */

#include "native.h"

extern void kernel_measure(const void *data, int64_t numel, int64_t how, void *request);

/* -- DLPack ----------------------------------------------------------------------------------------------------------- */

enum { VERSION = 1, ON_CPU = 1 };
#define LOW (1ull << 40) /* an address below may be an offset from address 0 */

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*from_object)(void *object, Tensor *tensor); /* borrows; returns not 0 and sets a Python error on failure */
} Exchange;

Python python;
Object none, tensor_type, parameter_type;
static const Exchange *exchange;
static Object is_negated, storage_offset, count_modes;
static int64_t max_numel; /* because the GIL is held */
static struct {
    Object name;
    int32_t kind, bits;
} dtypes[32];                 /* by the kernel's codes */
static const int32_t *shifts; /* of the first pieces of a sketch; NULL until all its tables are set */

/* -- measuring -------------------------------------------------------------------------------------------------------- */

static int code_of(const Tensor *tensor) {
    for (int code = 0; code < 32; code++)
        if (dtypes[code].name && dtypes[code].kind == tensor->kind && dtypes[code].bits == tensor->bits)
            return code;
    return -1;
}

/* Returns the number of elements if they are dense in memory, else 0. `ordered`: only if also in logical order. */
static int64_t dense(const Tensor *tensor, int ordered) {
    int64_t numel = 1;
    uint64_t taken = 0;
    if (tensor->dimensions > 64)
        return 0;
    for (int remaining = tensor->dimensions; remaining; remaining--) { /* find the dimension of stride `numel` */
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

/* Returns whether the address is nothing but the tensor's offset: the program has freed the memory of this view. */
static int is_freed(Object object, const Tensor *tensor) {
    Object offset = python.call(storage_offset, object, (Object)0);
    int64_t bytes = offset ? python.as_number(offset) * tensor->bits / 8 : 0;
    if (offset)
        python.release(offset);
    return !offset || (uintptr_t)tensor->data == (uintptr_t)bytes;
}

/* Returns 1 and describes the tensor if its CPU memory holds its numbers as they are. No mode of the program sees this. */
static int describe_plain(Object object, Tensor *tensor) {
    Object type = type_of(object);
    if (type != tensor_type && type != parameter_type)
        return 0;
    Object mode_count = python.call(count_modes, (Object)0); /* a mode would see the questions below */
    int ordinary = mode_count && !python.is_true(mode_count) && !exchange->from_object(object, tensor);
    if (mode_count)
        python.release(mode_count);
    if (ordinary) {
        Object negated = python.call(is_negated, object, (Object)0); /* its memory holds the other sign */
        ordinary = negated && !python.is_true(negated);
        if (negated)
            python.release(negated);
    }
    if (ordinary && (uint64_t)(uintptr_t)tensor->data < LOW && is_freed(object, tensor))
        ordinary = 0;
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

int describe_readable(Object object, int64_t wanted, Readable *readable) {
    Tensor *tensor = &readable->tensor;
    if (!describe_plain(object, tensor))
        return 0;
    readable->wanted = wanted;
    readable->numel = dense(tensor, wanted & WANT_SKETCH);
    readable->code = code_of(tensor);
    return readable->code >= 0 && readable->numel >= 1 && readable->numel <= max_numel && (!(wanted & WANT_SKETCH) || shifts);
}

int count_numbers(int64_t wanted) {
    return (wanted & WANT_SUMS ? SUMS : 0) + (wanted & WANT_HISTOGRAM ? BINS : 0) + (wanted & WANT_SKETCH ? NUMBERS : 0);
}

void measure_readable(const Readable *readable, double *numbers) {
    struct {
        int64_t start;
        uint64_t shifts;
        double numbers[SUMS + BINS + NUMBERS];
    } request = {.start = 0, .shifts = (uint64_t)(uintptr_t)shifts};
    const Tensor *tensor = &readable->tensor;
    kernel_measure((const char *)tensor->data + tensor->offset, readable->numel,
                   readable->code | readable->wanted << 8 | 1 << 16, &request);
    for (int index = count_numbers(readable->wanted); index--;)
        numbers[index] = request.numbers[index];
}

Borrowed dtype_name(int code) { return dtypes[code].name; }

/* measure(tensor, wanted) -> (numbers, numel, shape, dtype), as cpu_kernel.py describes. None leaves it to Python: more than
 * `max_numel` elements, memory that is not a CPU's, has gaps or (for a sketch) another order, or a dtype without a code. */
static Object measure(Object self, const Object *arguments, intptr_t count) {
    Readable readable;
    (void)self;
    if (count != 2 || !describe_readable(arguments[0], python.as_number(arguments[1]), &readable))
        return kept(none);
    double numbers[SUMS + BINS + NUMBERS];
    measure_readable(&readable, numbers);
    Object result = python.new_tuple(4);
    if (result) {
        python.set_in_tuple(result, 0, list_of(numbers, count_numbers(readable.wanted)));
        python.set_in_tuple(result, 1, python.new_whole(readable.numel));
        python.set_in_tuple(result, 2, shape_of(&readable.tensor));
        python.set_in_tuple(result, 3, kept(dtype_name(readable.code)));
    }
    return result;
}

/* -- called by cpu_kernel.py, once --------------------------------------------------------------------------------------- */

/* Sets DLPack's description and Python's name of the dtype of a code. */
PUBLIC void tensor_set_dtype(int32_t code, int32_t kind, int32_t bits, Object name) {
    python.keep(name);
    dtypes[code].name = name, dtypes[code].kind = kind, dtypes[code].bits = bits;
}

PUBLIC void tensor_set_shifts(const int32_t *first) { shifts = first; }

/* Returns `measure` as a Python function; keeps its arguments forever. None if torch has another version of the table. */
PUBLIC Object tensor_measure(const Python *functions, const Exchange *table, int64_t limit, Object nothing, Object tensor,
                             Object parameter, Object is_neg, Object offset, Object number_of_modes) {
    static const Definition definition = {"measure", measure, FASTCALL, 0};
    python = *functions, exchange = table, max_numel = limit;
    none = nothing, tensor_type = tensor, parameter_type = parameter, is_negated = is_neg, storage_offset = offset,
    count_modes = number_of_modes;
    Object retained[] = {none, none, tensor_type, parameter_type, is_negated, storage_offset, count_modes};
    for (int index = 0; index < 7; index++)
        python.keep(retained[index]);
    return table->major == VERSION && table->from_object ? python.new_function(&definition, 0, 0) : none;
}
