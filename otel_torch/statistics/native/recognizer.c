/* Recognizes tensors: a module's output is the next module's input.
 *
 * The newest tensors are kept with what is known of each: its row, or in a parity recording its identity. A tensor is the same as
 * long as its object lives, its memory begins at the same address, and torch has counted no change in place.
 */

#include "native.h"

enum { RECENT = 16 };

typedef struct {
    Borrowed tensor;         /* alive if `reference` refers to it */
    Object reference, known; /* owned */
    const void *data;
    int64_t version, forward;
} Recent;

static Recent recent[RECENT];
static int newest;
static Object version_name;

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

int is_recognizable(Object tensor) { return type_of(tensor) == tensor_type; }

Borrowed recognize(Object tensor, const Readable *readable, int64_t forward) {
    for (int index = 0; index < RECENT; index++) {
        const Recent *entry = recent + index;
        if (entry->tensor == tensor && entry->forward == forward)
            return entry->data == readable->tensor.data && is_alive(entry) && entry->version == version_of(tensor) ? entry->known : 0;
    }
    return 0;
}

void remember(Object tensor, const Readable *readable, Object known, int64_t forward) {
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
    Object replaced[] = {recent[index].reference, recent[index].known};
    python.keep(known);
    recent[index] = (Recent){tensor, reference, known, readable->tensor.data, version, forward};
    for (int item = 0; item < 2; item++)
        if (replaced[item])
            python.release(replaced[item]);
}

/* -- called by native_functions.py -------------------------------------------------------------------------------------- */

/* Sets the name of the attribute of a tensor that counts changes in place; keeps it forever. */
PUBLIC void recognizer_set_version_name(Object name) {
    python.keep(name);
    version_name = name;
}
