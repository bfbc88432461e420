/* Lines over a Unix socket, both ends. */
#include "orchestrator/control.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "os/file.h"
#include "os/local_socket.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

/* ---- the agent ---- */

static void drop(even_control_client *client) {
  even_loop_remove(client->control->loop, &client->watch);
  even_pipe_close(client->fd);
  even_text_free(&client->in);
  client->in = (even_text)EVEN_TEXT_EMPTY;
  client->fd = -1;
  client->waits = false;
}

/* Short lines, far below what a socket holds; one who does not read them does not get them. */
static void write_line(const even_control_client *client, even_text *line) {
  bool broken = false;
  int reason = 0;
  even_text_add(line, "\n");
  if (even_text_status(line) == EVEN_OK) {
    (void)even_socket_write(client->fd, line->data, line->length, &broken, &reason);
  }
  even_text_free(line);
}

static void say(const even_control_client *client, const char *words) {
  even_text line = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&line, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "text", words);
  even_json_object_end(&json);
  write_line(client, &line);
}

static void end(even_control_client *client, even_status status, const char *words, const char *fix) {
  even_text line = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&line, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "status", status);
  even_json_string(&json, "text", words);
  even_json_string(&json, "fix", fix);
  even_json_object_end(&json);
  write_line(client, &line);
  drop(client);
}

static void end_with_error(even_control_client *client) {
  const even_error error = *even_error_last();
  end(client, error.status, error.what, error.fix);
  even_error_clear();
}

static void take_line(even_control_client *client, size_t length) {
  even_control *control = client->control;
  json_t *command = NULL;
  even_status status = even_json_parse("the command", client->in.data, length, &command);
  if (status == EVEN_OK) {
    client->subject[0] = '\0';
    status = control->call(control->context, command, client->subject);
  }
  json_decref(command);
  even_text_clear(&client->in);
  client->waits = status == EVEN_OK;
  if (status != EVEN_OK) {
    end_with_error(client);
  }
}

static void on_words(void *context, int fd) {
  even_control_client *client = context;
  char buffer[1024];
  size_t got = 0;
  int reason = 0;
  even_pipe_state state = even_socket_read(fd, buffer, sizeof buffer, &got, &reason);
  if (state == EVEN_PIPE_ENDED) {
    drop(client); /* what it asked for stands */
    return;
  }
  if (state != EVEN_PIPE_DATA || client->waits) {
    return;
  }
  even_text_append(&client->in, buffer, got);
  const char *newline =
      even_text_status(&client->in) == EVEN_OK ? memchr(client->in.data, '\n', client->in.length) : NULL;
  if (newline != NULL) {
    take_line(client, (size_t)(newline - client->in.data));
  } else if (even_text_status(&client->in) != EVEN_OK || client->in.length > EVEN_CONTROL_MOST_LINE) {
    (void)even_fail(EVEN_ERR_INPUT, "a command of more than %d bytes", EVEN_CONTROL_MOST_LINE);
    end_with_error(client);
  }
}

static void on_connection(void *context, int fd) {
  even_control *control = context;
  int made = -1;
  if (even_local_socket_accept(fd, &made) != EVEN_OK || made < 0) {
    even_error_clear();
    return;
  }
  for (size_t i = 0; i < EVEN_CONTROL_CLIENTS; i++) {
    even_control_client *client = &control->clients[i];
    if (client->fd < 0) {
      client->fd = made;
      if (even_loop_add(control->loop, &client->watch, made, on_words, client) != EVEN_OK) {
        even_error_clear();
        drop(client);
      }
      return;
    }
  }
  even_pipe_close(made); /* so many at once are no user's */
}

even_status even_control_open(even_control *control, even_loop *loop, const char *folder, even_control_call *call,
                              void *context) {
  *control = (even_control){.loop = loop, .listener = -1, .watch = {.fd = -1}, .call = call, .context = context};
  for (size_t i = 0; i < EVEN_CONTROL_CLIENTS; i++) {
    control->clients[i] = (even_control_client){.control = control, .fd = -1, .watch = {.fd = -1}};
  }
  even_text_format(&control->path, "%s/" EVEN_CONTROL_NAME, folder);
  even_status status = even_text_status(&control->path);
  if (status == EVEN_OK) {
    status = even_local_socket_listen(folder, EVEN_CONTROL_NAME, &control->listener);
  }
  if (status == EVEN_OK) {
    status = even_loop_add(loop, &control->watch, control->listener, on_connection, control);
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    even_control_close(control, "");
    (void)even_error_restore(&kept);
  }
  return status;
}

void even_control_close(even_control *control, const char *words) {
  for (size_t i = 0; i < EVEN_CONTROL_CLIENTS && control->loop != NULL; i++) {
    even_control_client *client = &control->clients[i];
    if (client->fd >= 0 && client->waits) {
      end(client, EVEN_ERR_PEER_LOST, words, "");
    } else if (client->fd >= 0) {
      drop(client);
    }
  }
  if (control->loop != NULL && control->listener >= 0) {
    even_loop_remove(control->loop, &control->watch);
    even_pipe_close(control->listener);
    if (even_file_remove(even_text_string(&control->path)) != EVEN_OK) {
      even_error_clear(); /* who connects to it is told that nobody listens */
    }
  }
  control->listener = -1;
  control->loop = NULL;
  even_text_free(&control->path);
  control->path = (even_text)EVEN_TEXT_EMPTY;
}

static bool awaits(const even_control_client *client, const char *subject) {
  return client->fd >= 0 && client->waits && strcmp(client->subject, subject) == 0;
}

void even_control_say(even_control *control, const char *subject, const char *words) {
  for (size_t i = 0; control->loop != NULL && i < EVEN_CONTROL_CLIENTS; i++) {
    if (awaits(&control->clients[i], subject)) {
      say(&control->clients[i], words);
    }
  }
}

void even_control_end(even_control *control, const char *subject, even_status status, const char *words,
                      const char *fix) {
  for (size_t i = 0; control->loop != NULL && i < EVEN_CONTROL_CLIENTS; i++) {
    if (awaits(&control->clients[i], subject)) {
      end(&control->clients[i], status, words, fix);
    }
  }
}

/* ---- the command ---- */

static even_status send_line(int fd, const char *line) {
  bool broken = false;
  int reason = 0;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "%s\n", line);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK && even_socket_write(fd, text.data, text.length, &broken, &reason) != text.length) {
    status = even_fail(EVEN_ERR_PEER_LOST, "the job's agent takes no command");
  }
  even_text_free(&text);
  return status;
}

/* *over: it was the last line, and its status is what this returns. */
static even_status take_answer(const char *line, size_t length, void (*tell)(void *context, const char *words),
                               void *context, bool *over) {
  json_t *answer = NULL;
  EVEN_TRY(even_json_parse("the agent's answer", line, length, &answer));
  const json_t *code = json_object_get(answer, "status");
  const char *words = json_string_value(json_object_get(answer, "text"));
  const char *fix = json_string_value(json_object_get(answer, "fix"));
  json_int_t number = json_integer_value(code);
  even_status status = EVEN_OK;
  *over = json_is_integer(code);
  if (number != EVEN_OK) {
    bool known = number > EVEN_OK && number <= EVEN_ERR_INTERRUPTED;
    (void)even_fail(known ? (even_status)number : EVEN_ERR_SYSTEM, "%.560s", words == NULL ? "" : words);
    status = even_error_fix("%s", fix == NULL ? "" : fix);
  } else if (words != NULL && words[0] != '\0') {
    tell(context, words);
  }
  json_decref(answer);
  return status;
}

static even_status read_answers(int fd, void (*tell)(void *context, const char *words), void *context) {
  even_text in = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  bool over = false;
  while (status == EVEN_OK && !over) {
    char buffer[1024];
    size_t got = 0;
    int reason = 0;
    even_pipe_state state = even_socket_read(fd, buffer, sizeof buffer, &got, &reason);
    if (state == EVEN_PIPE_ENDED || in.length > 2 * EVEN_CONTROL_MOST_LINE) {
      status = even_fail(EVEN_ERR_PEER_LOST, "the job has ended, or its agent, before it answered");
      break;
    }
    even_text_append(&in, buffer, state == EVEN_PIPE_DATA ? got : 0);
    status = even_text_status(&in);
    const char *newline = NULL;
    while (status == EVEN_OK && !over && (newline = memchr(in.data, '\n', in.length)) != NULL) {
      size_t length = (size_t)(newline - in.data);
      status = take_answer(in.data, length, tell, context, &over);
      in.length -= length + 1;
      memmove(in.data, newline + 1, in.length);
    }
  }
  even_text_free(&in);
  return status;
}

even_status even_control_ask(const char *folder, const char *line, void (*tell)(void *context, const char *words),
                             void *context) {
  struct sigaction pipe_before;
  int fd = -1;
  EVEN_TRY(even_local_socket_connect(folder, EVEN_CONTROL_NAME, &fd));
  even_status status = even_signals_pipe_ignore(&pipe_before); /* of an agent that ends meanwhile */
  if (status == EVEN_OK) {
    status = send_line(fd, line);
    if (status == EVEN_OK) {
      status = read_answers(fd, tell, context);
    }
    even_signals_pipe_restore(&pipe_before);
  }
  even_pipe_close(fd);
  return status;
}
