/* A plan of faults for `evenstep chaos`: which, to whom, when; all of it from a seed, so that the same seed gives the
 * same plan anywhere. Pure. Any thread. */
#ifndef EVEN_FAULT_CHAOS_H
#define EVEN_FAULT_CHAOS_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

typedef enum even_chaos_kind {
  EVEN_CHAOS_KILL,    /* SIGKILL to a rank */
  EVEN_CHAOS_STOP,    /* SIGSTOP to a rank, let go a few seconds later */
  EVEN_CHAOS_SLOW,    /* a busy neighbour on a rank's core, for a few seconds */
  EVEN_CHAOS_AGENT,   /* SIGKILL to the agent; the job is started again by hand */
  EVEN_CHAOS_FLIP,    /* one bit of the newest checkpoint is turned, then a rank is killed */
  EVEN_CHAOS_TORN,    /* the newest checkpoint loses half of a file, then a rank is killed */
  EVEN_CHAOS_GARBAGE, /* random bytes to the ports on which the job listens */
  EVEN_CHAOS_DISK,    /* the file system of the run is full, for a few seconds */
  EVEN_CHAOS_CLOCK,   /* the clock of the day jumps by hours, for a rank or for the agent */
  EVEN_CHAOS_PORT,    /* a rank is killed, and the port on which the next attempt is to meet is taken */
  EVEN_CHAOS_MEMORY,  /* a rank gets no more memory, for a few seconds */
  EVEN_CHAOS_NAN,     /* a gradient of a rank is NaN in one backward */
  EVEN_CHAOS_TWIN,    /* a second process claims to be a rank */
  EVEN_CHAOS_CUT,     /* the link between two hosts is cut for a few seconds */
  EVEN_CHAOS_KINDS
} even_chaos_kind;

typedef struct even_chaos_fault {
  even_chaos_kind kind;
  int rank;
  double when; /* the part of the training's steps that is made by then, 0.1 to 0.9; 0.7 where something lacks, 0.5 of a
                  twin */
  uint64_t dice; /* for what else is chosen at random: a bit, a file */
} even_chaos_fault;

/* "kill", "bit-flip" …: a static string. */
const char *even_chaos_name(even_chaos_kind kind);

/* A set of kinds (bit 1 << kind) from "kill,stop"; "all" are all. EVEN_ERR_USAGE with the nearest name. */
even_status even_chaos_parse(const char *list, uint32_t *kinds) EVEN_MUST_USE;

/* `count` faults of these kinds (at least one of them) for `ranks` ranks, in the order of their time. Every kind comes
 * once before one comes twice. */
void even_chaos_plan(uint64_t seed, uint32_t kinds, int ranks, size_t count, even_chaos_fault *out);

#endif
