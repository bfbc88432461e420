/* Ranks that shall be slower than their devices are (`--cpu-quota`). */
#ifndef EVEN_ORCHESTRATOR_SLOWDOWN_H
#define EVEN_ORCHESTRATOR_SLOWDOWN_H

#include "device/device.h"
#include "os/cgroup.h"
#include "os/guardian.h"

#include <stdbool.h>
#include <sys/types.h>

typedef struct even_slowdown {
  size_t ranks; /* 0: nobody is slowed */
  even_guardian *guardian;
  even_cgroup *groups;                  /* a rank each; folder "" for none */
  char (*joins)[EVEN_CGROUP_PATH + 16]; /* the groups' cgroup.procs */
  struct even_neighbour {
    pid_t pid;
    size_t rank; /* that it slows */
  } *neighbours;
  size_t neighbour_count;
  char refused[640]; /* why no group could be made and neighbours are used instead, "" otherwise */
} even_slowdown;

/* Groups or neighbours for the ranks with a quota below 1 (quota NULL: none); the guardian hears of all. After a
 * failure close it, too. EVEN_ERR_UNSUPPORTED: no group may be made, and neighbours would slow others than the rank,
 * for it is not pinned or another rank has one of its CPUs, too. */
even_status even_slowdown_open(const even_device_list *devices, const double *quota, bool pinned, const char *job,
                               even_guardian *guardian, even_slowdown *out) EVEN_MUST_USE;
/* The cgroup.procs that the rank must join, NULL for none. */
const char *even_slowdown_join(const even_slowdown *slow, size_t rank);
/* Tells the guardian of all groups and neighbours once more: it is a new one. */
even_status even_slowdown_tell(const even_slowdown *slow) EVEN_MUST_USE;
/* A child was reaped: whether it was a neighbour (of *rank). Its number is another's from now on: it is forgotten. */
bool even_slowdown_forget(even_slowdown *slow, pid_t pid, size_t *rank);
/* Ends the neighbours, removes the groups (the ranks must have ended). */
void even_slowdown_close(even_slowdown *slow);

#endif
