/* Work of one call on several threads: each takes the next of its items until there are no more. */
#ifndef EVEN_CHECKPOINT_ITEMS_H
#define EVEN_CHECKPOINT_ITEMS_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

/* Two threads sum and copy as fast as the memory of a small host; more of them keep a disk busy. */
enum { EVEN_ITEMS_USUAL_THREADS = 4, EVEN_ITEMS_MOST_THREADS = 8 };

typedef struct even_items_job {
  size_t count; /* of items; each is done once, begun in their order */
  size_t most;  /* threads, at most EVEN_ITEMS_MOST_THREADS; those that cannot be had are done without */
  void *context;
  /* Memory of one thread, made by itself before its first item; NULL: none is needed. `close` takes NULL, too. */
  even_status (*open)(void *context, void **own);
  void (*close)(void *own);
  even_status (*work)(void *context, void *own, size_t item);
  const char
      *what; /* "interrupted while WHAT": for the thread that called, which asks (base/stop.h) before each item */
} even_items_job;

/* Returns when all threads have ended: with EVEN_OK, or the error of the first item that failed; items that nobody had
 * begun are then left. An item that fails with EVEN_ERR_CORRUPT gives way to a lower one that does, so that the damage
 * that is told is the first one. */
even_status even_items_run(const even_items_job *job) EVEN_MUST_USE;

#endif
