/* The way of an ordinary call from torch's hook to its pending rows, with no line of Python in between.
 *
 * Python takes 20 µs and more for it once a model's own code has filled the processor's caches, however lean it is: it touches
 * some hundred objects. This touches about ten. It does what `Activations.on_output` and `TensorMeasurer.add` specify, for
 * calls that need nothing else: a module of one name, outputs that are plain CPU tensors with finite numbers, and a thread that
 * began the model's newest forward. Any other call is left to them, before anything has changed.
 */

#include <string.h>
#include <time.h>

#include "native.h"

enum { MAX_TENSORS = 8, NO_BACKWARD = -1 };

/* What the model's newest forward means for its calls; written by native_observer.py's `ForwardState`. */
typedef struct {
    int64_t thread;    /* that began the forward; its calls are named by it */
    int64_t recording; /* whether its step is recorded */
    Borrowed context;  /* Python's ForwardContext */
    Borrowed calls;    /* dict: how many calls of each module were counted in its step */
    Borrowed first;    /* dict: where the numbers of a module begin, if not at 0 */
} Forward;

/* labels: of the output itself, and of the items of a tuple */
static Object site_type, tuple_type, graph_task, labels, handled;

static Object left_to_python(void) {
    python.keep(none);
    return none;
}

/* -- naming ----------------------------------------------------------------------------------------------------------- */

/* Counts a call of a module and returns its number. */
static int64_t count_call(Object calls, Object first, Object name) {
    Borrowed next = python.in_dict(calls, name);
    if (!next)
        next = python.in_dict(first, name);
    int64_t number = next ? python.as_number(next) : 0;
    Object counted = python.new_whole(number + 1);
    int failed = !counted || python.set_in_dict(calls, name, counted);
    if (counted)
        python.release(counted);
    if (failed)
        python.clear_error();
    return number;
}

static int in_backward(void) {
    Object task = python.call(graph_task, (Object)0);
    int is_inside = !task || python.as_number(task) != NO_BACKWARD;
    if (task)
        python.release(task);
    return is_inside;
}

/* Returns the name of the site's module if it has one name, in one model; else NULL. */
static Borrowed only_name(Object site, Object names) {
    Object type = python.type(site);
    python.release(type);
    return type == site_type && python.list_size(names) == 1 ? python.in_tuple(python.in_list(names, 0), 0) : 0;
}

/* -- rows ------------------------------------------------------------------------------------------------------------- */

/* Returns the measured tensor as a bytes object; NULL if it has a NaN or Inf, or memory is short. */
static Object measured(const Readable *readable, int64_t now) {
    const Tensor *tensor = &readable->tensor;
    double numbers[SUMS + BINS + NUMBERS];
    measure_readable(readable, numbers);
    if (numbers[NONFINITE])
        return 0;
    size_t shape = 8 * (size_t)tensor->dimensions, size = 8 * (size_t)count_numbers(readable->wanted);
    Object row = python.new_bytes(0, (intptr_t)(sizeof(Header) + shape + size));
    if (row) {
        char *memory = python.bytes(row);
        *(Header *)memory = (Header){.numel = readable->numel, .time_ns = now, .code = readable->code,
                                     .dimensions = tensor->dimensions, .wanted = (int32_t)readable->wanted};
        memcpy(memory + sizeof(Header), tensor->shape, shape);
        memcpy(memory + sizeof(Header) + shape, numbers, size);
    }
    return row;
}

/* Adds (site, name, label, context, row) to the pending rows. */
static void enqueue(Object queue, Object site, Object name, Object label, Object context, Stolen row) {
    Object fields[FIELDS] = {[SITE] = site, [NAME] = name, [LABEL] = label, [CONTEXT] = context, [ROW] = row};
    Object item = python.new_tuple(FIELDS);
    for (int index = 0; item && index < FIELDS; index++) {
        if (index != ROW)
            python.keep(fields[index]);
        python.set_in_tuple(item, index, fields[index]);
    }
    if (!item || python.append(queue, item))
        python.clear_error();
    python.release(item ? item : row);
}

/* Returns how many tensors an output has, all of which can be read, and the index of each one's label. -1 leaves it to Python. */
static int find_tensors(Object output, int64_t wanted, Readable *readables, int *label_indices) {
    Object type = python.type(output);
    python.release(type);
    if (type != tuple_type) {
        label_indices[0] = 0;
        return describe_readable(output, wanted, readables) ? 1 : -1;
    }
    intptr_t size = python.tuple_size(output);
    int count = 0;
    for (intptr_t index = 0; index < size; index++) {
        Borrowed item = python.in_tuple(output, index);
        if (item == none)
            continue;
        if (index >= MAX_TENSORS || !describe_readable(item, wanted, readables + count))
            return -1;
        label_indices[count++] = 1 + (int)index;
    }
    return count ? count : -1;
}

/* -- observing -------------------------------------------------------------------------------------------------------- */

/* observe(place, output) -> whether the call was counted and, in a step that is recorded, its tensors are pending rows. If not,
 * nothing has happened. `place`: (address of `Forward`, site, its names, queue of pending rows, wanted numbers). */
static Object observe(Object self, const Object *arguments, intptr_t count) {
    Readable readables[MAX_TENSORS];
    Object rows[MAX_TENSORS];
    int label_indices[MAX_TENSORS], tensors = 0;
    (void)self;
    if (count != 2)
        return left_to_python();
    Object place = arguments[0], output = arguments[1], site = python.in_tuple(place, 1);
    const Forward *forward = (const Forward *)(uintptr_t)python.as_number(python.in_tuple(place, 0));
    Borrowed name = only_name(site, python.in_tuple(place, 2));
    if (!name || forward->thread != (int64_t)python.thread() || in_backward())
        return left_to_python();
    if (forward->recording) {
        int found = find_tensors(output, python.as_number(python.in_tuple(place, 4)), readables, label_indices);
        if (found < 0)
            return left_to_python();
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        for (; tensors < found; tensors++)
            if (!(rows[tensors] = measured(readables + tensors, 1000000000ll * now.tv_sec + now.tv_nsec)))
                break;
        if (tensors < found) {
            while (tensors)
                python.release(rows[--tensors]);
            return left_to_python();
        }
    }
    int64_t number = count_call(forward->calls, forward->first, name);
    for (int index = 0; index < tensors; index++) {
        ((Header *)python.bytes(rows[index]))->call = (int32_t)number;
        enqueue(python.in_tuple(place, 3), site, name, python.in_tuple(labels, label_indices[index]), forward->context,
                rows[index]);
    }
    python.keep(handled);
    return handled;
}

/* count_call(calls, first, name) -> the number of a call, which is counted. In one piece, as `observe` may run in other threads. */
static Object count_in_python(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 3 ? python.new_whole(count_call(arguments[0], arguments[1], arguments[2])) : left_to_python();
}

/* Returns `observe` as a Python function; keeps its arguments forever. */
PUBLIC Object observer_observe(Object site, Object tuple, Object backward, Object output_labels, Object is_handled) {
    static const Definition definition = {"observe", observe, FASTCALL, 0};
    Object retained[] = {site, tuple, backward, output_labels, is_handled};
    for (int index = 0; index < 5; index++)
        python.keep(retained[index]);
    site_type = site, tuple_type = tuple, graph_task = backward, labels = output_labels, handled = is_handled;
    return python.new_function(&definition, 0, 0);
}

/* Returns `count_call` as a Python function. */
PUBLIC Object observer_count_call(void) {
    static const Definition definition = {"count_call", count_in_python, FASTCALL, 0};
    return python.new_function(&definition, 0, 0);
}
