/* Communicators that nobody will come back to: a thread ends with a group of their calls open, or they are forgotten.
 */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"

#include <stdio.h>

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t thread_ends;
static _Atomic bool unprepared;

/* What is in the group does not come to its end, and other ranks may wait for it. */
static void end_groups(void *left) {
  even_device_comm *comm = left;
  if (even_device_is_inherited(comm)) {
    return;
  }
  even_error why = {.status = EVEN_ERR_STATE, .rank = even_device_number(comm, comm->rank)};
  (void)snprintf(why.what, sizeof why.what,
                 "a thread of rank %d of %d (cuda:%d) has ended with a group of this communicator's calls open",
                 why.rank, comm->ranks, comm->device);
  (void)snprintf(why.fix, sizeof why.fix, "end the group on the thread that began it, also where a call in it fails");
  even_device_end(comm, &why, true);
  even_device_drop_groups(comm);
}

static void prepare(void) {
  atomic_store(&unprepared, pthread_key_create(&thread_ends, end_groups) != 0);
}

void even_device_end_with_thread(even_device_comm *comm) {
  (void)pthread_once(&prepared, prepare);
  if (!atomic_load(&unprepared)) {
    (void)pthread_setspecific(thread_ends, comm);
  }
}

bool even_device_let_go(even_device_comm *comm) {
  return atomic_fetch_sub(&comm->holders, 1) == 1;
}

void even_device_forget(even_device_comm *comm) {
  if (even_device_is_inherited(comm)) {
    return;
  }
  even_device_comm_abort(comm);
  even_device_comm_go_beside(comm, NULL);
  (void)pthread_mutex_lock(&comm->track);
  even_free(comm->recording);
  comm->recording = NULL;
  (void)pthread_mutex_unlock(&comm->track);
  if (even_device_in_group(comm) || even_device_let_go(comm)) { /* a close ends this thread's own group */
    (void)even_device_comm_close(comm);
  }
}
