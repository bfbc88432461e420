/* Copies of checkpoints on other hosts while training goes on, so that the loss of this host, or of its disk, loses no
 * more than what came since: on their disks (--checkpoint-copies N: each whole one that the job writes, under the same
 * path), and in their memory (--checkpoint-memory K: the newest, whether that lies in this host's memory or on its
 * disk). A host keeps the newest that is whole there; the one before until that is. */
#ifndef EVEN_ORCHESTRATOR_COPIES_H
#define EVEN_ORCHESTRATOR_COPIES_H

#include "base/json_writer.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_copies even_copies;

/* A copy on another host's disk. */
typedef struct even_copy {
  even_text host;
  even_text folder; /* there */
  even_text order;  /* info.order of it */
} even_copy;

/* Of the leader: looks whether there is a new one, and sends it where the last is there. Several times a second. */
void even_copies_tick(even_job *job);
/* Of so many hosts it is known what was sent to their disks; of more, of those with the newest. */
enum { EVEN_COPIES_HELD = 8 };

/* The newest that this leader's agent has sent, or one before it of whose ranks it has gone on with, valid until the
 * next tick; NULL: it knows of none. What a leader before it has sent it knows from what that one has left (estate.h).
 * What a host had already and did not get as a copy it does not: that may be the leader's own folder. */
const even_copy *even_copies_newest(even_job *job);
/* The last that is known to have come to the host of that name, as valid. */
const even_copy *even_copies_of(const even_job *job, const char *host);
/* Of those that are known, as valid, one of which that is newer than this order; NULL: none is. */
const even_copy *even_copies_newer(const even_job *job, const char *order);
/* That host has it no more, or will not have it once it has what a restart goes on from. */
void even_copies_miss(even_job *job, const char *host);
/* The order of what is on its way to hosts now, NULL: nothing is. `copies` NULL is allowed. */
const char *even_copies_coming(const even_copies *copies);
/* The hosts are others, or have other numbers, from now on. NULL is allowed. */
void even_copies_renew(even_copies *copies);
/* What is known of copies on disks, as a member of the object that is written: for whoever leads next. */
void even_copies_write(const even_job *job, even_json *json);
/* Of another leader: whatever is in it. What came to this host itself is not a copy any more. */
even_status even_copies_read(even_job *job, const json_t *list) EVEN_MUST_USE;
/* The job has ended: says what was sent, where anything was. */
void even_copies_tell(even_job *job);
void even_copies_close(even_copies *copies);

/* ---- the agent is killed, and the next one goes on with the ranks (outlast.h) ---- */

enum { EVEN_COPIES_PATH = 4096, EVEN_COPIES_ORDER = 128 };

/* Of one kind of copies what has come to its end. One that is under way is begun anew: who has it says so. */
typedef struct even_copies_left_kind {
  char newest[EVEN_COPIES_PATH]; /* "": the next agent looks at once */
  bool told;
  bool failed;
  bool failure_told;
} even_copies_left_kind;

/* A copy on a disk. */
typedef struct even_copies_left_copy {
  char host[EVEN_HOSTS_NAME]; /* "": none */
  char folder[EVEN_COPIES_PATH];
  char order[EVEN_COPIES_ORDER];
} even_copies_left_copy;

typedef struct even_copies_left {
  even_copies_left_kind kinds[2];
  even_copies_left_copy held[EVEN_COPIES_HELD];
  uint64_t sent;
  uint64_t sent_bytes;
  uint64_t spared_bytes;
} even_copies_left;

/* What has no room there is as if it were not known. */
void even_copies_leave(const even_job *job, even_copies_left *out);
/* Whatever is in it. */
even_status even_copies_take(even_job *job, const even_copies_left *from) EVEN_MUST_USE;
/* Another host's agent was killed, and the next one has no part of what was under way: that is sent anew, to it alone.
 */
void even_copies_anew(even_host_agent *agent);

#endif
