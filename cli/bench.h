/* The parts of `evenstep bench comm`. */
#ifndef EVEN_CLI_BENCH_H
#define EVEN_CLI_BENCH_H

#include "base/text.h"

#include <evenstep/status.h>
#include <jansson.h>

/* bench_options.c: "1K,64K,1M" -> "1024,65536,1048576", appended to `out`. Sizes are 4 bytes to 1 GiB; K, M and G are
 * powers of 1024. EVEN_ERR_USAGE names what is no size. */
even_status even_bench_sizes(const char *text, even_text *out) EVEN_MUST_USE;
/* Whether each name of a list is a collective that is measured; EVEN_ERR_USAGE names the nearest one. */
even_status even_bench_collectives(const char *text) EVEN_MUST_USE;

/* bench_mpi.c: the same exchanges by the MPI that is found, on as many ranks; *out is what its ranks say, NULL without
 * an MPI or figures of it, and `note` why. */
void even_bench_mpi(const char *python, const char *ranks, char *const *words, json_t **out, char *note,
                    size_t note_bytes);

/* bench_table.c: the measured rows as a table on standard output. `mpi` may be NULL. */
void even_bench_print(const json_t *report, const json_t *mpi, const char *mpi_note);

#endif
