/* How staged data are written: into the caches, or past them into memory. The first is faster where the ranks' cores
 * share a cache, the second where they do not, by two to four times each; which it is changes when a virtual machine's
 * CPUs move. So it is measured, again and again, on the stages of the collectives themselves. */
#include "comm/writing.h"

#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* Full stages from one trial to the next. A trial is a run of each way; the first stages of a run still move what was
 * written in the other way. */
#define CYCLE 512u
#define RUN 6u
#define SKIPPED 2u

/* Whether the coming stage belongs to a trial, and to which of its runs. All ranks count alike, so that they try alike.
 */
static bool in_trial(const even_comm_writing *writing) {
  return writing->stages < 2 * RUN;
}
static bool tried_way(const even_comm_writing *writing) {
  return writing->stages >= RUN;
}
static bool measured(const even_comm_writing *writing) {
  return in_trial(writing) && writing->stages % RUN >= SKIPPED;
}

/* Stages of different collectives do not compare: a trial is made of one kind. It is given up when that kind does not
 * come again. */
static bool another_kind(even_comm_writing *writing, uint32_t kind) {
  if (!in_trial(writing) || writing->stages == 0 || writing->kind == kind) {
    return false;
  }
  writing->passed++;
  if (writing->passed < CYCLE) {
    return true;
  }
  writing->stages = 0;
  return false;
}

bool even_writing_begin(even_comm *comm, bool full) {
  even_comm_writing *writing = &comm->writing;
  if (writing->forced != EVEN_WRITING_MEASURED) {
    writing->counted = false;
    return even_writing_goes_past(comm);
  }
  writing->counted = full && !another_kind(writing, comm->call.kind);
  if (!writing->counted) {
    return writing->past_caches;
  }
  if (in_trial(writing) && writing->piece_bytes != comm->piece_bytes) {
    writing->stages = 0; /* larger stages leave the caches whichever way they are written: they do not compare */
  }
  if (writing->stages == 0) {
    writing->kind = comm->call.kind;
    writing->passed = 0;
    writing->piece_bytes = comm->piece_bytes;
    writing->least[0] = writing->least[1] = UINT64_MAX;
  }
  writing->began = measured(writing) ? even_clock_ns() : 0;
  return in_trial(writing) ? tried_way(writing) : writing->past_caches;
}

void even_writing_end(even_comm *comm, size_t bytes) {
  even_comm_writing *writing = &comm->writing;
  if (!writing->counted) {
    return;
  }
  if (writing->began != 0 && bytes > 0) {
    uint64_t *least = &writing->least[tried_way(writing)];
    uint64_t took = ((even_clock_ns() - writing->began) << 10) / bytes;
    *least = took < *least ? took : *least; /* others may have taken the core meanwhile: the least is the truest */
  }
  writing->stages++;
  if (writing->stages == 2 * RUN) {
    writing->past_caches = writing->least[1] < writing->least[0];
  } else if (writing->stages >= CYCLE) {
    writing->stages = 0;
  }
}

static bool is_known(uint64_t nanoseconds) {
  return nanoseconds != 0 && nanoseconds != UINT64_MAX;
}

void even_writing_describe(const even_comm *comm, char *text, size_t bytes) {
  const even_comm_writing *writing = &comm->writing;
  bool past = even_writing_goes_past(comm);
  const char *way = past ? "past" : "through";
  if (writing->forced != EVEN_WRITING_MEASURED) {
    (void)snprintf(text, bytes, "written %s the caches, as asked for", way);
  } else if (!in_trial(writing) && is_known(writing->least[0]) && is_known(writing->least[1])) {
    (void)snprintf(text, bytes, "written %s the caches (%llu ns for 1 KB; %s them %llu)", way,
                   (unsigned long long)writing->least[past], past ? "through" : "past",
                   (unsigned long long)writing->least[!past]);
  } else {
    (void)snprintf(text, bytes, "written %s the caches", way);
  }
}

void even_writing_copy(void *target, const void *source, size_t bytes, bool past_caches) {
  if (past_caches) {
    even_copy_past_caches(target, source, bytes);
  } else if (bytes > 0) {
    memcpy(target, source, bytes);
  }
}
