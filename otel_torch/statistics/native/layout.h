/* Made by native_layout.py from its table: do not edit. */

#pragma once

/* the numbers of a measured tensor; row_layout.py */
enum { MIN, MAX, SUM, SQUARES, MAGNITUDES, NONFINITE, ZEROS };

/* the bytes of a line's plan; compact_rows.py */
enum { STATISTIC_ABS_MEAN, STATISTIC_SUM, STATISTIC_MIN, STATISTIC_MAX, STATISTIC_MEAN, STATISTIC_STD, STATISTIC_RMS, STATISTIC_L2, STATISTIC_NONFINITE, STATISTIC_ZEROS, STATISTIC_NUMEL, STATISTIC_SHAPE, STATISTIC_DTYPE, STATISTIC_SKETCH, STATISTIC_SIZE };

/* a pending row; compact_records.py */
enum { ROW_SITE, ROW_NAME, ROW_LABEL, ROW_CONTEXT, ROW_DATA, ROW_IDENTITY, ROW_SIGNATURE, ROW_TIMES, ROW_VALUE, ROW_STORAGE, ROW_IS_NEW, ROW_SIZE };

/* a call by the clock of calls: when it was entered and left, and its parent entered */
enum { TIMES_ENTRY, TIMES_EXIT, TIMES_PARENT, TIMES_SIZE };

/* `ModulePlace` of native_observer.py */
enum { PLACE_FORWARD, PLACE_SITE, PLACE_NAMES, PLACE_QUEUE, PLACE_WANTED, PLACE_INPUTS, PLACE_MODULE, PLACE_MODULE_CLASS, PLACE_SIGNATURE, PLACE_SIZE };

/* `EnteredCall` of call_stack.py */
enum { ENTERED_SITE, ENTERED_DEPTH, ENTERED_CALL, ENTERED_CONTEXT, ENTERED_TIMES, ENTERED_INPUTS, ENTERED_SIZE };

/* how many fields a pending row has outside of parity recordings, and in one */
enum { PLAIN_FIELDS = 5, PARITY_FIELDS = 8 };

/* what a model's newest forward means for its calls; forward_state.py */
typedef struct {
    int64_t thread; /* that began the forward; its calls are named by it */
    int64_t number; /* of the forward; no two have the same */
    int64_t recording; /* whether its step is recorded */
    int64_t recognizes; /* whether its tensors may be recognized: torch counts what changes them */
    Borrowed context; /* Python's ForwardContext */
    Borrowed counts; /* dict: how many calls of each module were counted in its step */
    Borrowed first; /* dict: where the numbers of a module begin, if not at 0 */
    Borrowed stack; /* list: the module calls that the thread is in */
    Borrowed entered; /* list: those whose inputs were observed, each an `EnteredCall` */
} Forward;

/* native_observer.py */
typedef struct {
    Object site_type; /* class of a module's place; its subclasses are Python's */
    Object tuple_type; /* class */
    Object bytes_type; /* class */
    Object graph_task; /* function: the number of the backward pass that the thread is in */
    Object handled; /* what tells Python that the call was observed */
    Object plain_types; /* tuple: types of values without tensors */
    Object output_labels; /* tuple: labels of an output and of its items */
    Object argument_labels; /* tuple: such a tuple for each positional argument */
    Object keyword_labels; /* dict: such a tuple by keyword */
    Object make_keyword_labels; /* function: adds one */
    Object identify; /* function: the identity of a tensor */
    Object next_index; /* function: the clock of calls */
    Object measurement_name; /* an identity's attribute */
    Object is_counted_name; /* an identity's attribute */
} ObserverObjects;

/* module_call.py */
typedef struct {
    Object left_to_torch; /* what stands for an output of a call that is left to torch */
    Object output_observer; /* class of hooks */
    Object input_observer; /* class of hooks */
    Object before_list; /* class of what torch has for all our hooks before a module's forward */
    Object after_list; /* the same after it */
    Object hooks; /* attribute of ours */
    Object post_calls; /* attribute of ours */
    Object place; /* attribute of ours */
    Object before; /* torch's table of a module's hooks */
    Object after; /* torch's table of a module's hooks */
    Object backward; /* torch's table of a module's hooks */
    Object before_backward; /* torch's table of a module's hooks */
    Object compiled; /* attribute of a module */
    Object forward; /* attribute of a module */
    Object call; /* attribute of a module */
    Object own_call; /* that of nn.Module */
    Object global_tables; /* tuple of torch's tables of hooks of all modules */
    Object method_type; /* class of bound methods */
    Object function; /* attribute of a bound method */
    Object bound_to; /* attribute of a bound method */
    Object own_forwards; /* dict: by function, an `OwnForward` of direct_forwards.py */
    Object own_names; /* tuple: attributes that the function must have, after the first field */
    Object tracing_state; /* function: a graph is traced by torch.jit if it returns anything */
    Object observe_inputs_in_python; /* function */
    Object observe_output_in_python; /* function */
    Object run_hooks; /* function: calls all hooks that a module has after its forward */
} CallObjects;
