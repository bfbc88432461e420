/* How the leader reaches a host: the shell that runs the agent there, what it says, the invitation, its end. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "orchestrator/bring.h"
#include "orchestrator/outlast.h"
#include "os/host.h"
#include "os/pipe.h"
#include "os/process.h"
#include "os/socket.h"

#include <errno.h>
#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>

enum { MOST_WORDS = 64, SAID_BYTES = 4096 };

bool even_hosts_is_name(const char *text, size_t length) {
  static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@";
  return length > 0 && length < EVEN_HOSTS_NAME && text[0] != '-' && strspn(text, allowed) >= length;
}

static bool shell_said(even_host_agent *agent, int which) {
  char buffer[2048];
  size_t got = 0;
  even_loop_watch *watch = &agent->watches[which];
  even_pipe_state state = even_pipe_read(watch->fd, buffer, sizeof buffer, &got);
  if (state == EVEN_PIPE_DATA) {
    if (agent->said.length + got > SAID_BYTES) {
      even_text_clear(&agent->said);
    }
    even_text_append(&agent->said, buffer, got);
  } else if (state == EVEN_PIPE_ENDED) {
    int fd = watch->fd;
    even_loop_remove(&agent->hosts->loop, watch);
    even_pipe_close(fd);
  }
  return state == EVEN_PIPE_DATA;
}

static void output_ready(void *context, int fd) {
  (void)fd;
  (void)shell_said(context, 0);
}

static void error_ready(void *context, int fd) {
  (void)fd;
  (void)shell_said(context, 1);
}

/* Others may hold its standard error for longer than it lives (ssh's ControlMaster does). */
bool even_host_agent_shell_ended(even_host_agent *agent) {
  if (agent->shell.pid > 0 && !even_process_has_ended(agent->shell.pid)) {
    return false;
  }
  for (int which = 0; which < 2; which++) {
    while (agent->watches[which].fd >= 0 && shell_said(agent, which)) {
    }
  }
  return true;
}

void even_host_agent_last_words(const even_host_agent *agent, char *out, size_t bytes) {
  const char *text = even_text_string(&agent->said);
  size_t end = strlen(text);
  while (end > 0 && (text[end - 1] == '\n' || text[end - 1] == '\r' || text[end - 1] == ' ')) {
    end--;
  }
  size_t start = end;
  while (start > 0 && text[start - 1] != '\n') {
    start--;
  }
  (void)snprintf(out, bytes, "%.*s", (int)(end - start), text + start);
}

/* A word as a shell takes it for one; how long it would be, as snprintf. */
static size_t write_word(const char *word, char *out, size_t bytes) {
  size_t used = 0;
  if (word[0] != '\0' && strpbrk(word, " \t\n'\"\\`$&;|<>()*?[]{}#~!") == NULL) {
    return (size_t)snprintf(out, bytes, "%s", word);
  }
  used += (size_t)snprintf(out, bytes, "'");
  for (const char *at = word; *at != '\0' && used < bytes; at++) {
    used += (size_t)snprintf(out + used, bytes - used, "%s%c", *at == '\'' ? "'\\'" : "", *at);
  }
  return used < bytes ? used + (size_t)snprintf(out + used, bytes - used, "'") : used;
}

/* How many of the words that begin here keep ssh from asking. */
static size_t count_silencing(char *const *shell) {
  if (strcmp(shell[0], "-oBatchMode=yes") == 0) {
    return 1;
  }
  return strcmp(shell[0], "-o") == 0 && shell[1] != NULL && strcmp(shell[1], "BatchMode=yes") == 0 ? 2 : 0;
}

/* The user's shell in one line; `asks`: as somebody types it who can be asked. */
static void join_shell(char *const *shell, bool asks, char *out, size_t bytes) {
  size_t used = 0;
  out[0] = '\0';
  for (size_t i = 0; shell[i] != NULL && used < bytes; i++) {
    size_t silencing = asks ? count_silencing(shell + i) : 0;
    if (silencing > 0) {
      i += silencing - 1;
      continue;
    }
    if (used > 0) {
      used += (size_t)snprintf(out + used, bytes - used, " ");
    }
    used += used < bytes ? write_word(shell[i], out + used, bytes - used) : 0;
  }
  if (used >= bytes) { /* half a command would be another one */
    (void)snprintf(out, bytes, "%.100s …", shell[0]);
  }
}

void even_host_agent_say_way(const even_host_agent *agent, const char *said) {
  char *const *words = agent->hosts->params.shell;
  const char *program = agent->hosts->params.program;
  char shell[200];
  bool unknown = strstr(said, "Host key verification failed") != NULL;
  join_shell(words, unknown, shell, sizeof shell);
  if (unknown) {
    (void)even_error_fix("`%s %s true` here asks once whether its key is right, or says which one it had before", shell,
                         agent->name);
  } else if (strstr(said, "Permission denied (") != NULL) {
    (void)even_error_fix("ssh has to need no password: `ssh-copy-id %s`, or --ssh 'ssh -i KEY'; then try `%s %s true`",
                         agent->name, shell, agent->name);
  } else {
    (void)even_error_fix("try `%s %s %s --version` here; --ssh says how hosts are reached, --address where this one is",
                         shell, agent->name, program);
  }
}

/* Of one that is up, or that is not. */
static void add_interface(even_json *json, const even_interface *interface, bool up) {
  char addresses[sizeof interface->addresses];
  char *save = NULL;
  memcpy(addresses, interface->addresses, sizeof addresses);
  for (char *one = strtok_r(addresses, ", ", &save); one != NULL; one = strtok_r(NULL, ", ", &save)) {
    if (interface->up == up && !interface->loopback && strchr(one, ':') == NULL) {
      even_json_string(json, NULL, one);
    }
  }
}

/* Those of interfaces without a carrier, too: the cable that was cut may be mended while the agent looks for us. */
static even_status add_addresses(even_json *json, const even_hosts *hosts) {
  even_interface_list list = {NULL, 0};
  even_status status = EVEN_OK;
  even_json_array(json, "addresses");
  if (hosts->params.address != NULL) {
    even_json_string(json, NULL, hosts->params.address);
  } else {
    status = even_interface_list_read(&list);
    for (size_t i = 0; i < 2 * list.count; i++) {
      add_interface(json, &list.items[i % list.count], i < list.count);
    }
    even_json_string(json, NULL, "127.0.0.1");
  }
  even_interface_list_free(&list);
  even_json_array_end(json);
  return status;
}

even_status even_hosts_invitation(const even_hosts *hosts, size_t index, bool with_key, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "evenstep", even_version());
  even_json_string(&json, "key", with_key ? hosts->key_digits : NULL);
  even_json_integer(&json, "host", (int64_t)index);
  even_json_integer(&json, "port", hosts->port);
  even_json_number(&json, "patience_seconds", hosts->params.patience_seconds);
  even_json_integer(&json, "listens", hosts->join_port);
  even_json_bool(&json, "outlasts", even_outlast_hosts_would(hosts));
  EVEN_TRY(add_addresses(&json, hosts));
  even_json_object_end(&json);
  even_text_add(out, "\n");
  return even_text_status(out);
}

static even_status start_shell(even_host_agent *agent, int input) {
  char agent_word[] = "agent";
  char *words[MOST_WORDS + 4];
  size_t count = 0;
  char *const *shell = agent->hosts->params.shell;
  while (shell[count] != NULL) {
    if (count == MOST_WORDS) {
      return even_fail(EVEN_ERR_ARGUMENT, "a shell of more than %d words", MOST_WORDS);
    }
    words[count] = shell[count];
    count++;
  }
  words[count++] = agent->name;
  words[count++] = (char *)agent->hosts->params.program;
  words[count++] = agent_word;
  words[count] = NULL;
  const even_process_params params = {.arguments = words, .environment = environ, .input = input};
  return even_process_start(&params, &agent->shell);
}

static even_status say_invitation(const even_host_agent *agent) {
  even_text line = EVEN_TEXT_EMPTY;
  bool broken = false;
  int reason = 0;
  even_status status = even_hosts_invitation(agent->hosts, agent->index, true, &line);
  if (status == EVEN_OK) {
    /* smaller than a pipe's room; a shell that has ended already is told by its own last words */
    size_t written = even_socket_write(agent->input, line.data, line.length, &broken, &reason);
    if (broken ? reason != EPIPE : written < line.length) {
      status = even_fail_errno(broken ? reason : EAGAIN, "host %s: its agent's invitation could not be written",
                               agent->name);
    }
  }
  if (line.data != NULL) {
    explicit_bzero(line.data, line.length); /* the key */
  }
  even_text_free(&line);
  return status;
}

even_status even_host_agent_launch(even_host_agent *agent) {
  int ends[2] = {-1, -1};
  even_loop *loop = &agent->hosts->loop;
  if (agent->came) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s is lost (%.300s): it came by itself, and cannot be started from here",
                     agent->name, agent->lost_words);
  }
  if (agent->hosts->params.shell == NULL) {
    return agent->lost ? even_hosts_await_again(agent) : EVEN_OK;
  }
  EVEN_TRY(even_pipe_pair(ends));
  even_status status = start_shell(agent, ends[0]);
  even_pipe_close(ends[0]);
  if (status != EVEN_OK) {
    even_pipe_close(ends[1]);
    (void)even_error_prefix("host %s", agent->name);
    return status;
  }
  agent->input = ends[1];
  agent->lost = false;
  agent->notice.signal = 0; /* it was the one's before */
  agent->fits = false;
  status = even_loop_add(loop, &agent->watches[0], agent->shell.output, output_ready, agent);
  if (status == EVEN_OK) {
    status = even_loop_add(loop, &agent->watches[1], agent->shell.error, error_ready, agent);
  }
  return status == EVEN_OK ? say_invitation(agent) : status;
}

void even_host_agent_drop(even_host_agent *agent) {
  if (agent->link != NULL) {
    even_hosts_bury(agent->hosts, agent->link);
    agent->link = NULL;
    even_parcels_lost(agent->hosts->parcels, (int)agent->index);
  }
  even_bring_drop(agent);
  even_text_free(&agent->differs);
  even_pipe_close(agent->input);
  if (agent->shell.pid > 0) {
    (void)even_process_signal_group(agent->shell.pid, SIGKILL);
    even_process_wait(agent->shell.pid);
  }
  for (int i = 0; i < 2; i++) {
    int fd = agent->watches[i].fd;
    if (fd >= 0) {
      even_loop_remove(&agent->hosts->loop, &agent->watches[i]);
      even_pipe_close(fd);
    }
  }
  agent->input = -1;
  agent->fits = agent->renewed = false;
  agent->notice.signal = 0;
  agent->joins = false; /* another process has its own voter */
  agent->asked = false;
  agent->cannot_vote = false;
  agent->shell.pid = -1;
  even_text_free(&agent->said);
  agent->said = (even_text)EVEN_TEXT_EMPTY;
}
