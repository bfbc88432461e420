/* Slurm's short form of many hosts' names ("rack[0-1]n[08-10,12],login"), written out. Pure. */
#ifndef EVEN_ORCHESTRATOR_HOSTLIST_H
#define EVEN_ORCHESTRATOR_HOSTLIST_H

#include "orchestrator/hosts.h"

typedef struct even_hostlist {
  char (*names)[EVEN_HOSTS_NAME];
  size_t count;
} even_hostlist;

/* In the order of `scontrol show hostnames`: of several brackets the last varies fastest, and a range has as many
 * digits as its beginning. EVEN_ERR_INPUT: it is no such list, or one of more than EVEN_HOSTS_MOST names. Free it with
 * even_hostlist_free, also after a failure. */
even_status even_hostlist_expand(const char *text, even_hostlist *out) EVEN_MUST_USE;
void even_hostlist_free(even_hostlist *list);

#endif
