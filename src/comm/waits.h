/* What the threads of each process wait in, for the others to know: where one rank waits in one group and another in
 * another, neither group's own words say so. Only who waits for long tells: those of its host read it in memory that
 * they share, others ask for it (ucx/waits.c). */
#ifndef EVEN_COMM_WAITS_H
#define EVEN_COMM_WAITS_H

#include "comm/circle.h"
#include "comm/segment.h"

#include <evenstep/flight.h>

#define EVEN_WAITS_GROUP_BYTES 64
#define EVEN_WAITS_HOST_BYTES 64
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
  uint32_t main;     /* 1: it is the process's first thread */
  even_circle_wait needs;
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
  even_circle_members members;   /* all of them */
  even_comm_end_words found;
} even_wait_pad;

/* What a process of another host waits in, as it is told over the network: the first of its waits in words. */
typedef struct even_far_waits {
  uint64_t process;
  uint64_t change;    /* 0: it goes on, or may; nothing that follows is said then */
  uint64_t version;   /* of what it tells of that change: it grows */
  uint64_t waited_ns; /* until it was told, or passed on */
  int32_t rank;
  uint32_t waits;
  even_circle_wait wait[EVEN_WAITS];
  char doing[EVEN_WAITS_DOING_BYTES];
  char group[EVEN_WAITS_GROUP_BYTES];
  char host[EVEN_WAITS_HOST_BYTES];
  char site[EVEN_FLIGHT_SITE_BYTES];
} even_far_waits;
#define EVEN_FAR_WAITS 16  /* processes that are told of in one answer, */
#define EVEN_FAR_KNOWN 256 /* and that are remembered */

/* A circle that was found. */
typedef struct even_circle_found {
  even_circle_members members;
  even_error why;
} even_circle_found;

/* A group as its user knows it: it, or the one that it is part of. */
typedef struct even_wait_place {
  const void *group; /* the same for all parts of one */
  int rank;          /* this one's */
  int ranks;
  struct even_flight_writer *flight; /* where its calls are; NULL: nowhere */
} even_wait_place;

/* A thread's side of one wait. Begins as {0}. */
typedef struct even_waiting {
  bool told;
  bool asked; /* where it is made */
  uint64_t told_ns;
  char site[EVEN_FLIGHT_SITE_BYTES];
} even_waiting;

/* The group is one of this process's, until it is no more; of one over the network only the second is said. */
void even_waits_open(even_comm *comm);
void even_waits_close(even_comm *comm);
/* It becomes part of a larger one. */
struct even_comm_whole;
void even_waits_join(even_comm *comm, const struct even_comm_whole *whole);

/* The calling thread makes calls: it is one on which others may depend. */
void even_waits_call(void);
/* It makes none as long as *word is `seen`, which only another thread of the process changes (NULL: ever), until it
 * goes on. */
void even_waits_rest(const _Atomic uint32_t *word, uint32_t seen);
void even_waits_go_on(void);
/* It makes calls for others, and cannot say where in the program. */
void even_waits_carry(void);
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
/* It has ended, or got on. Whether it was found to be a part of a circle: even_watcher_look then tells those of it that
 * are in groups over the network at once. */
bool even_waits_end(even_waiting *waiting);

/* ---- over the network ---- */

/* The same of a wait in a group over the network, with no lock of that group held; *found says why it ends, for the
 * engine to end the group. `words`: of since_ns, needs (whom it waits for as they have answered, 0 where they have not
 * said that they wait), message, doing. `message` as above. */
bool even_waits_in_network(even_comm *comm, even_waiting *waiting, even_wait_words *words, const void *message,
                           even_circle_found *found);
/* Whether a wait of that age is told. */
bool even_waits_is_told(const even_waiting *waiting, uint64_t since_ns, uint64_t now_ns);
/* A message that is sent or received over the network has begun, or ended: beside one for which nobody waits nothing is
 * known of the process. And the same of work that a thread is given which rests, until it has gone on. Any thread. */
void even_waits_message_begins(void);
void even_waits_message_ends(void);
void even_waits_carrier_begins(void);
void even_waits_carrier_ends(void);

/* What tells this process from all others; 0: it has made no calls. */
uint64_t even_waits_process(void);
/* This process for a rank that asks: what it waits in itself, then what those wait in of whom that depends, as far as
 * it knows; at most EVEN_FAR_WAITS, the next ones at the next `turn`. One alone, with change 0: it goes on, or has not
 * waited for long enough. Any thread, with a group's lock held or not. */
size_t even_waits_answer(uint64_t turn, even_far_waits *out);
/* Keeps such an answer. Whatever it holds. */
void even_waits_hear(const even_far_waits *words);
/* What another host's rank has found, if it is of this process as it is now. Whatever it holds. */
void even_waits_hear_found(const even_circle_found *found);
/* The number of circles that have been found with this process in them. Where these are more than `passed`, also the
 * last of them, for the others in it. Any thread. */
uint64_t even_waits_found(uint64_t passed, even_circle_found *found);

/* ---- reading ---- */

/* What the process of `rank` waits in, as far as it has told: "; rank 1 is in all_reduce of 1024 F32 elements with SUM
 * of group torch/1 at train.py:31 for 5.2 s", or "". */
void even_waits_describe(const even_comm *comm, int rank, char *text, size_t bytes);

/* ---- place.c: where a wait is ---- */

even_wait_place even_waits_place(even_comm *comm);
void even_waits_name_group(const even_comm *comm, const even_wait_place *place, char *text, size_t bytes);
/* Of a collective, as it is in the flight record; whether it is known. */
bool even_waits_read_site(const even_wait_place *place, even_waiting *waiting);
/* Asks for it, without locks: the answer may wait for anything. Of a collective it is in the flight record, too, then.
 */
void even_waits_ask_site(const even_wait_place *place, even_waiting *waiting, bool collective);

/* ---- crossed.c: what is known of all ---- */

/* What other hosts' ranks have told; waited_ns is since when, by this host's clock. */
typedef struct even_far_known {
  even_far_waits of[EVEN_FAR_KNOWN];
  size_t count;
  size_t next; /* where the next one is kept: beside the others, then in place of the oldest */
} even_far_known;

/* Whether these waits, this process's own, are part of a circle; then those in it that share a group in memory find
 * that on their pads. */
bool even_waits_look_for_circle(even_comm *groups, const even_process_words *own, const even_far_known *far,
                                uint64_t now_ns, even_circle_found *found);
/* Keeps what another host's rank has told, `own` being this process. */
void even_waits_keep(even_far_known *far, uint64_t own, const even_far_waits *words, uint64_t now_ns);
/* As even_waits_answer. */
size_t even_waits_gather(even_comm *groups, const even_process_words *own, const even_far_known *far, uint64_t now_ns,
                         uint64_t turn, even_far_waits *out);
/* Has those among them find it that share a group in memory. */
void even_waits_pass_on(even_comm *groups, const even_circle_found *found);

/* ---- pads.c: what is written in memory that a host's ranks share ---- */

void even_waits_write(even_wait_pad *pad, const even_process_words *words);
bool even_waits_read(even_wait_pad *pad, even_process_words *out);
void even_waits_write_found(even_wait_pad *pad, uint64_t process, uint64_t change, const even_circle_found *found);
/* Of the wait of that number of the process. */
bool even_waits_read_found(even_wait_pad *pad, uint64_t process, uint64_t number, even_circle_found *out);
/* `host`: NULL: not said. */
void even_waits_describe_wait(const even_wait_words *wait, int rank, const char *host, size_t site_bytes,
                              uint64_t now_ns, char *text, size_t bytes);

#endif
