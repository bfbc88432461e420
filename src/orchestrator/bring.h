/* Brings checkpoints to hosts that do not have them, so that no folder need be seen by all: the leader says which one a
 * restart begins from, a host that lacks it gets its files as parcels, compares every checksum, and says where it lies
 * there. */
#ifndef EVEN_ORCHESTRATOR_BRING_H
#define EVEN_ORCHESTRATOR_BRING_H

#include "base/json_writer.h"
#include "orchestrator/bring_files.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* ---- the leader's, bring.c ---- */

/* Returns once each host has the checkpoint that the attempt begins from, agent->resume says where. A host that is
 * overdue with its word is lost from then on, as one that stands still. Errors: those of a host that cannot have it,
 * EVEN_ERR_PEER_LOST, EVEN_ERR_INTERRUPTED (the thread's question). Nothing to do where the attempt begins anew. */
even_status even_bring_to_all(even_job *job) EVEN_MUST_USE;
/* The same to each that is here and stays; who is lost, before or meanwhile, is nobody's error. */
even_status even_bring_to_those_here(even_job *job) EVEN_MUST_USE;
typedef enum even_bring_step {
  EVEN_BRING_NONE,
  EVEN_BRING_UNDER_WAY,
  EVEN_BRING_HOLDS,
  EVEN_BRING_FAILED
} even_bring_step;

/* Begins to bring a checkpoint to one host, which ends what was brought there before; goes on where it is the same one.
 * `quiet`: nobody waits for it, and nobody is told; its files may be removed here meanwhile. `memory`: to that host's
 * memory, not to its disk. Errors: of reading its manifest, EVEN_ERR_PEER_LOST. */
even_status even_bring_begin(even_job *job, even_host_agent *agent, const char *folder, bool quiet,
                             bool memory) EVEN_MUST_USE;
/* How far the last one is; of one that FAILED *why, where `why` is not NULL. */
even_bring_step even_bring_state(const even_host_agent *agent, const even_error **why);
/* For a host that has got all of one, and is to compare and to sync it: so long, and a second for each
 * EVEN_BRING_WRITING_BYTES, for a disk may take its time. */
#define EVEN_BRING_WRITING_NS UINT64_C(300000000000)
#define EVEN_BRING_WRITING_BYTES UINT64_C(64000000)
/* Of one that is under way, and for which nothing but the host's own word has been awaited for longer than that: the
 * seconds that it had, else 0. A file that is on its way is given up by itself (parcel.h). */
double even_bring_overdue_seconds(const even_host_agent *agent);
/* Whether that has been the end of a host twice, and it has had none whole between (even_bring_to_all): another agent
 * there will not do better. */
bool even_bring_hangs(const even_host_agent *agent);
/* Whether the last one had to be sent. */
bool even_bring_was_sent(const even_host_agent *agent);
/* Whether the last one had not to be, and is no folder that this host sees, too: it came before, from whichever agent
 * led then. */
bool even_bring_had_come(const even_host_agent *agent);
/* Bytes of it that were sent, and those of files that the host had already. */
void even_bring_traffic(const even_host_agent *agent, uint64_t *sent_bytes, uint64_t *spared_bytes);
/* What a host says of it (HOLDS). */
even_status even_bring_hear(even_host_agent *agent, const json_t *content) EVEN_MUST_USE;
/* The agent is gone, or its place is given up. */
void even_bring_drop(even_host_agent *agent);

/* ---- who takes one, bring_take.c: a host, or the leader what it is given back (bring_back.h) ---- */
typedef struct even_bring_take even_bring_take;

/* What a host has of checkpoints that came; it outlives who takes them, which each leader has anew. */
typedef struct even_bring_kept {
  even_text disk;                 /* the last one that came to its disk, which goes when another one is whole */
  even_text memory;               /* the same in its memory */
  even_text coming;               /* all of one has come, and it may have this name by now; "": of none */
  bool to_memory;                 /* that one */
  struct even_host_memory *host;  /* its memory for them; NULL: nothing has come there */
  void (*changed)(void *context); /* these texts are others: who is to be left them has to be; may be NULL */
  void *context;
} even_bring_kept;

void even_bring_kept_free(even_bring_kept *kept);

/* ---- the texts, bring_kept.c ---- */

/* Before that one is named: whoever has the texts next may find it there, or not. */
void even_bring_kept_await(even_bring_kept *kept, bool memory, const char *place);
/* It is there, and what was kept before it goes. */
void even_bring_kept_follow(even_bring_kept *kept, bool memory, const char *place);
/* It is not there, or not as one that came. */
void even_bring_kept_miss(even_bring_kept *kept);
/* Whether what lies there came. */
bool even_bring_kept_has(const even_bring_kept *kept, const char *folder);
/* Members of the object that is being written. */
void even_bring_kept_write(const even_bring_kept *kept, even_json *json);
/* What an agent before had, which was killed: looks what has become of the one that came. `from` NULL: nothing. */
even_status even_bring_kept_read(even_bring_kept *kept, const json_t *from) EVEN_MUST_USE;

/* Takes checkpoints from `parcels` that come from the host of that number; `tell` frees the text. `kept`, the caller's,
 * outlives it. */
even_status even_bring_take_open(even_parcels *parcels, int from, even_bring_kept *kept,
                                 void (*tell)(void *context, even_text *text), void *context,
                                 even_bring_take **out) EVEN_MUST_USE;
/* The leader asks (CHECKPOINT). */
even_status even_bring_take_hear(even_bring_take *take, const json_t *content) EVEN_MUST_USE;

typedef struct even_bring_wish {
  uint64_t serial;
  const char *folder; /* where it shall lie on the disk, or, where that is taken or cannot be written to: */
  const char *other;  /* where another one gives way to it */
  uint64_t sum;       /* of its manifest */
  bool memory;        /* to the memory of this host, which `kept` has: under the name of `folder` */
  const char *shared; /* a checkpoint here, which stays: where none came before, files that are the same are linked to
                         those of this one; NULL: none */
} even_bring_wish;

/* The same where it is known not to be here: its files are awaited. */
even_status even_bring_take_begin(even_bring_take *take, const even_bring_wish *wish) EVEN_MUST_USE;
/* Bytes of files of the last one that were here already, and are not sent. */
uint64_t even_bring_take_spared(const even_bring_take *take);
/* Whether nothing is on its way, or being done with what came, since so long. */
bool even_bring_take_is_idle(const even_bring_take *take, uint64_t ns);
/* Tells what a thread has done meanwhile; several times a second. NULL is allowed. */
void even_bring_take_tick(even_bring_take *take);
/* Before the parcels are closed. NULL is allowed. */
void even_bring_take_close(even_bring_take *take);

#define EVEN_BRING_PARCEL "checkpoint"           /* from the leader; its numbers: bring_files.h */
#define EVEN_BRING_BACK_PARCEL "checkpoint-back" /* to it */

#endif
