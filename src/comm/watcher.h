/* A thread of this process that looks at its groups over the network fifty times a second: what other ranks tell is
 * heard, and passed on, also while no thread of this rank is in a call. */
#ifndef EVEN_COMM_WATCHER_H
#define EVEN_COMM_WATCHER_H

#include <stdbool.h>

typedef struct even_watch {
  struct even_watch *next;
  void (*look)(void *context); /* returns soon, and neither adds nor removes a watch */
  void *context;
  _Atomic bool runs; /* somebody looks; even_watcher_add's */
} even_watch;

/* Begins to look. Without memory or a thread for it nobody looks: a group hears all in its calls alone. */
void even_watcher_add(even_watch *watch);
/* Looks at once, at all of them, on the calling thread, which holds no lock of a group and is in no look. Its
 * last error stays. */
void even_watcher_look(void);
/* Returns when no look is under way, and none follows. What was not added, or by a parent of this process, is left as
 * it is. */
void even_watcher_remove(even_watch *watch);

#endif
