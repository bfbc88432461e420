/* A command that says by its exit code whether a machine ends soon (--notice-from exec:…), and by its output in how
 * many seconds: a child that the agent's loop reads, and nobody waits for. */
#ifndef EVEN_ORCHESTRATOR_NOTICE_COMMAND_H
#define EVEN_ORCHESTRATOR_NOTICE_COMMAND_H

#include "base/text.h"
#include "os/loop.h"
#include "os/process.h"

enum { EVEN_NOTICE_COMPLAINT = 200 };

typedef struct even_notice_command {
  even_loop *loop;
  even_process process; /* pid 0: none runs */
  even_loop_watch output;
  even_loop_watch error;
  even_text said;                        /* of its output, the beginning */
  char complaint[EVEN_NOTICE_COMPLAINT]; /* of its standard error, the beginning */
  bool killed;                           /* it took too long */
} even_notice_command;

/* Of one that never ran; even_notice_command_close is fine then. */
void even_notice_command_prepare(even_loop *loop, even_notice_command *out);
/* Has sh run `words`, with this process's environment and nothing to read; it must not move until its end, or until it
 * is closed. After an error nothing runs. */
even_status even_notice_command_start(even_notice_command *command, char *words) EVEN_MUST_USE;
/* Whether one runs, or is yet to be reaped. */
bool even_notice_command_lives(const even_notice_command *command);
/* It takes too long: its end is told as that of any child. */
void even_notice_command_kill(even_notice_command *command);
/* A child was reaped: whether it was this one, and has ended. *notice: by 0, and then `said` is whole. 1 is none,
 * nor is 22, by which curl -f says that an address answers with an error. The status says why it says nothing: killed,
 * ended by a signal, or with another code. */
bool even_notice_command_ended(even_notice_command *command, const even_process_end *end, bool *notice,
                               even_status *status);
/* Ends one that runs, waits a second for that, and frees what it said. False: it still lives. */
bool even_notice_command_close(even_notice_command *command);

#endif
