/* A child program with which one talks in lines: requests go down a pipe, answers come from its standard output. */
#ifndef EVEN_OS_DIALOGUE_H
#define EVEN_OS_DIALOGUE_H

#include "base/text.h"
#include "os/loop.h"
#include "os/process.h"

#include <signal.h>

typedef struct even_dialogue {
  even_process process;
  int requests; /* write end; -1 when closed */
  even_loop loop;
  even_loop_watch output, error;
  even_text heard;     /* of its standard output, from `taken` on not yet handed out */
  even_text complaint; /* of its standard error */
  size_t taken;
  size_t searched;              /* up to here there is no end of a line, from `taken` on */
  bool overflowed;              /* a line was too long to be kept */
  bool ended;                   /* it closed its output */
  struct sigaction pipe_before; /* SIGPIPE is ignored meanwhile: a child that died must not take us along */
} even_dialogue;

/* Starts arguments[0] (looked for on PATH) with this process's environment and EVENSTEP_REQUESTS_FD, the descriptor
 * from which it may read requests. Pinned to nothing. Errors: those of even_process_start, EVEN_ERR_MEMORY,
 * EVEN_ERR_SYSTEM. After an error there is nothing to end. `out` must stay in place until even_dialogue_end. */
even_status even_dialogue_start(char *const *arguments, even_dialogue *out) EVEN_MUST_USE;
/* The same, where the requests are the child's standard input: for one that passes them on to another host. */
even_status even_dialogue_start_typed(char *const *arguments, even_dialogue *out) EVEN_MUST_USE;
/* Sends one line. EVEN_ERR_SYSTEM when the child reads no more. */
even_status even_dialogue_say(even_dialogue *dialogue, const char *line) EVEN_MUST_USE;
/* The next line without its newline: *line is valid until the next call, NULL when the child has closed its output.
 * EVEN_ERR_INPUT when 16 MiB came and no line ended, EVEN_ERR_TIMEOUT after `timeout_ms` without a whole line. */
even_status even_dialogue_hear(even_dialogue *dialogue, int64_t timeout_ms, const char **line) EVEN_MUST_USE;
/* The last line with a letter or a digit that it wrote to its standard error, "" without any: why it failed. Where that
 * says what to do ("  fix: …", as our own programs do), the one before it. Cut to fit. */
void even_dialogue_complaint(const even_dialogue *dialogue, char *out, size_t size);
/* What such a line says to do, "" where the last one is none. Cut to fit. */
void even_dialogue_fix(const even_dialogue *dialogue, char *out, size_t size);
/* Nothing more is asked: the child reads the end, and may end by itself. */
void even_dialogue_finish(even_dialogue *dialogue);
/* Ends the child (and what it started) at once and frees everything. */
void even_dialogue_end(even_dialogue *dialogue);

#endif
