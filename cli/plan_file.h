/* plan.json as `evenstep plan` shows it. */
#ifndef EVEN_CLI_PLAN_FILE_H
#define EVEN_CLI_PLAN_FILE_H

#include "base/text.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_plan_rank {
  char device[32];
  int64_t share;
  int64_t share_equal;
  double seconds; /* busy, at its share */
  double seconds_equal;
  double seconds_of_one; /* of a rank without samples: what one would take it; else 0 */
  int64_t memory_bytes;  /* peak at its share; 0: unknown */
  bool is_worse;         /* steps are shorter without it, and without all that are such */
} even_plan_rank;

typedef struct even_plan {
  int64_t batch;
  double balanced_seconds; /* of a step */
  double equal_seconds;
  double bound_samples_per_second;
  double waits_seconds; /* of a balanced step, what ranks wait for one another before their work is done; 0: nothing */
  double without_seconds; /* of a step without those; 0: there are none */
  size_t ranks;
  even_plan_rank *rank;
} even_plan;

/* EVEN_ERR_INPUT with what is wrong where the file is no plan. Free with even_plan_free, also after a failure. */
even_status even_plan_read(const char *path, even_plan *out) EVEN_MUST_USE;
/* The same of a text; `origin` is put into errors. */
even_status even_plan_parse(const char *origin, const char *text, size_t bytes, even_plan *out) EVEN_MUST_USE;
void even_plan_free(even_plan *plan);
/* Whether steps are shorter without some ranks, and each rank has a device of its own. Adds which ones ("rank 1
 * (cuda:1)") to *ranks, and to *devices those of the others, as --devices takes them. False, too, where memory is
 * short. */
bool even_plan_leaves_out(const even_plan *plan, even_text *ranks, even_text *devices);
/* A table of the ranks, the prediction in two sentences, and which ranks are better left out, on standard output.
 * one_host: ranks are chosen by --devices and -n. */
void even_plan_print(const even_plan *plan, bool one_host);

#endif
