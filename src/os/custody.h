/* What a process that starts others in turn, each in the last one's place (supervisor.h), keeps for them: descriptors,
 * each under two numbers, and how processes have ended that an earlier one had started. A child says over a socket what
 * is to be kept. The next one has all of that from its beginning, as a child has what its parent has, and hears over
 * its own socket how those end that it cannot wait for itself, since they are its parent's by then. */
#ifndef EVEN_OS_CUSTODY_H
#define EVEN_OS_CUSTODY_H

#include "os/process.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What is kept under this kind, or a greater one, is kept where all else is dropped, too: until it is dropped by its
 * numbers, or the custody is closed. */
enum { EVEN_CUSTODY_STAYS = 1 << 16 };

typedef struct even_custody_item {
  uint32_t kind;   /* 0: a process, whose number is `number` */
  uint32_t number; /* of its kind */
  int fd;          /* -1: a process; in a child, one that was claimed, too */
  bool ended;      /* the process */
  bool told;       /* of its end, over the socket */
  even_process_end end;
} even_custody_item;

typedef struct even_custody {
  int socket;  /* in the parent its child's, in a child its parent's; -1: there is none */
  bool broken; /* something was to be kept that could not be: what there is, is not all */
  even_custody_item *items;
  size_t count;
} even_custody;

void even_custody_open(even_custody *out);
/* Closes what is kept, too. */
void even_custody_close(even_custody *custody);

/* ---- the parent, of one thread ---- */

/* Before it forks: *child is to be given to even_custody_join there, and closed here. */
even_status even_custody_begin(even_custody *custody, int *child) EVEN_MUST_USE;
/* Does what the child asks for; waits for nothing. Also once it has ended, for what it asked for before. */
void even_custody_hear(even_custody *custody);
/* A process that is no child's has ended, was stopped or goes on. */
void even_custody_tell(even_custody *custody, const even_process_end *end);
/* Keeps nothing any more but what stays. */
void even_custody_release(even_custody *custody);

/* ---- a child. Where the socket is full its parent is waited for, a tenth of a second at most: then keeping fails ----
 */

void even_custody_join(even_custody *custody, int child);
/* A copy of `fd` is kept; kind > 0. What was kept under these numbers is no more. */
even_status even_custody_keep(even_custody *custody, uint32_t kind, uint32_t number, int fd) EVEN_MUST_USE;
/* It is to be known how this process ends. */
even_status even_custody_watch(even_custody *custody, pid_t pid) EVEN_MUST_USE;
/* What is kept under these numbers (kind 0: a process) is to be kept no more. */
even_status even_custody_drop(even_custody *custody, uint32_t kind, uint32_t number) EVEN_MUST_USE;
even_status even_custody_drop_all(even_custody *custody) EVEN_MUST_USE;
/* A descriptor that was kept when this child was started: the caller's, close-on-exec, and kept on; -1: there is none,
 * or it was claimed. */
int even_custody_claim(even_custody *custody, uint32_t kind, uint32_t number);
/* The next news of processes that are watched; false: none now. */
bool even_custody_next(even_custody *custody, even_process_end *out);

#endif
