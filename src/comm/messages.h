/* Messages between two ranks: what this rank has begun to send and to receive, and who moves it. */
#ifndef EVEN_COMM_MESSAGES_H
#define EVEN_COMM_MESSAGES_H

#include "comm/channel.h"

#include <pthread.h>

/* What the header of a message that comes in says. */
typedef struct even_message_words {
  uint64_t tag;
  size_t bytes;
  uint32_t elements;
  uint32_t site;    /* 0: not known */
  uint32_t refusal; /* a receive has found that it does not fit: the number of that; 0: none has */
} even_message_words;

struct even_comm_request {
  EVEN_COMM_REQUEST_BASE;
  even_comm_request *next;
  bool headed; /* its header has been moved */
  bool done;
  unsigned char *data;
  size_t bytes;
  size_t moved;
  uint32_t elements; /* called.h */
  uint32_t site;     /* of a send */
  int peer;          /* EVEN_COMM_ANY_RANK until matched */
  uint64_t tag;
  bool untold; /* a receive that did not fit, of which its sender has not been told: */
  int refused_from;
  uint32_t refusal;   /* as in the message's words */
  even_status status; /* once done */
  even_error error;
};

/* A message that came before anybody asked for it. */
typedef struct even_kept_message {
  struct even_kept_message *next;
  int from;
  even_message_words words;
  unsigned char data[];
} even_kept_message;

/* What goes on between this rank and another. */
typedef struct even_message_stream {
  even_comm_request *first; /* sends, in order */
  bool headed;              /* `words` are of the message that comes in */
  even_message_words words;
  size_t got;                /* bytes of it */
  even_comm_request *taker;  /* who receives it, or */
  even_kept_message *keeper; /* where it is kept; both NULL: not decided */
} even_message_stream;

/* So many of the messages that were received after all are remembered. */
#define EVEN_MESSAGES_ACCEPTED 16u

struct even_messages {
  pthread_mutex_t lock; /* over all that is below */
  pthread_cond_t work;  /* for the thread: something to do in the background, or stop */
  even_message_stream *streams;
  even_comm_request *receives;               /* in the order of the calls; those being taken too */
  even_kept_message *kept;                   /* whole ones, in the order in which they came */
  _Atomic size_t open;                       /* requests not done; read without the lock, too */
  uint64_t moves;                            /* how often anything was moved */
  size_t waiters;                            /* threads that wait for a request and do all the moving */
  uint64_t lives_checked_ns;                 /* when one who does not wait last looked whether the peers live */
  uint32_t refusals;                         /* messages that did not fit, */
  uint32_t accepted[EVEN_MESSAGES_ACCEPTED]; /* and which of them a later receive has taken; by their numbers */
  bool started;
  bool stop;
  pthread_t thread;
};

even_status even_messages_open(even_comm *comm) EVEN_MUST_USE;
/* Ends the background's work, and all requests that are not done. */
void even_messages_stop(even_comm *comm);
void even_messages_free(even_comm *comm);

/* messages_move.c, with the lock held: */

/* Moves what can be moved; whether anything was. Nothing is once the group has ended or this rank has left. */
bool even_messages_move(even_comm *comm);
/* Gives a new receive what was kept for it. */
void even_messages_offer_kept(even_comm *comm, even_comm_request *request);
/* Ends a request; its error is the calling thread's last one. */
void even_messages_finish(even_comm_request *request, even_status status);
/* Takes a request out of its queue. */
void even_messages_unlink(even_comm_request *request);

#endif
