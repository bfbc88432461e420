/* Non-blocking reads from pipes, and logs that grow at their end. */
#ifndef EVEN_OS_PIPE_H
#define EVEN_OS_PIPE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef enum even_pipe_state {
  EVEN_PIPE_DATA,  /* bytes were read */
  EVEN_PIPE_EMPTY, /* nothing there now */
  EVEN_PIPE_ENDED  /* no writer is left, or reading failed */
} even_pipe_state;

even_pipe_state even_pipe_read(int fd, void *buffer, size_t bytes, size_t *got);
void even_pipe_close(int fd);
/* Whether the other end is open and has written nothing that was not read. */
bool even_pipe_is_held(int fd);
/* This process's standard input is empty from now on; what it was is let go of, here alone. */
even_status even_pipe_empty_input(void) EVEN_MUST_USE;
/* A pipe, both ends close-on-exec: read from [0] what is written to [1]. */
even_status even_pipe_pair(int ends[2]) EVEN_MUST_USE;
/* Opens a file for appending, made where it is missing; close with even_pipe_close. */
even_status even_log_open(const char *path, int *fd) EVEN_MUST_USE;
/* The same, and from then on it is its owner's alone. */
even_status even_log_open_private(const char *path, int *fd) EVEN_MUST_USE;

#endif
