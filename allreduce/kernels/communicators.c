/* Open MPI 5 marks the communicators of a failed rank as revoked (ompi_comm_revoke_local). It crashes if one of them is
 * still being created: the communicator is in the table of all communicators already, and its collectives, which are
 * to be told, are selected last. The functions here stand in front of Open MPI's own ones of the same name, if this
 * library is loaded before MPI with RTLD_GLOBAL (allreduce/process/start.py). They put a revocation off until the
 * communicator has been created.
 *
 * complete: communicators with collectives. late: communicators that are being created, and have been revoked. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
    void **items;
    int count, room;
} set;

static set complete, late, late_entirely; /* late_entirely: not only for collectives */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static int find(const set *all, const void *item) {
    int at = all->count;
    while (--at >= 0 && all->items[at] != item) {}
    return at;
}

static bool add(set *all, void *item) { /* false if it is there already, or if there is no memory */
    if (find(all, item) >= 0) return false;
    if (all->count == all->room) {
        int room = all->room ? 2 * all->room : 64;
        void **items = realloc(all->items, room * sizeof *items);
        if (!items) return false;
        all->items = items;
        all->room = room;
    }
    all->items[all->count++] = item;
    return true;
}

static bool take(set *all, const void *item) { /* whether it was there */
    int at = find(all, item);
    if (at >= 0) all->items[at] = all->items[--all->count];
    return at >= 0;
}

static void *real(const char *name) {
    return dlsym(dlopen("libmpi.so.40", RTLD_NOW | RTLD_NOLOAD), name);
}

static void begins(void *comm) { /* at this address another communicator may have been given up */
    pthread_mutex_lock(&guard);
    take(&late, comm);
    take(&late_entirely, comm);
    pthread_mutex_unlock(&guard);
}

int ompi_comm_nextcid(void *comm, void *parent, void *bridge, const void *a, const void *b, bool first, int mode) {
    int (*call)(void *, void *, void *, const void *, const void *, bool, int) = real(__func__);
    begins(comm);
    return call(comm, parent, bridge, a, b, first, mode);
}

int ompi_comm_nextcid_nb(
    void *comm, void *parent, void *bridge, const void *a, const void *b, bool first, int mode, void **request) {
    int (*call)(void *, void *, void *, const void *, const void *, bool, int, void **) = real(__func__);
    begins(comm);
    return call(comm, parent, bridge, a, b, first, mode, request);
}

bool ompi_comm_revoke_local(void *comm, bool only_collectives) {
    bool (*call)(void *, bool) = real(__func__);
    pthread_mutex_lock(&guard);
    bool ready = !complete.count || find(&complete, comm) >= 0; /* none: MPI was loaded before this library */
    bool new = !ready && add(only_collectives ? &late : &late_entirely, comm);
    pthread_mutex_unlock(&guard);
    return ready ? call(comm, only_collectives) : new;
}

int mca_coll_base_comm_select(void *comm) {
    int (*call)(void *) = real(__func__);
    int code = call(comm);
    pthread_mutex_lock(&guard);
    if (!code) add(&complete, comm);
    bool collectives = take(&late, comm), entirely = take(&late_entirely, comm);
    pthread_mutex_unlock(&guard);
    if (!code && (collectives || entirely)) ompi_comm_revoke_local(comm, !entirely);
    return code;
}

int mca_coll_base_comm_unselect(void *comm) {
    int (*call)(void *) = real(__func__);
    pthread_mutex_lock(&guard);
    take(&complete, comm);
    pthread_mutex_unlock(&guard);
    return call(comm);
}
