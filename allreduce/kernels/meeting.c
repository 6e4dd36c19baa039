/* The rendezvous of a node's ranks in shared memory: allreduce/call/rendezvous.py describes it, and has the same in
 * Python. A short sum (allreduce/algorithms/shared.py) is done with it.
 *
 * Python calls these functions as builtin functions, which takes a fifth of the time of a call by ctypes. The few names
 * of Python's stable ABI that they need are declared here, so no header of Python is needed. They return
 * within some microseconds, because Python waits for a rank that is later, and hold the GIL, but for longer sums.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct _object PyObject;
extern PyObject *PyBool_FromLong(long value);
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
    int64_t spin; /* nanoseconds */
} Meeting;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int enter(const Meeting *meeting, int64_t sequence)
{
    int64_t *row = meeting->rows[sequence & 1], mine = meeting->fingerprint | (sequence & SEQUENCE_MASK), end = 0;
    __atomic_store_n(row + meeting->rank, mine, __ATOMIC_RELEASE); /* after all that this rank has written before */
    for (int64_t rank = 0, polls = 1; rank < meeting->size; polls++) {
        if (__atomic_load_n(row + rank, __ATOMIC_ACQUIRE) == mine) {
            rank++;
            continue;
        }
        if (meeting->spin == 0)
            return 0;
        if (polls % POLLS == 0) {
            int64_t here = now();
            end = end ? end : here + meeting->spin;
            if (here >= end)
                return 0;
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
PyObject *meet(PyObject *meeting, PyObject *number)
{
    return PyBool_FromLong(enter(PyLong_AsVoidPtr(meeting), PyLong_AsLongLong(number)));
}

typedef struct {
    Meeting meeting;
    void (*sum)(const void *const *parts, size_t count, void *const *outs, size_t copies, size_t size, double scale);
    double scale;
    int64_t length, nbytes;
    int64_t staged; /* whether this rank's part is a copy of its array, the only one of `outs` */
    int64_t copies; /* the number of `outs` */
    void *addresses[]; /* `outs`, then all ranks' parts in calls of even numbers, then in those of odd numbers */
} Sum;

static int enter_and_sum(const Sum *sum, int64_t sequence)
{
    int64_t size = sum->meeting.size;
    void *const *outs = sum->addresses, *const *parts = outs + sum->copies + size * (sequence & 1);
    if (sum->staged)
        memcpy(parts[sum->meeting.rank], outs[0], sum->nbytes);
    if (!enter(&sum->meeting, sequence))
        return 0;
    sum->sum((const void *const *)parts, size, outs, sum->copies, sum->length, sum->scale);
    return 1;
}

/* As `meet`; if all ranks are there, write the sum of their parts to `outs`. A rank that was told False calls it again
 * when all are there. call: the address of a Sum. */
PyObject *meet_and_sum(PyObject *call, PyObject *number)
{
    const Sum *sum = PyLong_AsVoidPtr(call);
    int64_t sequence = PyLong_AsLongLong(number), done;
    if (sum->nbytes <= LONG_BYTES)
        return PyBool_FromLong(enter_and_sum(sum, sequence));
    void *thread = PyEval_SaveThread();
    done = enter_and_sum(sum, sequence);
    PyEval_RestoreThread(thread);
    return PyBool_FromLong(done);
}
