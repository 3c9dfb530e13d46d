/* The way of an ordinary call from torch's hooks to its pending rows, with no line of Python in between.
 *
 * Python takes 20 µs and more for it once a model's own code has filled the processor's caches, however lean it is: it touches
 * some hundred objects. This touches about ten. It does what `on_inputs` and `on_output` of activations.py specify, for calls
 * that need nothing else: a module of one name, arguments and outputs that are plain CPU tensors with finite numbers, and a
 * thread that began the model's newest forward. Any other call is left to them before anything has changed.
 *
 * A parity recording also has each tensor's identity, which is Python's (identity.py) and asked for once per tensor, and the
 * clock of calls at which a call was entered and left.
 */

#include <string.h>
#include <time.h>

#include "native.h"

enum { MAX_TENSORS = 16, NO_BACKWARD = -1 };

/* A call as it is observed: where, and the tensors found so far. */
typedef struct {
    Readable readable;
    Borrowed tensor, label;
    Object row, identity; /* owned */
} CallTensor;

typedef struct {
    const Forward *forward;
    Borrowed site, name, queue, signature; /* no signature outside of parity recordings */
    Borrowed entered;                      /* the call as it was entered, when it is left */
    Object times;                          /* owned; none outside of parity recordings */
    int64_t wanted;
    int inputs, recognizes, size;
    CallTensor tensors[MAX_TENSORS];
} Call;

static ObserverObjects objects; /* set by native_functions.py */

/* -- naming ----------------------------------------------------------------------------------------------------------- */

/* Counts a call of a module and returns its number. */
static int64_t count_call(Object counts, Object first, Object name) {
    Borrowed next = python.in_dict(counts, name);
    if (!next)
        next = python.in_dict(first, name);
    int64_t number = next ? python.as_number(next) : 0;
    Object counted = python.new_whole(number + 1);
    if (!counted || python.set_in_dict(counts, name, counted))
        python.clear_error();
    if (counted)
        python.release(counted);
    return number;
}

static int in_backward(void) {
    Object task = python.call(objects.graph_task, (Object)0);
    int is_inside = !task || python.as_number(task) != NO_BACKWARD;
    if (task)
        python.release(task);
    return is_inside;
}

/* Returns whether a module is of the class that its signature names. */
static int has_its_class(Object place) {
    Object module = python.call(python.in_tuple(place, PLACE_MODULE), (Object)0);
    int has = module && type_of(module) == python.in_tuple(place, PLACE_MODULE_CLASS);
    if (module)
        python.release(module);
    return has;
}

/* Begins a call; returns 0 to leave it to Python. */
static int begin(Call *call, Object place) {
    if (place == none)
        return 0;
    Borrowed names = python.in_tuple(place, PLACE_NAMES);
    call->site = python.in_tuple(place, PLACE_SITE);
    if (type_of(call->site) != objects.site_type || python.list_size(names) != 1)
        return 0; /* which name, and of which model, depends on the calls around it */
    call->name = python.in_tuple(python.in_list(names, 0), 0);
    call->forward = (const Forward *)(uintptr_t)python.as_number(python.in_tuple(place, PLACE_FORWARD));
    call->queue = python.in_tuple(place, PLACE_QUEUE);
    call->wanted = python.as_number(python.in_tuple(place, PLACE_WANTED));
    call->inputs = (int)python.as_number(python.in_tuple(place, PLACE_INPUTS));
    call->recognizes = call->forward->recognizes && call->inputs;
    call->signature = python.in_tuple(place, PLACE_SIGNATURE);
    if (call->signature == none)
        call->signature = 0;
    else if (call->forward->recording && !(call->recognizes && has_its_class(place)))
        return 0;
    call->entered = 0;
    call->times = 0;
    call->size = 0;
    return call->forward->thread == (int64_t)python.thread() && !in_backward();
}

/* -- tensors ---------------------------------------------------------------------------------------------------------- */

static int is_plain(Object type) {
    for (intptr_t index = 0; index < python.tuple_size(objects.plain_types); index++)
        if (python.in_tuple(objects.plain_types, index) == type)
            return 1;
    return 0;
}

/* Adds a tensor to a call, or passes over a value without tensors; returns 0 for anything else. */
static int add(Call *call, Object value, Borrowed label) {
    Object type = type_of(value);
    if (type != tensor_type && type != parameter_type)
        return is_plain(type);
    CallTensor *tensor = call->tensors + call->size;
    if (call->size == MAX_TENSORS || !describe_readable(value, call->wanted, &tensor->readable))
        return 0;
    tensor->tensor = value, tensor->label = label, tensor->row = tensor->identity = 0;
    call->size++;
    return 1;
}

/* Adds the tensors of a value or flat tuple; returns 0 for anything else. `labels`: of the value, then of the items. */
static int add_all(Call *call, Object value, Object labels) {
    if (type_of(value) != objects.tuple_type)
        return add(call, value, python.in_tuple(labels, 0));
    intptr_t size = python.tuple_size(value);
    int added = size < python.tuple_size(labels);
    for (intptr_t index = 0; added && index < size; index++)
        added = add(call, python.in_tuple(value, index), python.in_tuple(labels, 1 + index));
    return added;
}

static int add_arguments(Call *call, Object arguments, Object keywords) {
    intptr_t size = python.tuple_size(arguments), position = 0;
    int added = size <= python.tuple_size(objects.argument_labels);
    for (intptr_t index = 0; added && index < size; index++)
        added = add_all(call, python.in_tuple(arguments, index), python.in_tuple(objects.argument_labels, index));
    Borrowed key, value;
    while (added && python.next_in_dict(keywords, &position, &key, &value)) {
        Borrowed labels = python.in_dict(objects.keyword_labels, key);
        if (!labels) {
            Object made = python.call(objects.make_keyword_labels, key, (Object)0); /* which puts them into `objects.keyword_labels` */
            if (!made) {
                python.clear_error();
                return 0;
            }
            python.release(made);
            labels = made;
        }
        added = add_all(call, value, labels);
    }
    return added;
}

/* -- rows ------------------------------------------------------------------------------------------------------------- */

/* Returns a tensor as a bytes object; NULL if it has a NaN or Inf, or memory is short. */
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

/* Returns a copy of a row, with another time. */
static Object copied(Object row, int64_t now) {
    Object copy = python.new_bytes(python.bytes(row), python.bytes_size(row));
    if (copy)
        ((Header *)python.bytes(copy))->time_ns = now;
    return copy;
}

/* Puts the row of a tensor outside of parity recordings into `row`; NULL if Python has to measure it. `entering`: the tensor may be
 * recognized. An output is measured in any case, because a kernel of the program may have changed an input in place, uncounted. */
static void find_row(const Call *call, CallTensor *tensor, int entering, int64_t now) {
    int64_t forward = call->forward->number;
    int worth = call->recognizes && tensor->readable.numel >= RECOGNIZE_MIN && is_recognizable(tensor->tensor);
    Borrowed known = worth && entering ? recognize(tensor->tensor, &tensor->readable, forward) : 0;
    tensor->row = known ? copied(known, now) : measured(&tensor->readable, now);
    if (worth && !known && tensor->row)
        remember(tensor->tensor, &tensor->readable, tensor->row, forward);
}

/* -- rows of a parity recording ----------------------------------------------------------------------------------------- */

/* Returns the identity of a tensor; NULL if Python cannot tell. */
static Object identity_of(const Call *call, const CallTensor *tensor) {
    int64_t forward = call->forward->number;
    Object identity = recognize(tensor->tensor, &tensor->readable, forward);
    if (identity)
        return kept(identity);
    identity = python.call(objects.identify, tensor->tensor, (Object)0);
    if (identity && is_recognizable(tensor->tensor))
        remember(tensor->tensor, &tensor->readable, identity, forward);
    return identity;
}

static int was_input(const Call *call, Object identity) {
    Borrowed inputs = call->entered ? python.in_tuple(call->entered, ENTERED_INPUTS) : 0;
    for (intptr_t index = 0; inputs && index < python.tuple_size(inputs); index++)
        if (python.in_tuple(inputs, index) == identity)
            return 1;
    return 0;
}

/* As `find_row`, with the tensor's identity, which keeps the row until its step has been read. */
static void find_identity_and_row(const Call *call, CallTensor *tensor, int64_t now) {
    tensor->identity = identity_of(call, tensor);
    Object measurement = tensor->identity ? python.attribute(tensor->identity, objects.measurement_name) : 0;
    if (!measurement)
        return;
    if (type_of(measurement) == objects.bytes_type && !was_input(call, tensor->identity))
        tensor->row = copied(measurement, now);
    else if ((tensor->row = measured(&tensor->readable, now))) {
        Object is_counted = python.attribute(tensor->identity, objects.is_counted_name);
        if (is_counted && python.is_true(is_counted))
            python.set_attribute(tensor->identity, objects.measurement_name, tensor->row);
        if (is_counted)
            python.release(is_counted);
    }
    python.release(measurement);
}

/* -- all rows of a call ------------------------------------------------------------------------------------------------- */

/* Measures the tensors of a call; returns 0, with nothing left over, if Python has to. */
static int measure_all(Call *call, int entering) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    int64_t now = 1000000000ll * time.tv_sec + time.tv_nsec;
    for (int index = 0; index < call->size; index++) {
        CallTensor *tensor = call->tensors + index;
        if (call->signature)
            find_identity_and_row(call, tensor, now);
        else
            find_row(call, tensor, entering, now);
        if (tensor->row)
            continue;
        python.clear_error();
        for (; index >= 0; index--) {
            Object owned[] = {call->tensors[index].row, call->tensors[index].identity};
            for (int item = 0; item < 2; item++)
                if (owned[item])
                    python.release(owned[item]);
        }
        return 0;
    }
    return 1;
}

/* Adds the pending rows of a call, and releases what it owns. */
static void enqueue(const Call *call, int64_t number) {
    int size = call->signature ? PARITY_FIELDS : PLAIN_FIELDS;
    for (int index = 0; index < call->size; index++) {
        const CallTensor *tensor = call->tensors + index;
        Object item = python.new_tuple(size);
        Borrowed fields[] = {[ROW_SITE] = call->site, [ROW_NAME] = call->name, [ROW_LABEL] = tensor->label,
                             [ROW_CONTEXT] = call->forward->context, [ROW_DATA] = tensor->row,
                             [ROW_IDENTITY] = tensor->identity, [ROW_SIGNATURE] = call->signature, [ROW_TIMES] = call->times};
        ((Header *)python.bytes(tensor->row))->call = (int32_t)number;
        for (int field = 0; item && field < size; field++)
            python.set_in_tuple(item, field, kept(fields[field]));
        if (!item || python.append(call->queue, item))
            python.clear_error();
        if (item)
            python.release(item);
        python.release(tensor->row);
        if (tensor->identity)
            python.release(tensor->identity);
    }
    if (call->times)
        python.release(call->times);
}

/* -- observing -------------------------------------------------------------------------------------------------------- */

/* Returns the next time of the clock of calls. */
static Object new_time(void) {
    Object time = python.call(objects.next_index, (Object)0);
    return time ? time : kept(none);
}

/* Returns the times of a call that is entered now; none outside of parity recordings. `parent`: the entered call around it. */
static Object new_times(const Call *call, Borrowed parent) {
    if (!call->signature)
        return kept(none);
    Borrowed times_of_parent = parent ? python.in_tuple(parent, ENTERED_TIMES) : none;
    Object times = python.new_list(TIMES_SIZE);
    if (!times)
        return kept(none);
    Borrowed entry_of_parent = times_of_parent == none ? none : python.in_list(times_of_parent, TIMES_ENTRY);
    python.set_in_list(times, TIMES_ENTRY, new_time());
    python.set_in_list(times, TIMES_EXIT, kept(none));
    python.set_in_list(times, TIMES_PARENT, kept(entry_of_parent));
    return times;
}

/* Returns the identities of a call's tensors as a tuple. */
static Object identities_of(const Call *call) {
    Object identities = python.new_tuple(call->signature ? call->size : 0);
    for (int index = 0; identities && call->signature && index < call->size; index++)
        python.set_in_tuple(identities, index, kept(call->tensors[index].identity));
    return identities;
}

/* Puts a call on the thread's list of those that were entered, and sets its times. */
static void push(Call *call, int64_t number) {
    Object entered = call->forward->entered;
    int64_t depth = python.list_size(call->forward->stack);
    Borrowed parent = 0;
    for (intptr_t size; !parent && (size = python.list_size(entered));) {
        Borrowed last = python.in_list(entered, size - 1);
        if (python.as_number(python.in_tuple(last, ENTERED_DEPTH)) < depth)
            parent = last;
        else
            python.set_slice(entered, size - 1, size, 0); /* its forward raised */
    }
    call->times = new_times(call, parent);
    Object item = python.new_tuple(ENTERED_SIZE);
    if (item) {
        Object fields[] = {[ENTERED_SITE] = kept(call->site), [ENTERED_DEPTH] = python.new_whole(depth), [ENTERED_CALL] = python.new_whole(number),
                           [ENTERED_CONTEXT] = kept(call->forward->context), [ENTERED_TIMES] = kept(call->times),
                           [ENTERED_INPUTS] = identities_of(call)};
        for (int field = 0; field < ENTERED_SIZE; field++)
            python.set_in_tuple(item, field, fields[field]);
        python.append(entered, item);
        python.release(item);
    }
    python.clear_error();
}

/* Returns the call as it was entered; NULL if Python has entered it, or calls above it have raised. */
static Borrowed entered_call(const Call *call) {
    Object entered = call->forward->entered;
    intptr_t last = python.list_size(entered) - 1;
    Borrowed item = last < 0 ? 0 : python.in_list(entered, last);
    int is_it = item && python.in_tuple(item, ENTERED_SITE) == call->site &&
                python.in_tuple(item, ENTERED_CONTEXT) == call->forward->context &&
                !call->signature == (python.in_tuple(item, ENTERED_TIMES) == none);
    return is_it ? item : 0;
}

static int64_t count_this(const Call *call) { return count_call(call->forward->counts, call->forward->first, call->name); }

int observe_inputs(Object place, Object arguments, Object keywords) {
    Call call;
    if (!begin(&call, place))
        return 0;
    int recording = call.forward->recording != 0;
    if (recording && !(add_arguments(&call, arguments, keywords) && measure_all(&call, 1)))
        return 0;
    int64_t number = count_this(&call);
    if (recording)
        push(&call, number);
    enqueue(&call, number);
    return 1;
}

int observe_output(Object place, Object output) {
    Call call;
    if (!begin(&call, place))
        return 0;
    if (!call.forward->recording) {
        if (!call.inputs)
            count_this(&call); /* else it was counted when it was entered */
        return 1;
    }
    call.entered = call.inputs ? entered_call(&call) : 0;
    if ((call.inputs && !call.entered) || !(add_all(&call, output, objects.output_labels) && measure_all(&call, 0)))
        return 0;
    int64_t number;
    if (call.entered) {
        number = python.as_number(python.in_tuple(call.entered, ENTERED_CALL));
        if (call.signature) {
            call.times = kept(python.in_tuple(call.entered, ENTERED_TIMES));
            python.set_in_list(call.times, TIMES_EXIT, new_time());
        }
        intptr_t size = python.list_size(call.forward->entered);
        python.set_slice(call.forward->entered, size - 1, size, 0);
    } else
        number = count_this(&call);
    enqueue(&call, number);
    return 1;
}

/* enter(place, args, kwargs) -> True if the call that is about to run was counted and, in a step that is recorded, its tensors
 * are pending rows; None if nothing has happened. */
static Object enter(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 3 && observe_inputs(arguments[0], arguments[1], arguments[2]) ? kept(objects.handled) : kept(none);
}

/* leave(place, output) -> as `enter`, of a call that has run. */
static Object leave(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 2 && observe_output(arguments[0], arguments[1]) ? kept(objects.handled) : kept(none);
}

/* count_call(counts, first, name) -> the number of a call, which is counted: in one piece, as other threads may observe. */
static Object count_in_python(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 3 ? python.new_whole(count_call(arguments[0], arguments[1], arguments[2])) : kept(none);
}

/* -- called by native_functions.py -------------------------------------------------------------------------------------- */

/* Sets the objects that are compared with and stored, in the order below, and keeps them until it gets others: some are a session's. */
PUBLIC void observer_set_objects(const Object *array) {
    for (unsigned index = 0; index < sizeof objects / sizeof(Object); index++) {
        Object replaced = ((Object *)&objects)[index];
        python.keep(array[index]);
        ((Object *)&objects)[index] = array[index];
        if (replaced)
            python.release(replaced);
    }
}

/* Returns a function as a Python function: 0 enter, 1 leave, 2 count_call. */
PUBLIC Object observer_function(int index) {
    static const Definition definitions[] = {{"enter", enter, FASTCALL, 0},
                                             {"leave", leave, FASTCALL, 0},
                                             {"count_call", count_in_python, FASTCALL, 0}};
    return python.new_function(definitions + index, 0, 0);
}
