/* Talking with a child program. */
#include "os/dialogue.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/pipe.h"
#include "os/signals.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* How our own programs begin the line that says what to do (cli/command.h). */
#define FIX "  fix: "

enum { COMPLAINT_LIMIT = 1 << 20, HEARD_LIMIT = 16 << 20 };

static void collect(even_dialogue *dialogue, even_loop_watch *watch, even_text *into, size_t limit) {
  char buffer[32768];
  size_t got = 0;
  even_pipe_state state = even_pipe_read(watch->fd, buffer, sizeof buffer, &got);
  if (state == EVEN_PIPE_DATA && into->length + got <= limit) {
    even_text_append(into, buffer, got);
  } else if (state == EVEN_PIPE_DATA && into == &dialogue->heard) {
    dialogue->overflowed = true; /* a line without its middle would be no answer */
  }
  if (state == EVEN_PIPE_ENDED) {
    even_loop_remove(&dialogue->loop, watch);
  }
}

static void output_ready(void *context, int fd) {
  even_dialogue *dialogue = context;
  (void)fd;
  collect(dialogue, &dialogue->output, &dialogue->heard, HEARD_LIMIT);
  dialogue->ended = dialogue->output.fd < 0;
}

static void error_ready(void *context, int fd) {
  even_dialogue *dialogue = context;
  (void)fd;
  collect(dialogue, &dialogue->error, &dialogue->complaint, COMPLAINT_LIMIT);
}

/* This process's environment with one line more; free the array only. */
static even_status environment_make(char *added, char ***out) {
  size_t count = 0;
  while (environ[count] != NULL) {
    count++;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(out, count + 2));
  memcpy(*out, environ, count * sizeof **out);
  (*out)[count] = added;
  return EVEN_OK;
}

static even_status child_start(char *const *arguments, int requests, bool typed, even_process *out) {
  char added[48];
  char **environment = NULL;
  (void)snprintf(added, sizeof added, "EVENSTEP_REQUESTS_FD=%d", requests);
  EVEN_TRY(environment_make(added, &environment));
  even_process_params params = {.arguments = arguments, .environment = environment};
  if (typed) {
    params.environment = environ;
    params.input = requests;
  } else {
    params.inherit = &requests;
    params.inherit_count = 1;
  }
  even_status status = even_process_start(&params, out);
  even_free(environment);
  return status;
}

static even_status watch_start(even_dialogue *out) {
  EVEN_TRY(even_signals_pipe_ignore(&out->pipe_before));
  EVEN_TRY(even_loop_open(&out->loop));
  EVEN_TRY(even_loop_add(&out->loop, &out->output, out->process.output, output_ready, out));
  return even_loop_add(&out->loop, &out->error, out->process.error, error_ready, out);
}

static even_status start(char *const *arguments, bool typed, even_dialogue *out) {
  int ends[2];
  *out = (even_dialogue){.requests = -1, .loop = {.fd = -1}, .output = {.fd = -1}, .error = {.fd = -1}};
  if (even_os.pipe2(ends, O_CLOEXEC) != 0) {
    return even_fail_errno(errno, "a pipe could not be made");
  }
  out->requests = ends[1];
  even_status status = child_start(arguments, ends[0], typed, &out->process);
  (void)even_os.close(ends[0]);
  if (status != EVEN_OK) {
    (void)even_os.close(ends[1]);
    return status;
  }
  status = watch_start(out);
  if (status != EVEN_OK) {
    even_dialogue_end(out);
  }
  return status;
}

even_status even_dialogue_start(char *const *arguments, even_dialogue *out) {
  return start(arguments, false, out);
}

even_status even_dialogue_start_typed(char *const *arguments, even_dialogue *out) {
  return start(arguments, true, out);
}

even_status even_dialogue_say(even_dialogue *dialogue, const char *line) {
  even_text whole = EVEN_TEXT_EMPTY;
  even_text_format(&whole, "%s\n", line);
  even_status status = even_text_status(&whole);
  if (status == EVEN_OK) {
    status = even_file_write_all(dialogue->requests, whole.data, whole.length);
  }
  even_text_free(&whole);
  return status;
}

/* Cuts the next whole line out of what was heard; NULL: none yet. At the end the rest counts as a line. */
static const char *line_take(even_dialogue *dialogue) {
  if (dialogue->taken >= dialogue->heard.length) {
    return NULL;
  }
  char *line = dialogue->heard.data + dialogue->taken;
  size_t from = dialogue->searched > dialogue->taken ? dialogue->searched : dialogue->taken;
  char *end = memchr(dialogue->heard.data + from, '\n', dialogue->heard.length - from);
  if (end == NULL && !dialogue->ended) {
    dialogue->searched = dialogue->heard.length;
    return NULL;
  }
  if (end == NULL) {
    dialogue->taken = dialogue->heard.length;
  } else {
    *end = '\0';
    dialogue->taken += (size_t)(end - line) + 1;
  }
  return line;
}

/* Makes room: the lines that were handed out go. */
static void forget_taken(even_dialogue *dialogue) {
  even_text *heard = &dialogue->heard;
  if (dialogue->taken > 0) {
    heard->length -= dialogue->taken;
    memmove(heard->data, heard->data + dialogue->taken, heard->length + 1); /* its NUL, too */
    dialogue->searched -= dialogue->searched > dialogue->taken ? dialogue->taken : dialogue->searched;
    dialogue->taken = 0;
  }
}

even_status even_dialogue_hear(even_dialogue *dialogue, int64_t timeout_ms, const char **line) {
  uint64_t start = even_clock_ns();
  for (;;) {
    *line = line_take(dialogue);
    if (*line == NULL && dialogue->overflowed) {
      return even_fail(EVEN_ERR_INPUT, "more than %d bytes came without an end of line", HEARD_LIMIT);
    }
    if (*line != NULL || dialogue->ended) {
      return even_text_status(&dialogue->heard);
    }
    int64_t passed_ms = (int64_t)((even_clock_ns() - start) / 1000000);
    if (passed_ms >= timeout_ms) {
      return even_fail(EVEN_ERR_TIMEOUT, "no answer within %.0f seconds", (double)timeout_ms / 1000);
    }
    int64_t left_ms = timeout_ms - passed_ms;
    forget_taken(dialogue);
    EVEN_TRY(even_loop_turn(&dialogue->loop, left_ms < 1000 ? (int)left_ms : 1000));
  }
}

/* Launchers draw lines of dashes around what they say. */
static bool says_something(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || ((unsigned char)c & 0x80) != 0;
}

typedef struct words {
  const char *at;
  size_t length; /* 0: there is no such line */
} words;

/* The last line of the first `before` bytes that says something. */
static words last_line(const char *text, size_t before) {
  size_t last = before;
  while (last > 0 && !says_something(text[last - 1])) {
    last--;
  }
  size_t end = last;
  while (text[end] != '\n' && text[end] != '\0') {
    end++;
  }
  while (end > last && text[end - 1] == ' ') {
    end--;
  }
  size_t start = last;
  while (start > 0 && text[start - 1] != '\n') {
    start--;
  }
  return (words){text + start, last == 0 ? 0 : end - start};
}

static bool is_fix(words line) {
  return line.length > sizeof FIX - 1 && strncmp(line.at, FIX, sizeof FIX - 1) == 0;
}

void even_dialogue_complaint(const even_dialogue *dialogue, char *out, size_t size) {
  const char *text = even_text_string(&dialogue->complaint);
  words line = last_line(text, strlen(text));
  if (is_fix(line)) {
    words before = last_line(text, (size_t)(line.at - text));
    line = before.length > 0 ? before : line;
  }
  (void)snprintf(out, size, "%.*s", (int)line.length, line.at);
}

void even_dialogue_fix(const even_dialogue *dialogue, char *out, size_t size) {
  const char *text = even_text_string(&dialogue->complaint);
  words line = last_line(text, strlen(text));
  size_t begins = is_fix(line) ? sizeof FIX - 1 : line.length;
  (void)snprintf(out, size, "%.*s", (int)(line.length - begins), line.at + begins);
}

void even_dialogue_finish(even_dialogue *dialogue) {
  if (dialogue->requests >= 0) {
    (void)even_os.close(dialogue->requests);
  }
  dialogue->requests = -1;
}

void even_dialogue_end(even_dialogue *dialogue) {
  even_dialogue_finish(dialogue);
  (void)even_process_signal_group(dialogue->process.pid, SIGKILL);
  even_process_wait(dialogue->process.pid);
  even_signals_pipe_restore(&dialogue->pipe_before);
  even_loop_close(&dialogue->loop);
  even_pipe_close(dialogue->process.output);
  even_pipe_close(dialogue->process.error);
  even_text_free(&dialogue->heard);
  even_text_free(&dialogue->complaint);
}
