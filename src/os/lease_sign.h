/* What the sign in a run folder says (os/lease.h). For os/lease.c, and for who holds no lease but works for one. */
#ifndef EVEN_OS_LEASE_SIGN_H
#define EVEN_OS_LEASE_SIGN_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

enum { EVEN_LEASE_MOST_TEXT = 768, EVEN_LEASE_MOST_LINE = 256 };

typedef struct even_lease_look {
  bool there;
  char text[EVEN_LEASE_MOST_TEXT];
  struct timespec changed;
  struct timespec written;
} even_lease_look;

/* What a sign says; "" where it does not. */
typedef struct even_lease_holder {
  char identity[EVEN_LEASE_MOST_LINE];
  char host[EVEN_LEASE_MOST_LINE];
  char process[EVEN_LEASE_MOST_LINE];
  char owner[EVEN_LEASE_MOST_LINE];
  uint64_t turn;
} even_lease_holder;

void even_lease_read_holder(const char *text, even_lease_holder *out);
/* "host NAME (process NUMBER)". */
void even_lease_add_holder(const even_lease_holder *it, even_text *out);
/* Opened anew: what this host remembers of the file may be old. `own`: the text of the sign whose time is moved on the
 * way; NULL: none is. No file is no error. */
even_status even_lease_look_at(const char *path, const char *own, even_lease_look *out) EVEN_MUST_USE;
/* EVEN_ERR_IN_USE, and who has the folder in place of who made the sign `own`: the sign `taker`, "" for none. */
even_status even_lease_tell_lost(const char *folder, const char *own, const char *taker) EVEN_MUST_USE;

/* Where a job keeps a sign, for a process that works for it: looks whether that is the job's still, also after the
 * process stood still for long. `owner`: as in even_lease_params; either may be NULL or "" for a job that keeps none,
 * of which nothing is asked. EVEN_ERR_IN_USE: another job has the folder, although this process saw its own job's sign
 * there before. Who never saw that may see another folder of that name (on a disk of its host's own), where what an
 * earlier job left says nothing. What cannot be looked at, or is gone, is not lost. Any thread. */
even_status even_lease_is_of(const char *folder, const char *owner) EVEN_MUST_USE;
/* Whether this process has seen its job's sign, now or before. */
bool even_lease_is_known(const char *folder, const char *owner);
/* Another process of the job has seen it, on this host: from now on it counts as seen here. */
void even_lease_heed(void);

#endif
