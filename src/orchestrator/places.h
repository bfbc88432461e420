/* Where the ranks of a host that is drained go: how many each of the other hosts has then. Pure: numbers in, numbers
 * out.
 *
 * A host has as many places as it has GPUs, or, without any, cores; a place is left where no rank has it. A number that
 * the user gives (`--to b:4`) is taken as it is, also where ranks share cores then. */
#ifndef EVEN_ORCHESTRATOR_PLACES_H
#define EVEN_ORCHESTRATOR_PLACES_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_places_host {
  const char *name;
  size_t ranks;  /* that it has now; 0: it is new */
  size_t places; /* that it has in all; 0: not known */
  bool leaves;   /* it is drained */
  bool named;    /* by --to */
  size_t wish;   /* so many of the drained ranks, by the user's word; 0: he leaves it open */
  size_t gets;   /* so many of them go there */
} even_places_host;

/* Shares out the ranks of those that leave. Where the user named hosts: first what he said of each, the rest evenly
 * among those of which he said nothing. Where he named none: one after the other to the host with most places left;
 * those for which there is none go nowhere. *moved of them have a place. EVEN_ERR_USAGE: a host that leaves is named,
 * or more places than there are ranks. */
even_status even_places_share(even_places_host *hosts, size_t count, size_t *moved) EVEN_MUST_USE;

#endif
