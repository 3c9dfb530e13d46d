/* Calls a module as torch does if its hooks are ours alone, without torch's way for hooks.
 *
 * `nn.Module._call_impl` takes some 4 µs longer for a module that has a hook, and the hook's own way to the observer 4 more: six
 * Python calls, a closure, copies of arguments and of tables. Here the forward is called between the two functions of observer.c.
 * Each call asks torch's own tables whether there is anything else to do; then it is left to torch.
 */

#include "native.h"

static CallObjects objects; /* set by native_functions.py */

/* Returns an attribute that its object keeps; NULL if there is none. */
static Borrowed kept_attribute(Object object, Object name) {
    Object attribute = python.attribute(object, name);
    if (attribute)
        python.release(attribute);
    else
        python.clear_error();
    return attribute;
}

static int is_empty(Object attributes, Object name) {
    Borrowed table = python.in_dict(attributes, name);
    return table && !python.dict_size(table);
}

static int has_global_hooks(void) {
    for (intptr_t index = 0; index < python.tuple_size(objects.global_tables); index++)
        if (python.dict_size(python.in_tuple(objects.global_tables, index)))
            return 1;
    return 0;
}

static int is_traced(void) {
    Object state = python.call(objects.tracing_state, (Object)0);
    int traced = state != none;
    if (state)
        python.release(state);
    else
        python.clear_error();
    return traced;
}

/* Returns our only hook in a table of torch, of the class `list`; NULL if there is another one, or none. */
static Borrowed only_hook(Object attributes, Object name, Object list) {
    Borrowed table = python.in_dict(attributes, name), key, callable;
    intptr_t position = 0;
    if (!table || python.dict_size(table) != 1 || !python.next_in_dict(table, &position, &key, &callable) || type_of(callable) != list)
        return 0;
    Borrowed hooks = kept_attribute(callable, objects.hooks), post_calls = kept_attribute(callable, objects.post_calls);
    return hooks && post_calls && python.tuple_size(hooks) == 1 && !python.tuple_size(post_calls) ? python.in_tuple(hooks, 0) : 0;
}

/* Returns the observer of a module without any other hooks, whose call is not special for torch; NULL otherwise. */
static Borrowed observer_of(Object module, Object attributes) {
    Borrowed observer = only_hook(attributes, objects.after, objects.after_list);
    int inputs = observer && type_of(observer) == objects.input_observer;
    int ordinary = observer && (inputs || type_of(observer) == objects.output_observer) &&
                   (inputs ? only_hook(attributes, objects.before, objects.before_list) == observer
                           : is_empty(attributes, objects.before)) &&
                   is_empty(attributes, objects.backward) && is_empty(attributes, objects.before_backward) &&
                   !python.in_dict(attributes, objects.compiled) && !python.in_dict(attributes, objects.call) &&
                   kept_attribute(type_of(module), objects.call) == objects.own_call && !has_global_hooks() && !is_traced();
    return ordinary ? observer : 0;
}

/* Returns a module's forward; without the code that direct_forwards.py has put around the program's own. */
static Object forward_of(Object module) {
    Object forward = python.attribute(module, objects.forward);
    if (!forward || type_of(forward) != objects.method_type || kept_attribute(forward, objects.bound_to) != module)
        return forward;
    Borrowed function = kept_attribute(forward, objects.function), own = python.in_dict(objects.own_forwards, function);
    for (intptr_t index = 0; own && index < python.tuple_size(objects.own_names); index++)
        if (kept_attribute(function, python.in_tuple(objects.own_names, index)) != python.in_tuple(own, 1 + index))
            own = 0; /* the program has changed it */
    if (!own)
        return forward;
    python.release(forward);
    return python.call(objects.method_type, python.in_tuple(own, 0), module, (Object)0);
}

/* Releases the result of a Python function that returns nothing; returns whether it raised. */
static int raised(Object result) {
    if (result)
        python.release(result);
    return !result;
}

/* Runs the forward between the two observations; takes over `forward`. */
static Object run(Object observer, Object module, Object attributes, Stolen forward, Object arguments, Object keywords) {
    Borrowed place = kept_attribute(observer, objects.place);
    int inputs = type_of(observer) == objects.input_observer;
    Object output = 0;
    if (!inputs || observe_inputs(place, arguments, keywords) ||
        !raised(python.call(objects.observe_inputs_in_python, observer, arguments, keywords, (Object)0)))
        output = python.call_with(forward, arguments, keywords);
    python.release(forward);
    if (!output)
        return 0;
    if (only_hook(attributes, objects.after, objects.after_list) != observer || has_global_hooks()) { /* they changed meanwhile */
        Object result = python.call(objects.run_hooks, module, arguments, keywords, output, (Object)0);
        python.release(output);
        return result;
    }
    if (!observe_output(place, output) && raised(python.call(objects.observe_output_in_python, observer, output, (Object)0))) {
        python.release(output);
        return 0;
    }
    return output;
}

/* call_module(module, args, kwargs) -> the output, or `left_to_torch` if nothing has happened. */
static Object call_module(Object self, const Object *arguments, intptr_t count) {
    (void)self;
    Object module = arguments[0], attributes = count == 3 ? python.attributes(module, 0) : 0;
    Borrowed observer = attributes ? observer_of(module, attributes) : 0;
    Object forward = observer ? forward_of(module) : 0, output;
    if (forward) {
        python.keep(observer);
        output = run(observer, module, attributes, forward, arguments[1], arguments[2]);
        python.release(observer);
    } else {
        python.clear_error();
        output = objects.left_to_torch;
        python.keep(output);
    }
    if (attributes)
        python.release(attributes);
    return output;
}

/* -- called by native_functions.py --------------------------------------------------------------------------------------- */

/* Sets the objects above; keeps them forever. */
PUBLIC void module_call_set_objects(const Object *array) {
    for (unsigned index = 0; index < sizeof objects / sizeof(Object); index++) {
        python.keep(array[index]);
        ((Object *)&objects)[index] = array[index];
    }
}

PUBLIC Object module_call_function(void) {
    static const Definition definition = {"call_module", call_module, FASTCALL, 0};
    return python.new_function(&definition, 0, 0);
}
