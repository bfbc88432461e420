/* What is kept of communication costs (evenstep/comm_costs.h), in `evenstep bench comm`: its figures into the table,
 * and the table's rows of a group like the measured one. */
#include "base/fail.h"
#include "cli/bench_comm.h"

#include <evenstep/comm_costs.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *text_of(const json_t *report, const char *name) {
  return json_string_value(json_object_get(report, name));
}

/* Under which engine and way a column of the bench is kept; `own`: the engine that it measured. */
static even_comm_cost_key key_of(const char *column, const char *own) {
  if (strcmp(column, "arena") == 0) {
    return (even_comm_cost_key){.engine = own, .way = "arena"};
  }
  if (strcmp(column, "plain") == 0) {
    return (even_comm_cost_key){.engine = own, .way = "torch"};
  }
  return (even_comm_cost_key){.engine = column, .way = strcmp(column, "mpi") == 0 ? "mpi4py" : "torch"};
}

static even_status add_row(even_comm_costs *costs, const json_t *row, const char *shape, const char *own) {
  json_t *seconds = json_object_get(row, "seconds");
  for (void *at = json_object_iter(seconds); at != NULL; at = json_object_iter_next(seconds, at)) {
    const char *column = json_object_iter_key(at);
    if (strcmp(column, "memory") == 0) {
      continue; /* no collective's cost */
    }
    even_comm_cost_key key = key_of(column, own);
    key.collective = text_of(row, "collective");
    key.shape = shape;
    key.bytes = (uint64_t)json_integer_value(json_object_get(row, "bytes"));
    EVEN_TRY(even_comm_costs_add(costs, &key, json_number_value(json_object_iter_value(at))));
  }
  return EVEN_OK;
}

static even_status add_rows(even_comm_costs *costs, const json_t *rows, const json_t *report) {
  for (size_t i = 0; i < json_array_size(rows); i++) {
    EVEN_TRY(add_row(costs, json_array_get(rows, i), text_of(report, "shape"), text_of(report, "engine")));
  }
  return EVEN_OK;
}

even_status even_bench_costs_check(void) {
  const char *place = getenv("EVENSTEP_COMM_COSTS");
  if (place != NULL && strcmp(place, "off") == 0) {
    (void)even_fail(EVEN_ERR_USAGE, "bench comm: --save has no place: EVENSTEP_COMM_COSTS is off");
    return even_error_fix("unset it, or let it name a file");
  }
  return EVEN_OK;
}

even_status even_bench_costs_save(const json_t *report, const json_t *mpi) {
  even_comm_costs *costs = NULL;
  if (text_of(report, "costs") == NULL || text_of(report, "shape") == NULL) {
    return even_fail(EVEN_ERR_INPUT, "the bench's report does not say where costs are kept");
  }
  EVEN_TRY(even_comm_costs_open(&costs));
  even_status status = add_rows(costs, json_object_get(report, "rows"), report);
  status = status == EVEN_OK ? add_rows(costs, json_object_get(mpi, "rows"), report) : status;
  status = status == EVEN_OK ? even_comm_costs_save(costs, text_of(report, "costs")) : status;
  even_comm_costs_close(costs);
  return status;
}

/* ---- what is kept ---- */

static int in_order(const void *left, const void *right) {
  const even_comm_cost *a = left;
  const even_comm_cost *b = right;
  int by_collective = strcmp(a->collective, b->collective);
  int by_engine = strcmp(a->engine, b->engine);
  if (by_collective != 0) {
    return by_collective;
  }
  if (a->bytes != b->bytes) {
    return a->bytes < b->bytes ? -1 : 1;
  }
  return by_engine != 0 ? by_engine : strcmp(a->way, b->way);
}

/* Those of the report's shape, in order; free *out. */
static even_status rows_of(even_comm_costs *costs, const char *shape, even_comm_cost **out, size_t *count) {
  even_comm_cost cost;
  *count = 0;
  *out = calloc(EVEN_COMM_COSTS_MOST, sizeof **out);
  if (*out == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "the table of costs needs more memory than there is");
  }
  for (size_t i = 0; even_comm_costs_at(costs, i, &cost) && *count < EVEN_COMM_COSTS_MOST; i++) {
    if (strcmp(cost.shape, shape) == 0) {
      (*out)[(*count)++] = cost;
    }
  }
  qsort(*out, *count, sizeof **out, in_order);
  return EVEN_OK;
}

static even_status as_json(const even_comm_cost *rows, size_t count, json_t *kept) {
  for (size_t i = 0; i < count; i++) {
    json_t *row = json_pack("{s:s, s:I, s:s, s:s, s:f, s:I, s:I}", "collective", rows[i].collective, "bytes",
                            (json_int_t)rows[i].bytes, "engine", rows[i].engine, "way", rows[i].way, "seconds",
                            rows[i].seconds, "samples", (json_int_t)rows[i].samples, "at", (json_int_t)rows[i].at);
    if (row == NULL || json_array_append_new(kept, row) != 0) {
      return even_fail(EVEN_ERR_MEMORY, "the table of costs needs more memory than there is");
    }
  }
  return EVEN_OK;
}

even_status even_bench_costs_read(const json_t *report, json_t **kept) {
  const char *path = text_of(report, "costs");
  const char *shape = text_of(report, "shape");
  even_comm_costs *costs = NULL;
  even_comm_cost *rows = NULL;
  size_t count = 0;
  *kept = json_array();
  if (*kept == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "the table of costs needs more memory than there is");
  }
  if (path == NULL || shape == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(even_comm_costs_open(&costs));
  even_status status = even_comm_costs_load(costs, path);
  status = status == EVEN_OK ? rows_of(costs, shape, &rows, &count) : status;
  status = status == EVEN_OK ? as_json(rows, count, *kept) : status;
  free(rows);
  even_comm_costs_close(costs);
  return status;
}

void even_bench_costs_print(const json_t *report, const json_t *kept) {
  if (text_of(report, "costs") == NULL) {
    (void)printf("costs     not kept (EVENSTEP_COMM_COSTS=off)\n");
    return;
  }
  (void)printf("costs     %zu kept in %s for groups of %s\n", json_array_size(kept), text_of(report, "costs"),
               text_of(report, "shape"));
  for (size_t i = 0; i < json_array_size(kept); i++) {
    const json_t *row = json_array_get(kept, i);
    if (i == 0) {
      (void)printf("\n%-15s %11s %-8s %-12s %12s %8s\n", "COLLECTIVE", "BYTES", "ENGINE", "WAY", "us", "SAMPLES");
    }
    (void)printf("%-15s %11" JSON_INTEGER_FORMAT " %-8s %-12s %12.1f %8" JSON_INTEGER_FORMAT "\n",
                 text_of(row, "collective"), json_integer_value(json_object_get(row, "bytes")), text_of(row, "engine"),
                 text_of(row, "way"), json_number_value(json_object_get(row, "seconds")) * 1e6,
                 json_integer_value(json_object_get(row, "samples")));
  }
}
