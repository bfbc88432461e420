/* Messages between two ranks over the network: what both of its files see. With the group's lock held. */
#ifndef EVEN_COMM_UCX_MESSAGES_H
#define EVEN_COMM_UCX_MESSAGES_H

#include "comm/ucx/group.h"

#include <pthread.h>

typedef struct even_ucx_header {
  uint64_t tag;
  uint64_t bytes;
  uint64_t number; /* among those from this sender to this receiver */
  int32_t sender;
  uint32_t elements;                 /* called.h */
  char site[EVEN_FLIGHT_SITE_BYTES]; /* where it was sent; as much of it is sent as there is */
} even_ucx_header;

typedef struct even_ucx_request {
  EVEN_COMM_REQUEST_BASE;
  struct even_ucx_request *next;
  bool begun;   /* a send: it is announced */
  bool matched; /* a receive: it is known which message is its */
  bool done;
  unsigned char *data;
  size_t bytes;
  int peer; /* EVEN_COMM_ANY_RANK until matched */
  uint64_t tag;
  uint32_t elements;
  even_ucx_header header;
  even_ucx_transfer parts[2]; /* the header's and the data's */
  bool untold;                /* a receive that `refused_number` of `refused_from` did not fit, which does not know */
  int refused_from;
  uint64_t refused_number;
  even_status status; /* once done */
  even_error error;
} even_ucx_request;

/* A message whose header has come before anybody asked for it. */
typedef struct even_ucx_announced {
  struct even_ucx_announced *next;
  bool returned; /* its room has been given back: something else of its sender is asked for */
  bool refused;  /* a receive has found that it does not fit */
  even_ucx_header header;
} even_ucx_announced;

/* So many of the messages that were received after all are remembered. */
#define EVEN_UCX_ACCEPTED 16u

struct even_ucx_messages {
  struct {
    int sender;
    uint64_t number;
  } accepted[EVEN_UCX_ACCEPTED]; /* after another receive had found that they do not fit */
  uint32_t accepts;
  pthread_cond_t work;          /* for the thread: something to do in the background, or stop */
  even_ucx_request *open;       /* not done, in the order of the calls */
  even_ucx_announced *waiting;  /* in the order in which they came */
  even_ucx_announced *incoming; /* where the next header lands */
  void *incoming_request;
  size_t waiters; /* threads that wait for a request and do all the moving */
  bool started;
  bool stop;
  bool gave_up; /* something was not done when the group was left */
  pthread_t thread;
};

/* Ends a request; its error is the calling thread's last one. */
void even_ucx_message_finish(even_ucx_group *group, even_ucx_request *request, even_status status);

/* ---- waits.c ---- */

/* As even_ucx_tell_meeting, of one that waits for a message. */
void even_ucx_tell_receive(even_ucx_group *group, even_ucx_request *request, even_ucx_waiting *waiting,
                           const char *doing, uint64_t since_ns, uint64_t now_ns);

/* ---- refusal.c ---- */

/* Ends a receive that a message does not fit. */
void even_ucx_message_refuse(even_ucx_group *group, even_ucx_request *request, even_ucx_announced *message);
/* By who waits for that receive: adds where it is to its error, and tells the sender. The lock is let go to ask for
 * that: of several who wait for it the first asks. */
void even_ucx_message_tell_sender(even_ucx_group *group, even_ucx_request *request);
/* Whether an earlier message, which nobody has asked for yet, has the same number for the transport's tags; and the end
 * of a receive that wants the later one. */
bool even_ucx_number_is_taken(const even_ucx_group *group, const even_ucx_announced *message);
void even_ucx_message_refuse_number(even_ucx_group *group, even_ucx_request *request, const even_ucx_header *header);

#endif
