/* Ranks that shall be slower than their devices are (`--cpu-quota`). */
#ifndef EVEN_ORCHESTRATOR_SLOWDOWN_H
#define EVEN_ORCHESTRATOR_SLOWDOWN_H

#include "device/device.h"
#include "os/cgroup.h"
#include "os/guardian.h"

typedef struct even_slowdown {
  size_t ranks; /* 0: nobody is slowed */
  even_guardian *guardian;
  even_cgroup *groups;                  /* a rank each; folder "" for none */
  char (*joins)[EVEN_CGROUP_PATH + 16]; /* the groups' cgroup.procs */
  pid_t *neighbours;
  size_t neighbour_count;
  char refused[640]; /* why no group could be made and neighbours are used instead, "" otherwise */
} even_slowdown;

/* Groups or neighbours for the ranks with a quota below 1 (quota NULL: none); the guardian hears of all. After a
 * failure close it, too. */
even_status even_slowdown_open(const even_device_list *devices, const double *quota, const char *job,
                               even_guardian *guardian, even_slowdown *out) EVEN_MUST_USE;
/* The cgroup.procs that the rank must join, NULL for none. */
const char *even_slowdown_join(const even_slowdown *slow, size_t rank);
/* Ends the neighbours, removes the groups (the ranks must have ended). */
void even_slowdown_close(even_slowdown *slow);

#endif
