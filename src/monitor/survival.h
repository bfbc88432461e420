/* What became of the others after ranks of theirs were lost, from the history alone: whether they went on in their
 * processes, how soon, how soon another process had taken the place, and whether any step was lost or made twice. */
#ifndef EVEN_MONITOR_SURVIVAL_H
#define EVEN_MONITOR_SURVIVAL_H

#include "monitor/history.h"

typedef enum even_survival_outcome {
  EVEN_SURVIVAL_UNKNOWN,      /* the history ends before it could be told, or nobody trained then */
  EVEN_SURVIVAL_WENT_ON,      /* all others that trained made their next steps in the same processes */
  EVEN_SURVIVAL_STARTED_AGAIN /* none of them did: the job began another attempt */
} even_survival_outcome;

/* One fault; the times are CLOCK_MONOTONIC, 0: that was not seen. */
typedef struct even_survival {
  /* ---- told by the caller ---- */
  pid_t pid;      /* of the rank that it came to */
  uint64_t at_ns; /* when */
  /* ---- found ---- */
  even_survival_outcome outcome;
  bool trained;        /* that process had made a step */
  int others;          /* processes that had made one, too, and lived then */
  uint64_t again_ns;   /* they had agreed on who is left, and computed again */
  uint64_t stepped_ns; /* the last of them had made the next step */
  uint64_t joined_ns;  /* a process in the lost one's place had made its first step */
  uint64_t ended_ns;   /* of EVEN_SURVIVAL_STARTED_AGAIN: when the next attempt began */
} even_survival;

enum { EVEN_SURVIVAL_WORDS = 192 };

/* Fills in what is found of the faults, in the order of their times. `wrong`: what should never be ("": nothing): a
 * process that no fault came to was lost while others went on, or a step was made twice, or left out, by one process.
 * `gaps`: records may be missing (of a disk that was full), so that steps may seem to be left out. A script that goes
 * back by itself (es.load_checkpoint) does make steps twice. Errors: EVEN_ERR_CORRUPT, EVEN_ERR_IN_USE,
 * EVEN_ERR_MEMORY. */
even_status even_survival_find(even_history *history, even_survival *faults, size_t count, bool gaps,
                               char wrong[EVEN_SURVIVAL_WORDS]) EVEN_MUST_USE;

#endif
