/* How a command that the user types beside a job (`evenstep drain`) reaches the agent that leads it: a Unix socket in
 * the run folder, mode 0600. The command writes one line of JSON; lines come back until one says how it ended:
 *
 *   {"command":"drain","host":"b"}
 *   {"text":"…"}                                 any number of them
 *   {"status":0,"text":"…","fix":""}             the last; status: an even_status */
#ifndef EVEN_ORCHESTRATOR_CONTROL_H
#define EVEN_ORCHESTRATOR_CONTROL_H

#include "base/text.h"
#include "os/loop.h"

#include <jansson.h>

#define EVEN_CONTROL_NAME "control"
enum { EVEN_CONTROL_MOST_LINE = 4096, EVEN_CONTROL_CLIENTS = 8, EVEN_CONTROL_SUBJECT = 128 };

typedef struct even_control even_control;

typedef struct even_control_client {
  even_control *control;
  int fd; /* -1: nobody */
  even_loop_watch watch;
  even_text in;
  bool waits;                         /* its command was taken: what comes of it is told later, */
  char subject[EVEN_CONTROL_SUBJECT]; /* by this name */
} even_control_client;

/* Takes a command. EVEN_OK: its outcome follows by even_control_end, under the name that it wrote into `subject`;
 * else the error is the outcome. */
typedef even_status even_control_call(void *context, const json_t *command, char subject[EVEN_CONTROL_SUBJECT]);

struct even_control {
  even_loop *loop;
  int listener; /* -1: closed */
  even_loop_watch watch;
  even_text path;
  even_control_client clients[EVEN_CONTROL_CLIENTS];
  void *context;
  even_control_call *call;
};

/* ---- the agent ---- */
/* `control` and `loop` stay in place until the close. After a failure it is closed. */
even_status even_control_open(even_control *control, even_loop *loop, const char *folder, even_control_call *call,
                              void *context) EVEN_MUST_USE;
/* Who still waits hears `words`. One that is zeroed, and was never opened, is allowed, here and below. */
void even_control_close(even_control *control, const char *words);
/* A line for those that wait for `subject`. */
void even_control_say(even_control *control, const char *subject, const char *words);
/* The last line for them. */
void even_control_end(even_control *control, const char *subject, even_status status, const char *words,
                      const char *fix);

/* ---- the command ---- */
/* Sends the line and hands each that comes back to `say`, the last one, where all went well, too. EVEN_ERR_NOT_FOUND:
 * no agent of this host leads a job with this run folder. EVEN_ERR_PEER_LOST: it ended before it answered. Else what
 * the agent says. */
even_status even_control_ask(const char *folder, const char *line, void (*say)(void *context, const char *words),
                             void *context) EVEN_MUST_USE;

#endif
