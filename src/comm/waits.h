/* What the threads of each process of a host wait in, for the others to read: where one rank waits in one group and
 * another in another, neither group's own words say so. Only who waits for long tells; nothing is written before. */
#ifndef EVEN_COMM_WAITS_H
#define EVEN_COMM_WAITS_H

#include "comm/segment.h"

#include <evenstep/flight.h>

#define EVEN_WAITS 4 /* threads of a process whose waits are told */
#define EVEN_WAITS_WHOM 8
#define EVEN_WAITS_GROUP_BYTES 64
#define EVEN_WAITS_DOING_BYTES 128
#define EVEN_WAITS_TEXT 448 /* bytes for one that is described */
/* A wait is told from then on, and again as often. */
#define EVEN_WAITS_TOLD_NS ((uint64_t)250 * 1000000u)
/* Where it is made is asked for from then on, once all threads of the process wait: the answer may take a lock that one
 * of them has while it goes on. */
#define EVEN_WAITS_ASKED_NS ((uint64_t)1000 * 1000000u)
/* Waits that are one another's cause are so when they have stood for as long before a moment that is as long ago. */
#define EVEN_WAITS_SETTLED_NS ((uint64_t)1000 * 1000000u)

/* A thread's wait. */
typedef struct even_wait_words {
  uint64_t number;   /* of the process's change with which it began */
  uint64_t since_ns; /* of the call */
  uint64_t seen_ns;  /* when the thread last looked, and waited still */
  uint32_t message;  /* 1: for a message */
  uint32_t any;      /* 1: any of `whom` will do; else all of them have to come */
  uint32_t whoms;
  uint32_t main;                  /* 1: it is the process's first thread */
  uint64_t whom[EVEN_WAITS_WHOM]; /* processes; 0: one of which nothing is known */
  char doing[EVEN_WAITS_DOING_BYTES];
  char group[EVEN_WAITS_GROUP_BYTES];
  char site[EVEN_FLIGHT_SITE_BYTES]; /* "": not known */
} even_wait_words;

/* A process's waits. */
typedef struct even_process_words {
  uint64_t process;  /* no other's */
  uint64_t change;   /* grows with each wait that begins, ends, or gets on */
  uint64_t whole_ns; /* since when it has been seen that these are all threads that can call, at this change; 0: not */
  uint64_t whole_seen_ns; /* when that was seen last */
  int32_t rank;           /* of its largest group */
  uint32_t waits;
  even_wait_words wait[EVEN_WAITS]; /* the first thread's first */
} even_process_words;

/* In a rank's part of the segment: its process's waits in all of its groups, and what others have found of them. */
typedef struct even_wait_pad {
  _Alignas(64) _Atomic uint64_t process;
  _Atomic uint64_t version; /* odd while the words change; 0: none were told */
  _Atomic uint64_t words[sizeof(even_process_words) / sizeof(uint64_t)];
  _Atomic uint32_t held;         /* by one who writes or reads what follows */
  _Atomic uint64_t found_change; /* the waits up to this change are a part of what was found; 0: nothing was */
  uint64_t found_process;        /* of this process */
  even_comm_end_words found;
} even_wait_pad;

/* A thread's side of one wait. Begins as {0}. */
typedef struct even_waiting {
  bool told;
  bool asked; /* where it is made */
  uint64_t told_ns;
  char site[EVEN_FLIGHT_SITE_BYTES];
} even_waiting;

/* The group is one of this process's, until it is no more. */
void even_waits_open(even_comm *comm);
void even_waits_close(even_comm *comm);

/* The calling thread makes calls: it is one on which others may depend. */
void even_waits_call(void);
/* It makes none as long as *word is `seen`, which only another thread of the process changes (NULL: ever), until it
 * goes on. */
void even_waits_rest(const _Atomic uint32_t *word, uint32_t seen);
void even_waits_go_on(void);
/* Whether a thread rests on that word, which has not changed since. */
bool even_waits_rested_on(const _Atomic uint32_t *word);
/* even_waits_rest of one that rests while another thread of the process makes its calls in `comm`, and may ask what
 * that one cannot: who else may call, and where in the program. Some four times a second, from `since_ns` on, with no
 * lock held. Of the calling thread's last error nothing is left. */
void even_waits_rest_behind(even_comm *comm, even_waiting *waiting, const _Atomic uint32_t *word, uint32_t seen,
                            uint64_t since_ns);
/* Whether a thread of the program that has made no call yet may make one. */
typedef enum even_waits_others {
  EVEN_WAITS_OTHERS_NONE,
  EVEN_WAITS_OTHERS_MAY,
  EVEN_WAITS_OTHERS_UNKNOWN /* on this thread: what another one of the process was told last stands */
} even_waits_others;
/* Asked that, on a thread that waits. Without one to ask, any thread of the process may. For all groups; NULL: nobody.
 */
typedef even_waits_others even_waits_others_call(void *context);
void even_waits_ask_others(even_waits_others_call *call, void *context);

/* The wait goes on: tells it, and whether it was found to be one that will never end, with which the group has been
 * ended. Called some fifty times a second, with no lock held. Of the calling thread's last error nothing is left. */
bool even_waits_in_collective(even_comm *comm, even_waiting *waiting, uint64_t now_ns);
bool even_waits_for_message(even_comm *comm, even_waiting *waiting, const void *message, const char *doing, int peer,
                            uint64_t since_ns, uint64_t now_ns);
/* It has ended, or got on. */
void even_waits_end(even_waiting *waiting);

/* What the process of `rank` waits in, as far as it has told: "; rank 1 is in all_reduce of 1024 F32 elements with SUM
 * of group torch/1 at train.py:31 for 5.2 s", or "". */
void even_waits_describe(const even_comm *comm, int rank, char *text, size_t bytes);

/* crossed.c: looks whether this process's waits are part of a circle; then all in it find that on their pads. */
void even_waits_look_for_circle(even_comm *groups, const even_process_words *own, uint64_t now_ns);
/* waits.c, for that */
bool even_waits_read(even_wait_pad *pad, even_process_words *out);
void even_waits_describe_wait(const even_wait_words *wait, int rank, size_t site_bytes, uint64_t now_ns, char *text,
                              size_t bytes);

#endif
