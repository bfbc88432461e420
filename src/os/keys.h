/* Single keys from a terminal: no line, no echo, Ctrl-C as a key; and the terminal back as it was. */
#ifndef EVEN_OS_KEYS_H
#define EVEN_OS_KEYS_H

#include <evenstep/status.h>
#include <termios.h>

typedef struct even_keys {
  int fd; /* -1: not changed */
  struct termios before;
} even_keys;

/* Does nothing where `fd` is no terminal. */
even_status even_keys_open(int fd, even_keys *out) EVEN_MUST_USE;
void even_keys_close(even_keys *keys);
/* Reads one key that is there (the descriptor was reported readable); -1 at the end of input. */
int even_keys_next(int fd);

#endif
