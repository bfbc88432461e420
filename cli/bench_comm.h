/* The parts of `evenstep bench comm`. */
#ifndef EVEN_CLI_BENCH_COMM_H
#define EVEN_CLI_BENCH_COMM_H

#include "base/text.h"

#include <evenstep/status.h>
#include <jansson.h>

/* bench_options.c: "1K,64K,1M" -> "1024,65536,1048576", appended to `out`. Sizes are 4 bytes to 1 GiB; K, M and G are
 * powers of 1024. EVEN_ERR_USAGE names what is no size. */
even_status even_bench_sizes(const char *text, even_text *out) EVEN_MUST_USE;
/* Whether each name of a list is a collective that is measured; EVEN_ERR_USAGE names the nearest one. */
even_status even_bench_collectives(const char *text) EVEN_MUST_USE;

/* bench_mpi.c: the same exchanges by the MPI of each interpreter (paths, with commas between them), on as many ranks.
 * *out has "rows", each of the MPI that was the fastest in it ("library"), and "each" what the ranks of each say; it is
 * NULL without any figures. `note` says of the last one without figures why. */
void even_bench_mpi(const char *pythons, const char *ranks, char *const *words, json_t **out, char *note,
                    size_t note_bytes);

/* bench_costs.c: whether there is a place to keep figures in (EVEN_ERR_USAGE); the figures into the table of
 * communication costs that the report names; what that table has of groups of the report's shape, as an array
 * (json_decref, also after a failure), empty where nothing is kept; and those on standard output. `mpi` may be NULL. */
even_status even_bench_costs_check(void) EVEN_MUST_USE;
even_status even_bench_costs_save(const json_t *report, const json_t *mpi) EVEN_MUST_USE;
even_status even_bench_costs_read(const json_t *report, json_t **kept) EVEN_MUST_USE;
void even_bench_costs_print(const json_t *report, const json_t *kept);

/* bench_table.c: the measured rows as a table on standard output. `mpi` may be NULL. */
void even_bench_print(const json_t *report, const json_t *mpi, const char *mpi_note);

#endif
