/* Control groups: groups with a CPU quota for ranks, and what the kernel counted in them. */
#ifndef EVEN_OS_CGROUP_H
#define EVEN_OS_CGROUP_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

enum { EVEN_CGROUP_PATH = 512 };

/* The group of this process under one controller. */
typedef struct even_cgroup {
  int version;                   /* 1 or 2 */
  bool switched_on;              /* made: and the controller was switched on in its parent for that */
  char folder[EVEN_CGROUP_PATH]; /* where it is mounted */
} even_cgroup;

/* The group in which this process is under `controller` ("cpu", "memory"); version 1 is looked at first. `root` is put
 * before /proc and the mount points ("" for this host). EVEN_ERR_UNSUPPORTED: no hierarchy with it is mounted. */
even_status even_cgroup_own(const char *root, const char *controller, even_cgroup *out) EVEN_MUST_USE;

/* The group `name` below `parent`; one that is there already is kept (names are a job's own). Under version 2 the
 * controller is switched on for the parent's children first. EVEN_ERR_PERMISSION, EVEN_ERR_IN_USE where the kernel
 * refuses, EVEN_ERR_OVERFLOW where the path is longer than EVEN_CGROUP_PATH: all is then as before, out->folder is
 * empty, and the caller does without. */
even_status even_cgroup_make(const even_cgroup *parent, const char *controller, const char *name,
                             even_cgroup *out) EVEN_MUST_USE;
/* After the groups made were removed: switches the controller off in the parent again, where `group` had it switched on
 * and the parent has no other children, which may rely on it by now. */
void even_cgroup_switch_off(const even_cgroup *group, const char *controller);
/* Lets the group have `cores` CPU seconds a second, dealt out in periods of 10 ms, so that a small share does not come
 * in long stops (with the kernel's own 100 ms a quarter of a core stands still for 75 ms at a time). */
even_status even_cgroup_limit_cpu(const even_cgroup *group, double cores) EVEN_MUST_USE;
/* How often the out-of-memory killer has struck in a memory group; 0 where it does not say. */
uint64_t even_cgroup_oom_kills(const even_cgroup *group);
/* Removes an empty group; one that is gone is fine. Members that were just killed are waited for, for a second at most
 * in all: each tells its end, and only for what the kernel does behind that (nothing tells of it under version 1) it is
 * tried again after 5 ms. Allocates nothing. */
even_status even_cgroup_remove(const char *folder) EVEN_MUST_USE;

#endif
