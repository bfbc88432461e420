/* Parcels: the bytes of a memory file, or of any file, carried from one agent of a job to another one over the links
 * that are there. Agents connect in a star: between two that serve a leader, the leader passes the pieces on.
 *
 * A parcel goes in pieces of at most EVEN_PARCEL_PIECE bytes. Its receiver says how much it has taken, and no more than
 * EVEN_PARCEL_WINDOW bytes beyond that are on their way; who sends looks at its link's queue, too. So what else the
 * agents say to one another, signs of life above all, waits for a few pieces at most. The XXH3 (64 bits) of all bytes
 * comes with the last one and is compared. A receiver takes EVEN_PARCEL_AT_ONCE at a time; others wait for their turn.
 *
 * Who leads is host 0. One thread, that of the agents' loop: nothing here waits but for the files it reads and writes.
 * Calls of the caller's may offer parcels; they may not close the parcels. */
#ifndef EVEN_ORCHESTRATOR_PARCEL_H
#define EVEN_ORCHESTRATOR_PARCEL_H

#include "orchestrator/link.h"

typedef struct even_parcels even_parcels;

enum {
  EVEN_PARCEL_NAME = 64,
  EVEN_PARCEL_PIECE = 1 << 20,
  EVEN_PARCEL_WINDOW = 4 << 20,
  EVEN_PARCEL_AT_ONCE = 2,
  EVEN_PARCEL_QUEUED = 256 /* that wait at one receiver; more are refused */
};

typedef struct even_parcel {
  int from; /* hosts */
  int to;
  char name[EVEN_PARCEL_NAME]; /* what kind of parcel it is: "checkpoint", "rank-state" */
  uint64_t number;             /* which one of them, as both ends understand it: below 2^63 */
  uint64_t bytes;              /* 1 … 2^63-1 */
} even_parcel;

/* Of who takes the parcels of one name. Each may be NULL but for `arrived`. */
typedef struct even_parcel_calls {
  void *context;
  /* One is about to come. EVEN_OK takes it: into `*fd`, an empty file, open to read and write, which is the
   * parcels' until one of the calls below; or, where that stays -1, into a memory file, made where free memory holds
   * it. An error refuses it; its words reach the sender. */
  even_status (*offered)(void *context, const even_parcel *parcel, int *fd);
  /* It is here, whole, its checksum compared. `fd`, at its beginning, is the callee's from then on, also where that
   * returns an error, whose words reach the sender. */
  even_status (*arrived)(void *context, const even_parcel *parcel, int fd);
  /* One that was taken does not come; its file is closed after this. */
  void (*failed)(void *context, const even_parcel *parcel, const even_error *why);
} even_parcel_calls;

/* Told to who has offered a parcel, once: it was taken there, whole (`why` NULL), or why it was not. */
typedef void (*even_parcel_done)(void *context, const even_parcel *parcel, const even_error *why);

typedef struct even_parcels_params {
  size_t size; /* sizeof(even_parcels_params) */
  int self;    /* this host's number; 0 leads, and passes on what others send one another */
  int count;   /* of hosts */
  void *context;
  /* The link by which messages for a host go, NULL where it cannot be reached now. To who does not lead: the leader's,
   * whatever the host. */
  even_link *(*way)(void *context, int host);
  /* A parcel that does not get on for so long fails (EVEN_ERR_TIMEOUT); one that waits for its turn, after ten times
   * that. 0: 60 s. */
  uint64_t patience_ns;
} even_parcels_params;

even_status even_parcels_open(const even_parcels_params *params, even_parcels **out) EVEN_MUST_USE;
/* Closes what is open; calls nobody. NULL is allowed. */
void even_parcels_close(even_parcels *parcels);

/* From now on parcels of this name (a string that lasts) are taken so; `calls` is copied. One of a name that nobody
 * takes is refused (EVEN_ERR_UNSUPPORTED). */
even_status even_parcels_expect(even_parcels *parcels, const char *name, const even_parcel_calls *calls) EVEN_MUST_USE;
/* Offers the first `bytes` of `fd`, which is the parcels' from then on, also after a failure; what it holds must not
 * change until `done` (not NULL) is called, never before this returns. Errors: EVEN_ERR_ARGUMENT (this host itself, no
 * such host, no bytes), EVEN_ERR_PEER_LOST (no way there now), EVEN_ERR_MEMORY; `done` is not called then. */
even_status even_parcels_offer(even_parcels *parcels, int to, const char *name, uint64_t number, int fd, uint64_t bytes,
                               even_parcel_done done, void *context) EVEN_MUST_USE;

/* Nobody takes parcels of this name here any more, and those that are on their way, to here or from here, end; nobody
 * is called for them. Not in a call of the parcels. NULL is allowed. */
void even_parcels_withdraw(even_parcels *parcels, const char *name);

/* ---- the agents' loop: to who has no parcels (any more: NULL) nothing happens ---- */

/* Whether messages of this kind are for even_parcels_take. */
bool even_parcels_know(even_message_kind kind);
/* A message that came by the link of `host` (0 to who does not lead). EVEN_ERR_INPUT: it is none that a right agent
 * sends; the link is to be ended. */
even_status even_parcels_take(even_parcels *parcels, int host, const even_message *message) EVEN_MUST_USE;
/* Begins what waits for its turn, sends on, gives up what does not get on; several times a second. */
void even_parcels_tick(even_parcels *parcels);
/* The link of `host` has ended: so have parcels from and to it; of one that does not lead, and has lost its leader,
 * all. The leader tells the others. */
void even_parcels_lost(even_parcels *parcels, int host);

#endif
