/* An event loop of one thread over epoll: descriptors, and a time limit for each turn. */
#ifndef EVEN_OS_LOOP_H
#define EVEN_OS_LOOP_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct even_loop {
  int fd; /* -1 when closed */
} even_loop;

/* Where a descriptor is watched. The caller owns the memory; it must stay in place until the turn of the loop in which
 * it was removed is over. */
typedef struct even_loop_watch {
  int fd; /* -1: not watched */
  void (*ready)(void *context, int fd);
  void *context;
} even_loop_watch;

even_status even_loop_open(even_loop *out) EVEN_MUST_USE;
void even_loop_close(even_loop *loop);
/* Calls ready(context, fd) in each turn in which `fd` can be read, or its other end is closed. */
even_status even_loop_add(even_loop *loop, even_loop_watch *watch, int fd, void (*ready)(void *context, int fd),
                          void *context) EVEN_MUST_USE;
/* Whether ready() is also called in each turn in which `fd` can be written to. */
even_status even_loop_writable(even_loop *loop, even_loop_watch *watch, bool wanted) EVEN_MUST_USE;
/* Forgets the descriptor (does not close it); fine when it is not watched. */
void even_loop_remove(even_loop *loop, even_loop_watch *watch);
/* One turn: waits at most `timeout_ms` for something to be ready and calls for all that is. */
even_status even_loop_turn(even_loop *loop, int timeout_ms) EVEN_MUST_USE;

#endif
