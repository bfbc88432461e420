/* Whether the kernel's out-of-memory killer has struck, and whom. */
#ifndef EVEN_OS_OOM_H
#define EVEN_OS_OOM_H

#include "os/cgroup.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { EVEN_OOM_MOST = 64 };

typedef struct even_oom_watch {
  int kernel_log; /* -1: may not be read */
  bool grouped;
  even_cgroup group; /* our memory group: its count is seen inside containers, where the log is not */
  uint64_t kills_before;
  pid_t victims[EVEN_OOM_MOST]; /* since it was opened */
  size_t victim_count;
  bool counted; /* the group's count has grown */
} even_oom_watch;

/* Begins to watch; what cannot be read is left out. */
void even_oom_watch_open(even_oom_watch *out);
/* Reads what came since. */
void even_oom_watch_read(even_oom_watch *watch);
bool even_oom_is_victim(const even_oom_watch *watch, pid_t pid);
void even_oom_watch_close(even_oom_watch *watch);
/* The process that a line of the kernel's log says was killed for memory, 0: none. */
pid_t even_oom_victim_of(const char *line);

#endif
