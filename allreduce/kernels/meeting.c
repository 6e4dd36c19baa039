/* The rendezvous of a node's ranks in shared memory: allreduce/call/rendezvous.py describes it, and has the same in Python.
 *
 * Python calls these functions as builtin functions, which takes a fifth of the time of a call by ctypes. The few names
 * of Python's stable ABI that they need are declared here, so no header of Python is needed. They hold the GIL, and
 * return within some microseconds; Python waits for a rank that is later.
 */
#include <stdint.h>
#include <time.h>

typedef struct _object PyObject;
extern PyObject *PyBool_FromLong(long value);
extern long long PyLong_AsLongLong(PyObject *number);
extern void *PyLong_AsVoidPtr(PyObject *number);

#define SEQUENCE_MASK 3 /* of a fingerprint's bits for the number of the rendezvous: see allreduce/call/call.py */
#define POLLS 64 /* between two looks at the clock */

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
