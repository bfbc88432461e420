/* A thread that makes a rank's calls between hosts while the rank itself is in calls inside its host. */
#ifndef EVEN_COMM_HOSTS_CARRIER_H
#define EVEN_COMM_HOSTS_CARRIER_H

#include <evenstep/comm.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef even_status even_carrier_work(void *context);

/* Zeroed: none has been started. One rank's thread uses it, and the carrier's own. */
typedef struct even_carrier {
  bool started;
  uint32_t process_mark; /* a child of a fork has no such thread */
  pthread_t thread;
  pthread_mutex_t lock; /* over what follows */
  pthread_cond_t changed;
  even_carrier_work *work; /* NULL: there is none */
  void *context;
  even_comm *comm;         /* in which it makes its calls */
  _Atomic uint32_t steps;  /* grows with `done`, and when the work is; a futex */
  _Atomic uint32_t allows; /* grows with `allowed`, and when it is stopped */
  size_t done;             /* of the work under way, or the last: pieces */
  size_t allowed;          /* pieces that may be carried, where the work asks */
  bool stopped;            /* none any more */
  bool closing;
  even_status status; /* of the last work, and why */
  even_error why;
} even_carrier;

/* Gives it work, whose calls are in `comm`; the thread is started where there is none yet. */
even_status even_carrier_begin(even_carrier *carrier, even_comm *comm, even_carrier_work *work,
                               void *context) EVEN_MUST_USE;
/* So many pieces may be carried; or, whatever was said, none any more. */
void even_carrier_allow(even_carrier *carrier, size_t pieces);
void even_carrier_stop(even_carrier *carrier);
/* Called by the work: waits until so many pieces may be carried; false where none may any more. */
bool even_carrier_may(even_carrier *carrier, size_t pieces);
/* Called by the work: so many pieces are done. */
void even_carrier_tell(even_carrier *carrier, size_t pieces);
/* Returns when so many pieces are done, or the work is: with its error where it failed. */
even_status even_carrier_await(even_carrier *carrier, size_t pieces) EVEN_MUST_USE;
/* Returns when the work is done, with its error. Nothing that it was given is used any more. */
even_status even_carrier_finish(even_carrier *carrier) EVEN_MUST_USE;
/* Ends the thread. There is no work. */
void even_carrier_close(even_carrier *carrier);

#endif
