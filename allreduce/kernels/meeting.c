/* The rendezvous of a node's ranks in shared memory: allreduce/call/rendezvous.py describes it, and has the same in
 * Python. A short sum (allreduce/algorithms/shared.py) or MPI_Allreduce (native.py) is done with it.
 *
 * Python calls these functions as builtin functions, which takes a fifth of the time of a call by ctypes. Each takes the
 * number of the rendezvous and the array of the call, or None. They wait only some microseconds for a rank that is later
 * (100 where ranks outnumber cores), then Python waits. Functions that may take longer release the GIL. The few names of
 * Python's stable ABI that they need are declared here, so no header of Python is needed.
 */
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct _object PyObject;
extern PyObject *PyBool_FromLong(long value);
extern PyObject *PyLong_FromLong(long value);
extern void PyErr_SetObject(PyObject *type, PyObject *value);
extern void Py_DecRef(PyObject *object);
extern long long PyLong_AsLongLong(PyObject *number);
extern void *PyLong_AsVoidPtr(PyObject *number);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *thread);

#define SEQUENCE_MASK 3 /* of a fingerprint's bits for the number of the rendezvous: see allreduce/call/call.py */
#define POLLS 64 /* between two looks at the clock */
#define LONG_BYTES 65536 /* of a sum that releases the GIL */

typedef struct {
    int64_t *rows[2]; /* all ranks' fingerprints in calls of even and of odd numbers */
    int64_t rank, size, fingerprint;
    int64_t spin; /* nanoseconds; negative: so long, but the core is yielded between two polls */
} Meeting;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t number(const Meeting *meeting, int64_t sequence)
{
    return meeting->fingerprint | (sequence & SEQUENCE_MASK);
}

/* Whether this rank has entered this rendezvous before, and was told that another rank is late. */
static int entered(const Meeting *meeting, int64_t sequence)
{
    return meeting->rows[sequence & 1][meeting->rank] == number(meeting, sequence);
}

static int enter(const Meeting *meeting, int64_t sequence)
{
    int64_t *row = meeting->rows[sequence & 1], mine = number(meeting, sequence), end = 0;
    int yields = meeting->spin < 0;
    int64_t longest = yields ? -meeting->spin : meeting->spin;
    __atomic_store_n(row + meeting->rank, mine, __ATOMIC_RELEASE); /* after all that this rank has written before */
    for (int64_t rank = 0, polls = 1; rank < meeting->size; polls++) {
        if (__atomic_load_n(row + rank, __ATOMIC_ACQUIRE) == mine) {
            rank++;
            continue;
        }
        if (yields || polls % POLLS == 0) {
            int64_t here = now();
            end = end ? end : here + longest;
            if (here >= end)
                return 0;
        }
        if (yields) {
            sched_yield();
            continue;
        }
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("isb");
#endif
    }
    return 1;
}

/* Meet the other ranks in the rendezvous of this number. Returns whether all ranks are in the same call: False if one
 * is late. meeting: the address of a Meeting. */
PyObject *meet(PyObject *meeting, PyObject *const *arguments, ptrdiff_t count)
{
    (void)count;
    return PyBool_FromLong(enter(PyLong_AsVoidPtr(meeting), PyLong_AsLongLong(arguments[0])));
}

/* Return the address of a NumPy array's elements: PyArray_DATA of NumPy's C interface, the first field behind Python's,
 * of `header` bytes. */
static void *data(PyObject *array, int64_t header)
{
    return *(void **)((char *)array + header);
}

typedef struct {
    Meeting meeting;
    int64_t header; /* bytes of a PyObject */
    void (*sum)(const void *const *parts, size_t count, void *const *outs, size_t copies, size_t size, double scale);
    double scale;
    int64_t length, nbytes; /* elements that this rank sums, and bytes of the array */
} Head;

/* Do a call by `run`, without the GIL if it is long. call: the address of a struct that begins with a Head. */
static PyObject *run_call(int (*run)(const void *call, int64_t sequence, void *array), PyObject *call,
                          PyObject *const *arguments)
{
    const Head *head = PyLong_AsVoidPtr(call);
    int64_t sequence = PyLong_AsLongLong(arguments[0]), done;
    void *array = data(arguments[1], head->header);
    if (head->nbytes <= LONG_BYTES)
        return PyBool_FromLong(run(head, sequence, array));
    void *thread = PyEval_SaveThread();
    done = run(head, sequence, array);
    PyEval_RestoreThread(thread);
    return PyBool_FromLong(done);
}

typedef struct {
    Head head;
    int64_t copies; /* the number of `outs`; 0: the only one is the array of the call, and this rank's part is a copy */
    void *addresses[]; /* `outs`, then all ranks' parts in calls of even numbers, then in those of odd numbers */
} Sum;

static int enter_and_sum(const void *call, int64_t sequence, void *array)
{
    const Sum *sum = call;
    const Head *head = call;
    int64_t size = head->meeting.size, copies = sum->copies;
    void *const *outs = sum->addresses, *parts[size];
    memcpy(parts, outs + copies + size * (sequence & 1), sizeof parts);
    if (copies == 0) {
        outs = &array, copies = 1;
        if (!entered(&head->meeting, sequence)) /* else the other ranks may be reading the copy */
            memcpy(parts[head->meeting.rank], array, head->nbytes);
        parts[head->meeting.rank] = array; /* in this core's caches; the copy is for the other ranks */
    }
    if (!enter(&head->meeting, sequence))
        return 0;
    head->sum((const void *const *)parts, size, outs, copies, head->length, head->scale);
    return 1;
}

/* As `meet`; if all ranks are there, write the sum of their parts to `outs`. A rank that was told False calls it again
 * when all are there. call: the address of a Sum. */
PyObject *meet_and_sum(PyObject *call, PyObject *const *arguments, ptrdiff_t count)
{
    (void)count;
    return run_call(enter_and_sum, call, arguments);
}

typedef struct {
    Head head;
    int64_t begin, end; /* in bytes: the chunk of this rank, of `length` elements */
    char *rows[];       /* of all ranks, each for a copy of the rank's array without its chunk */
} Staging;

static int enter_and_stage(const void *call, int64_t sequence, void *given)
{
    const Staging *staging = call;
    const Head *head = call;
    char *array = given;
    int64_t size = head->meeting.size, rank = head->meeting.rank, begin = staging->begin, end = staging->end;
    void *places[size];
    if (!entered(&head->meeting, sequence)) { /* else the other ranks may have written sums into the copy */
        memcpy(staging->rows[rank], array, begin);
        memcpy(staging->rows[rank] + end, array + end, head->nbytes - end);
    }
    if (!enter(&head->meeting, sequence))
        return 0;
    for (int64_t each = 0; each < size; each++)
        places[each] = (each == rank ? array : staging->rows[each]) + begin;
    head->sum((const void *const *)places, size, places, size, head->length, head->scale);
    return 1;
}

/* As `meet`; if all ranks are there, write the sum of this rank's chunk to its array and to all copies. A rank that was
 * told False calls it again when all are there. call: the address of a Staging. */
PyObject *meet_and_stage(PyObject *call, PyObject *const *arguments, ptrdiff_t count)
{
    (void)count;
    return run_call(enter_and_stage, call, arguments);
}

typedef struct {
    Meeting meeting;
    int64_t header; /* bytes of a PyObject */
    /* MPI_Allreduce; MPI's handles are pointers or ints */
    int (*all_reduce)(const void *in_place, void *array, int length, intptr_t type, intptr_t op, intptr_t comm);
    const void *in_place;
    int64_t length, itemsize;
    intptr_t type, op, comm;
    double scale;    /* of a mean, of float or double; 1: nothing to multiply */
    PyObject *error; /* the exception of mpi4py */
} Reduction;

static int reduce(const Reduction *call, void *array)
{
    int error = call->all_reduce(call->in_place, array, (int)call->length, call->type, call->op, call->comm);
    if (error || call->scale == 1)
        return error;
    if (call->itemsize == sizeof(double)) {
        for (int64_t i = 0; i < call->length; i++)
            ((double *)array)[i] *= call->scale;
    } else {
        float scale = (float)call->scale;
        for (int64_t i = 0; i < call->length; i++)
            ((float *)array)[i] *= scale;
    }
    return 0;
}

/* As `meet`; if all ranks are there, MPI reduces their arrays. Raises the error of MPI. call: the address of a
 * Reduction. */
PyObject *meet_and_reduce(PyObject *call, PyObject *const *arguments, ptrdiff_t count)
{
    const Reduction *reduction = PyLong_AsVoidPtr(call);
    int64_t sequence = PyLong_AsLongLong(arguments[0]);
    void *array = data(arguments[1], reduction->header), *thread = PyEval_SaveThread();
    int met = enter(&reduction->meeting, sequence), error = met ? reduce(reduction, array) : 0;
    (void)count;
    PyEval_RestoreThread(thread);
    if (error == 0)
        return PyBool_FromLong(met);
    PyObject *code = PyLong_FromLong(error);
    PyErr_SetObject(reduction->error, code);
    Py_DecRef(code);
    return NULL;
}
