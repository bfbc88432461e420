/* sh -c, with a limit for what it says. */
#include "orchestrator/notice_command.h"

#include "base/fail.h"
#include "os/pipe.h"

#include <signal.h>
#include <string.h>

/* READS: at most in one call. CURL_FAILS: "HTTP page not retrieved" (curl(1), exit codes, 22): 404, where nothing is.
 */
enum { MOST_SAID = 4096, READS = 8, NOTICE = 0, NONE = 1, CURL_FAILS = 22 };

static const uint64_t CLOSE_NS = 1000000000u;

void even_notice_command_prepare(even_loop *loop, even_notice_command *out) {
  *out = (even_notice_command){
      .loop = loop, .process = {.output = -1, .error = -1}, .output = {.fd = -1}, .error = {.fd = -1}};
}

static void leave(even_notice_command *command, even_loop_watch *watch, int *fd) {
  even_loop_remove(command->loop, watch);
  even_pipe_close(*fd);
  *fd = -1;
}

static void leave_both(even_notice_command *command) {
  leave(command, &command->output, &command->process.output);
  leave(command, &command->error, &command->process.error);
}

static void keep_said(even_notice_command *command, const char *bytes, size_t count) {
  if (command->said.length + count <= MOST_SAID) {
    even_text_append(&command->said, bytes, count);
  }
}

static void keep_complaint(even_notice_command *command, const char *bytes, size_t count) {
  size_t kept = count < sizeof command->complaint ? count : sizeof command->complaint - 1;
  if (command->complaint[0] == '\0') {
    memcpy(command->complaint, bytes, kept);
    command->complaint[kept] = '\0';
  }
}

/* What is there now; beyond the limits it is thrown away. */
static void read_on(even_notice_command *command, even_loop_watch *watch, int *fd,
                    void (*keep)(even_notice_command *, const char *, size_t)) {
  char buffer[4096];
  size_t got = 0;
  even_pipe_state state = *fd < 0 ? EVEN_PIPE_EMPTY : EVEN_PIPE_DATA;
  for (int reads = 0; reads < READS && state == EVEN_PIPE_DATA; reads++) {
    state = even_pipe_read(*fd, buffer, sizeof buffer, &got);
    if (state == EVEN_PIPE_DATA) {
      keep(command, buffer, got);
    }
  }
  if (state == EVEN_PIPE_ENDED) {
    leave(command, watch, fd);
  }
}

static void on_output(void *context, int fd) {
  even_notice_command *command = context;
  (void)fd;
  read_on(command, &command->output, &command->process.output, keep_said);
}

static void on_error(void *context, int fd) {
  even_notice_command *command = context;
  (void)fd;
  read_on(command, &command->error, &command->process.error, keep_complaint);
}

static even_status start(even_notice_command *command, char *words) {
  char shell[] = "/bin/sh";
  char option[] = "-c";
  char *arguments[] = {shell, option, words, NULL};
  const even_process_params params = {.arguments = arguments, .environment = environ, .no_input = true};
  EVEN_TRY(even_process_start(&params, &command->process));
  EVEN_TRY(even_loop_add(command->loop, &command->output, command->process.output, on_output, command));
  return even_loop_add(command->loop, &command->error, command->process.error, on_error, command);
}

even_status even_notice_command_start(even_notice_command *command, char *words) {
  command->complaint[0] = '\0';
  command->killed = false;
  even_text_clear(&command->said);
  even_status status = start(command, words);
  if (status != EVEN_OK) {
    const even_error why = *even_error_last();
    (void)!even_notice_command_close(command);
    return even_error_restore(&why);
  }
  return EVEN_OK;
}

bool even_notice_command_lives(const even_notice_command *command) {
  return command->process.pid > 0;
}

void even_notice_command_kill(even_notice_command *command) {
  command->killed = true;
  (void)even_process_signal_group(command->process.pid, SIGKILL);
}

static even_status outcome(const even_notice_command *command, const even_process_end *end, bool *notice) {
  if (command->killed) {
    return even_fail(EVEN_ERR_TIMEOUT, "the command takes too long");
  }
  if (end->signal != 0) {
    return even_fail(EVEN_ERR_INPUT, "the command was ended by signal %d", end->signal);
  }
  if (end->code != NOTICE && end->code != NONE && end->code != CURL_FAILS) {
    return even_fail(EVEN_ERR_INPUT, "the command ended with code %d: %s", end->code, command->complaint);
  }
  *notice = end->code == NOTICE;
  return even_text_status(&command->said);
}

bool even_notice_command_ended(even_notice_command *command, const even_process_end *end, bool *notice,
                               even_status *status) {
  *notice = false;
  if (command->process.pid <= 0 || end->pid != command->process.pid || end->stopped || end->continued) {
    return false;
  }
  command->process.pid = 0;
  on_output(command, -1);
  on_error(command, -1);
  leave_both(command);
  *status = outcome(command, end, notice);
  return true;
}

bool even_notice_command_close(even_notice_command *command) {
  bool ended = true;
  if (command->process.pid > 0) {
    (void)even_process_signal_group(command->process.pid, SIGKILL);
    ended = even_process_wait_within(command->process.pid, CLOSE_NS);
    command->process.pid = 0;
  }
  leave_both(command);
  even_text_free(&command->said);
  return ended;
}
