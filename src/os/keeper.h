/* A process that outlives this one, however it ends, and then removes a folder that must not stay: files of a memory
 * file system go with nobody's end by themselves. */
#ifndef EVEN_OS_KEEPER_H
#define EVEN_OS_KEEPER_H

#include <evenstep/status.h>
#include <sys/types.h>

typedef struct even_keeper {
  pid_t pid; /* -1: none */
  int pipe;  /* its other end; the keeper begins when nobody holds it any more */
} even_keeper;

/* Forks it. It removes the folder, the files in it, and the folders in it with their files; what lies deeper stays. It
 * goes on for some seconds while others write there. It has a session of its own, and cannot be ended by a terminal or
 * a plain `kill`. */
even_status even_keeper_start(const char *folder, even_keeper *out) EVEN_MUST_USE;
/* Of one that an earlier process has started, whose end of the pipe is `pipe`, and who is gone: it is this one's from
 * now on. */
void even_keeper_take(pid_t pid, int pipe, even_keeper *out);
/* Lets it do so now, and waits until it has, also where others hold the pipe, too. */
void even_keeper_stop(even_keeper *keeper);

#endif
