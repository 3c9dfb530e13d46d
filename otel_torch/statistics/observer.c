/* The way of an ordinary call from torch's hooks to its pending rows, with no line of Python in between.
 *
 * Python takes 20 µs and more for it once a model's own code has filled the processor's caches, however lean it is: it touches
 * some hundred objects. This touches about ten. It does what `on_inputs` and `on_output` of activations.py specify, for calls
 * that need nothing else: a module of one name, arguments and outputs that are plain CPU tensors with finite numbers, and a
 * thread that began the model's newest forward. Any other call is left to them before anything has changed.
 */

#include <string.h>
#include <time.h>

#include "native.h"

enum { MAX_TENSORS = 16, NO_BACKWARD = -1 };

/* What the model's newest forward means for its calls; forward_state.py writes it. */
typedef struct {
    int64_t thread;     /* that began the forward; its calls are named by it */
    int64_t number;     /* of the forward; no two have the same */
    int64_t recording;  /* whether its step is recorded */
    int64_t recognizes; /* whether torch counts all changes of tensors in place */
    Borrowed context;   /* Python's ForwardContext */
    Borrowed counts;    /* dict: how many calls of each module were counted in its step */
    Borrowed first;     /* dict: where the numbers of a module begin, if not at 0 */
    Borrowed stack;     /* list: the module calls that the thread is in */
    Borrowed entered;   /* list: those whose inputs were observed, as (site, depth, number or Python's call, context) */
} Forward;

/* the fields of a place, a tuple: address of `Forward`, site, its names, queue of pending rows, wanted numbers, and whether
 * inputs are observed, so that tensors may be recognized */
enum { FORWARD, PLACE_SITE, NAMES, QUEUE, WANTED, INPUTS };

/* A call as it is observed: where, and the tensors found so far. */
typedef struct {
    const Forward *forward;
    Borrowed site, name, queue;
    int64_t wanted;
    int inputs, recognizes, size;
    struct {
        Readable readable;
        Borrowed tensor, label;
        Object row;
    } tensors[MAX_TENSORS];
} Call;

static Object site_type, tuple_type, graph_task, version_name, handled;
/* types of values without tensors; labels of an output and of its items, of positional arguments, and by keyword */
static Object plain_types, output_labels, argument_labels, keyword_labels, make_keyword_labels;

static Object left_to_python(void) {
    python.keep(none);
    return none;
}

static Object was_handled(void) {
    python.keep(handled);
    return handled;
}

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
    Object task = python.call(graph_task, (Object)0);
    int is_inside = !task || python.as_number(task) != NO_BACKWARD;
    if (task)
        python.release(task);
    return is_inside;
}

/* Begins a call; returns 0 to leave it to Python. */
static int begin(Call *call, Object place) {
    if (place == none)
        return 0;
    Borrowed names = python.in_tuple(place, NAMES);
    call->site = python.in_tuple(place, PLACE_SITE);
    if (type_of(call->site) != site_type || python.list_size(names) != 1)
        return 0; /* which name, and of which model, depends on the calls around it */
    call->name = python.in_tuple(python.in_list(names, 0), 0);
    call->forward = (const Forward *)(uintptr_t)python.as_number(python.in_tuple(place, FORWARD));
    call->queue = python.in_tuple(place, QUEUE);
    call->wanted = python.as_number(python.in_tuple(place, WANTED));
    call->inputs = (int)python.as_number(python.in_tuple(place, INPUTS));
    call->recognizes = call->forward->recognizes && call->inputs;
    call->size = 0;
    return call->forward->thread == (int64_t)python.thread() && !in_backward();
}

/* -- tensors ---------------------------------------------------------------------------------------------------------- */

static int is_plain(Object type) {
    for (intptr_t index = 0; index < python.tuple_size(plain_types); index++)
        if (python.in_tuple(plain_types, index) == type)
            return 1;
    return 0;
}

/* Adds a tensor to a call, or passes over a value without tensors; returns 0 for anything else. */
static int add(Call *call, Object value, Borrowed label) {
    Object type = type_of(value);
    if (type != tensor_type && type != parameter_type)
        return is_plain(type);
    if (call->size == MAX_TENSORS || !describe_readable(value, call->wanted, &call->tensors[call->size].readable))
        return 0;
    call->tensors[call->size].tensor = value;
    call->tensors[call->size++].label = label;
    return 1;
}

/* Adds the tensors of a value or flat tuple; returns 0 for anything else. `labels`: of the value, then of the items. */
static int add_all(Call *call, Object value, Object labels) {
    if (type_of(value) != tuple_type)
        return add(call, value, python.in_tuple(labels, 0));
    intptr_t size = python.tuple_size(value);
    int added = size < python.tuple_size(labels);
    for (intptr_t index = 0; added && index < size; index++)
        added = add(call, python.in_tuple(value, index), python.in_tuple(labels, 1 + index));
    return added;
}

static int add_arguments(Call *call, Object arguments, Object keywords) {
    intptr_t size = python.tuple_size(arguments), position = 0;
    int added = size <= python.tuple_size(argument_labels);
    for (intptr_t index = 0; added && index < size; index++)
        added = add_all(call, python.in_tuple(arguments, index), python.in_tuple(argument_labels, index));
    Borrowed key, value;
    while (added && python.next_in_dict(keywords, &position, &key, &value)) {
        Borrowed labels = python.in_dict(keyword_labels, key);
        if (!labels) {
            Object made = python.call(make_keyword_labels, key, (Object)0); /* which puts them into `keyword_labels` */
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

/* -- recognizing: a module's output is the next module's input, and is measured once ------------------------------------ */

enum { RECENT = 16, RECOGNIZE_MIN = 1 << 15 }; /* elements; as in tensor_measurer.py */

typedef struct {
    Borrowed tensor;       /* alive if `reference` refers to it */
    Object reference, row; /* owned */
    int64_t version, forward;
} Recent;

static Recent recent[RECENT];
static int newest;

static int is_alive(const Recent *entry) {
    Object tensor = python.call(entry->reference, (Object)0);
    if (tensor)
        python.release(tensor);
    return tensor == entry->tensor;
}

/* Returns how often a tensor was changed in place; -1 if that is not counted. */
static int64_t version_of(Object tensor) {
    Object number = python.attribute(tensor, version_name);
    if (!number) {
        python.clear_error();
        return -1;
    }
    int64_t version = python.as_number(number);
    python.release(number);
    return version;
}

/* Returns the row of a tensor that was measured in this forward and has not changed since; NULL if there is none. */
static Borrowed recognize(Object tensor, const Forward *forward) {
    for (int index = 0; index < RECENT; index++)
        if (recent[index].tensor == tensor && recent[index].forward == forward->number)
            return is_alive(recent + index) && recent[index].version == version_of(tensor) ? recent[index].row : 0;
    return 0;
}

static void remember(Object tensor, Object row, const Forward *forward) {
    int64_t version = version_of(tensor);
    Object reference = version < 0 ? 0 : python.new_weak_reference(tensor, 0);
    if (!reference) {
        python.clear_error();
        return;
    }
    int index = 0;
    while (index < RECENT && recent[index].tensor != tensor)
        index++;
    if (index == RECENT)
        index = newest = (newest + 1) % RECENT;
    Object replaced[] = {recent[index].reference, recent[index].row};
    python.keep(row);
    recent[index].tensor = tensor, recent[index].reference = reference, recent[index].row = row;
    recent[index].version = version, recent[index].forward = forward->number;
    for (int item = 0; item < 2; item++)
        if (replaced[item])
            python.release(replaced[item]);
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

/* Measures the tensors of a call; returns 0, with nothing left over, if Python has to. `entering`: they may be recognized. An
 * output is measured in any case, because a kernel of the program may have changed an input in place, uncounted. */
static int measure_all(Call *call, int entering) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    int64_t now = 1000000000ll * time.tv_sec + time.tv_nsec;
    for (int index = 0; index < call->size; index++) {
        Object tensor = call->tensors[index].tensor;
        /* a weak reference to a parameter would forbid torch to swap it */
        int worth = call->recognizes && call->tensors[index].readable.numel >= RECOGNIZE_MIN && type_of(tensor) == tensor_type;
        Borrowed known = worth && entering ? recognize(tensor, call->forward) : 0;
        Object row = known ? copied(known, now) : measured(&call->tensors[index].readable, now);
        if (!row) {
            python.clear_error();
            while (index--)
                python.release(call->tensors[index].row);
            return 0;
        }
        if (worth && !known)
            remember(tensor, row, call->forward);
        call->tensors[index].row = row;
    }
    return 1;
}

/* Adds (site, name, label, context, row) for each tensor to the pending rows. */
static void enqueue(const Call *call, int64_t number) {
    for (int index = 0; index < call->size; index++) {
        Object row = call->tensors[index].row, label = call->tensors[index].label, item = python.new_tuple(FIELDS);
        Object fields[FIELDS] = {
            [SITE] = call->site, [NAME] = call->name, [LABEL] = label, [CONTEXT] = call->forward->context, [ROW] = row};
        ((Header *)python.bytes(row))->call = (int32_t)number;
        for (int field = 0; item && field < FIELDS; field++) {
            if (field != ROW)
                python.keep(fields[field]);
            python.set_in_tuple(item, field, fields[field]);
        }
        if (!item || python.append(call->queue, item))
            python.clear_error();
        python.release(item ? item : row);
    }
}

/* -- observing -------------------------------------------------------------------------------------------------------- */

/* Puts a call on the thread's list of those that were entered; returns whether it is there. */
static int push(const Call *call, int64_t number) {
    Object entered = call->forward->entered;
    int64_t depth = python.list_size(call->forward->stack);
    for (intptr_t size; (size = python.list_size(entered));) { /* drop those whose forward raised */
        Borrowed last = python.in_list(entered, size - 1);
        if (python.as_number(python.in_tuple(last, 1)) < depth)
            break;
        python.set_slice(entered, size - 1, size, 0);
    }
    Object item = python.new_tuple(4);
    if (!item)
        return 0;
    python.keep(call->site);
    python.keep(call->forward->context);
    python.set_in_tuple(item, 0, call->site);
    python.set_in_tuple(item, 1, python.new_whole(depth));
    python.set_in_tuple(item, 2, python.new_whole(number));
    python.set_in_tuple(item, 3, call->forward->context);
    int failed = python.append(entered, item);
    python.release(item);
    return !failed;
}

/* Returns the call as it was entered; NULL if Python has entered it, or calls above it have raised. */
static Borrowed entered_call(const Call *call) {
    Object entered = call->forward->entered;
    intptr_t last = python.list_size(entered) - 1;
    Borrowed item = last < 0 ? 0 : python.in_list(entered, last);
    return item && python.in_tuple(item, 0) == call->site && python.in_tuple(item, 3) == call->forward->context ? item : 0;
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
    if (recording && !push(&call, number))
        python.clear_error();
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
    Borrowed entered = call.inputs ? entered_call(&call) : 0;
    if ((call.inputs && !entered) || !(add_all(&call, output, output_labels) && measure_all(&call, 0)))
        return 0;
    int64_t number = entered ? python.as_number(python.in_tuple(entered, 2)) : count_this(&call);
    if (entered) {
        intptr_t size = python.list_size(call.forward->entered);
        python.set_slice(call.forward->entered, size - 1, size, 0);
    }
    enqueue(&call, number);
    return 1;
}

/* enter(place, args, kwargs) -> True if the call that is about to run was counted and, in a step that is recorded, its tensors
 * are pending rows; None if nothing has happened. */
static Object enter(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 3 && observe_inputs(arguments[0], arguments[1], arguments[2]) ? was_handled() : left_to_python();
}

/* leave(place, output) -> as `enter`, of a call that has run. */
static Object leave(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 2 && observe_output(arguments[0], arguments[1]) ? was_handled() : left_to_python();
}

/* count_call(counts, first, name) -> the number of a call, which is counted: in one piece, as other threads may observe. */
static Object count_in_python(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    return count == 3 ? python.new_whole(count_call(arguments[0], arguments[1], arguments[2])) : left_to_python();
}

/* -- called by native_functions.py -------------------------------------------------------------------------------------- */

/* Sets the objects that are compared with and stored, in the order below; keeps them forever. */
PUBLIC void observer_set_objects(const Object *objects) {
    Object *places[] = {&site_type,     &tuple_type,      &graph_task,     &version_name,        &handled,
                        &plain_types,   &output_labels,   &argument_labels, &keyword_labels, &make_keyword_labels};
    for (unsigned index = 0; index < sizeof places / sizeof *places; index++) {
        python.keep(objects[index]);
        *places[index] = objects[index];
    }
}

/* Returns a function as a Python function: 0 enter, 1 leave, 2 count_call. */
PUBLIC Object observer_function(int index) {
    static const Definition definitions[] = {{"enter", enter, FASTCALL, 0},
                                             {"leave", leave, FASTCALL, 0},
                                             {"count_call", count_in_python, FASTCALL, 0}};
    return python.new_function(definitions + index, 0, 0);
}
