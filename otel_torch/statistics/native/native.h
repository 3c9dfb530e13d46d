/* What the sources share that work on Python objects: tensor.c, which sets all of this, observer.c, module_call.c and lines.c.
 *
 * No header of Python or torch is needed, and therefore no build for each of their versions: cpu_kernel.py passes the functions
 * of Python, all of its stable ABI, and the objects. Everything here runs while its caller holds the GIL.
 */

#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

/* -- Python ----------------------------------------------------------------------------------------------------------- */

typedef void *Object;
typedef Object Stolen;   /* a reference that the callee takes over */
typedef Object Borrowed; /* a reference that the caller does not get */

/* in the order of cpu_kernel.py's `_PYTHON_FUNCTIONS` */
typedef struct {
    Object (*type)(Object);
    Object (*call)(Object function, ...);
    int (*is_true)(Object);
    void (*clear_error)(void);
    long long (*as_number)(Object);
    Object (*new_whole)(long long);
    Object (*new_float)(double);
    Object (*new_list)(intptr_t);
    int (*set_in_list)(Object, intptr_t, Stolen);
    Object (*new_tuple)(intptr_t);
    int (*set_in_tuple)(Object, intptr_t, Stolen);
    void (*keep)(Object);
    void (*release)(Object);
    Object (*new_function)(const void *definition, Object self, Object module);
    intptr_t (*list_size)(Object);
    Borrowed (*in_list)(Object, intptr_t);
    int (*append)(Object list, Object item);
    intptr_t (*tuple_size)(Object);
    Borrowed (*in_tuple)(Object, intptr_t);
    Borrowed (*in_dict)(Object, Object key);
    int (*set_in_dict)(Object, Object key, Object value);
    Object (*new_bytes)(const char *, intptr_t);
    char *(*bytes)(Object);
    intptr_t (*bytes_size)(Object);
    unsigned long (*thread)(void);
    int (*set_slice)(Object list, intptr_t start, intptr_t end, Object items);
    int (*next_in_dict)(Object, intptr_t *position, Borrowed *key, Borrowed *value);
    Object (*attribute)(Object, Object name);
    Object (*new_weak_reference)(Object, Object callback);
    Object (*call_with)(Object function, Object arguments, Object keywords);
    intptr_t (*dict_size)(Object);
    Object (*attributes)(Object, const void *context);
    int (*set_attribute)(Object, Object name, Object value);
} Python;

typedef struct {
    const char *name;
    Object (*function)(Object self, const Object *arguments, intptr_t count);
    int flags;
    const char *about;
} Definition;

enum { FASTCALL = 0x80 };

extern Python python;
extern Object none, tensor_type, parameter_type;

/* Returns an object with a reference for the caller. */
static inline Object kept(Object object) {
    python.keep(object);
    return object;
}

/* Returns the type of an object, which keeps it. */
static inline Borrowed type_of(Object object) {
    Object type = python.type(object);
    python.release(type);
    return type;
}

/* -- tensors ---------------------------------------------------------------------------------------------------------- */

enum { SUMS = 7, BINS = 64, NUMBERS = 64, WANT_SUMS = 1, WANT_HISTOGRAM = 2, WANT_SKETCH = 4 };

/* DLPack's (github.com/dmlc/dlpack, version 1.3) */
typedef struct {
    void *data;
    int32_t device, device_number, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

/* A tensor that the kernel can read, and how many of its numbers are wanted. */
typedef struct {
    Tensor tensor;
    int64_t numel, wanted;
    int code;
} Readable;

/* Returns 1 and describes the tensor if the kernel reads it while the GIL is held; 0 leaves it to Python. */
int describe_readable(Object object, int64_t wanted, Readable *readable);

/* Returns how many numbers are wanted. */
int count_numbers(int64_t wanted);

/* Measures a tensor into `count_numbers` numbers. */
void measure_readable(const Readable *readable, double *numbers);

/* Returns Python's name of the dtype of a code. */
Borrowed dtype_name(int code);

/* -- recognizing a tensor that was seen before; recognizer.c -------------------------------------------------------------- */

enum { RECOGNIZE_MIN = 1 << 15 }; /* elements; one with fewer is measured faster than recognized, as in tensor_measurer.py */

/* Returns whether a tensor may be remembered: a weak reference to a parameter would forbid torch to swap it. */
int is_recognizable(Object tensor);

/* Returns what is known of a tensor that was seen in this forward and has not changed since; NULL if there is none. */
Borrowed recognize(Object tensor, const Readable *readable, int64_t forward);
void remember(Object tensor, const Readable *readable, Object known, int64_t forward);

/* -- calls of modules --------------------------------------------------------------------------------------------------- */

/* Observe the inputs of a call that is about to run, or the output of one that has run; observer.c. A place: see there.
 * Return whether they did; else nothing has happened, and Python has to. */
int observe_inputs(Object place, Object arguments, Object keywords);
int observe_output(Object place, Object output);

/* -- compact rows ------------------------------------------------------------------------------------------------------ */

/* A measured tensor as one bytes object: this, its shape, its numbers. observer.c writes it; lines.c and compact_rows.py read it. */
typedef struct {
    int64_t numel, time_ns; /* elements; when it was seen, in Unix nanoseconds */
    int32_t call, code, dimensions, wanted;
} Header;

#include "layout.h"
