/* What a job hears from another host's agent (STARTED, HANG, SETTLED, HOLDS, LINE, NOTICE, FAILED, DRAIN), and what an
 * agent is asked by its leader (CHECK, CHECKPOINT), by the calls that take them. No file is there for these, no process
 * starts and none is signalled, nobody is connected: the table of calls (os/calls.h) says so. */
#include "base/json_reader.h"
#include "checkpoint/reader.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/remote.h"
#include "os/calls.h"

#include <errno.h>
#include <evenstep/checkpoint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4, FIRST = 2, FILES = 2 };

static char place[] = "/tmp/evenstep-fuzz-XXXXXX";
static char folder[sizeof place + 8];

/* ---- a host on which nothing can be done ---- */

static int no_file(const char *path, int flags, mode_t mode) {
  (void)path;
  (void)flags;
  (void)mode;
  errno = ENOENT;
  return -1;
}

static int no_access(const char *path, int mode) {
  (void)path;
  (void)mode;
  errno = ENOENT;
  return -1;
}

static int no_change(const char *path) {
  (void)path;
  errno = EROFS;
  return -1;
}

static int no_folder(const char *path, mode_t mode) {
  (void)mode;
  return no_change(path);
}

static int no_name(const char *from, const char *to) {
  (void)to;
  return no_change(from);
}

static pid_t no_process(void) {
  errno = EAGAIN;
  return -1;
}

static int no_signal(pid_t pid, int signal) {
  (void)pid;
  (void)signal;
  abort(); /* of what a message says alone */
}

static int no_pidfd_signal(int pidfd, int signal) {
  return no_signal(pidfd, signal);
}

static int no_socket(int domain, int type, int protocol) {
  (void)domain;
  (void)type;
  (void)protocol;
  errno = EAFNOSUPPORT;
  return -1;
}

static void *no_library(const char *name, int flags) {
  (void)name;
  (void)flags;
  return NULL;
}

static void close_off(void) {
  even_os.open = no_file;
  even_os.access = no_access;
  even_os.chdir = even_os.unlink = even_os.rmdir = no_change;
  even_os.mkdir = no_folder;
  even_os.rename = even_os.link = even_os.exchange = no_name;
  even_os.fork = no_process;
  even_os.kill = even_os.sigqueue = no_signal;
  even_os.pidfd_send_signal = no_pidfd_signal;
  even_os.socket = no_socket;
  even_os.dlopen = no_library;
}

/* ---- a job of two hosts ---- */

static void on_started(void *context, int rank, pid_t pid) {
  (void)context;
  (void)pid;
  if (rank < FIRST || rank >= RANKS) {
    abort();
  }
}

static void on_hang(void *context, int rank, bool over, const char *words) {
  (void)context;
  (void)over;
  if (rank < FIRST || rank >= RANKS || words == NULL) {
    abort();
  }
}

static void on_line(void *context, int rank, bool error, const char *line, size_t length) {
  (void)context;
  (void)error;
  (void)line;
  (void)length;
  if (rank < FIRST || rank >= RANKS) {
    abort();
  }
}

/* To nowhere: what is sent there is dropped. */
static even_link *way(void *context, int host) {
  static even_link link = {.fd = -1, .peer = "10.0.0.2"};
  (void)context;
  (void)host;
  return &link;
}

static void check_leader(const even_job *job, const even_host_agent *agent) {
  for (int i = 0; i < FIRST; i++) { /* another host's words are of its own ranks */
    if (job->ranks[i].pid != 0 || job->ranks[i].out_of_memory || job->ranks[i].hung) {
      abort();
    }
  }
  if (even_bring_state(agent, NULL) == EVEN_BRING_HOLDS && even_text_string(&agent->resume)[0] != '/') {
    abort();
  }
}

static bool is_for_leader(even_message_kind kind) {
  return kind == EVEN_MESSAGE_STARTED || kind == EVEN_MESSAGE_HANG || kind == EVEN_MESSAGE_SETTLED ||
         kind == EVEN_MESSAGE_HOLDS || kind == EVEN_MESSAGE_LINE || kind == EVEN_MESSAGE_NOTICE ||
         kind == EVEN_MESSAGE_FAILED || kind == EVEN_MESSAGE_DRAIN;
}

static void hear(even_follower *follower, const even_message *message) {
  json_t *content = NULL;
  if (even_json_parse("what the leader says", message->json, message->json_bytes, &content) != EVEN_OK) {
    return;
  }
  if (message->kind == EVEN_MESSAGE_CHECK) {
    (void)!even_follower_check(follower, content);
  } else if (even_follower_open_parcels(follower) == EVEN_OK) {
    (void)!even_bring_take_hear(follower->brings, content);
  }
  if (follower->parcels != NULL && (follower->host < 0 || follower->host >= EVEN_FOLLOWER_MOST_NUMBERS)) {
    abort();
  }
  json_decref(content);
}

/* The one that is there: no other file is. */
static void bring(even_host_agent *agent) {
  even_os = even_os_real;
  if (even_bring_begin(agent->hosts->job, agent, folder, true, false) != EVEN_OK) {
    abort();
  }
  close_off();
}

static void tell_all(even_host_agent *agent, even_follower *follower, const uint8_t *data, size_t size) {
  size_t used = 0;
  size_t wanted = 0;
  even_message message;
  for (size_t at = 0; even_message_next(data + at, size - at, &message, &used, &wanted) == EVEN_OK && used > 0;
       at += used) {
    if (message.kind == EVEN_MESSAGE_HOLDS && agent->bring == NULL) {
      bring(agent);
    }
    if (is_for_leader(message.kind)) {
      (void)!even_hosts_job_message(agent, &message);
      check_leader(agent->hosts->job, agent);
    } else if (message.kind == EVEN_MESSAGE_CHECK || message.kind == EVEN_MESSAGE_CHECKPOINT) {
      hear(follower, &message);
    }
  }
}

/* ---- the checkpoint that is being brought to that host ---- */

static void write_checkpoint(void) {
  static const int64_t shape[] = {8};
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_params params = {.size = sizeof params, .folder = folder};
  const even_checkpoint_tensor tensor = {"a", "U8", shape, 1, "abcdefgh", 8};
  if (mkdtemp(place) == NULL) {
    abort();
  }
  (void)snprintf(folder, sizeof folder, "%s/step-1", place);
  bool fine = even_checkpoint_writer_open(&params, &writer) == EVEN_OK;
  for (int i = 0; fine && i < FILES; i++) {
    const even_checkpoint_file file = {
        .size = sizeof file, .name = i == 0 ? "a.safetensors" : "b.safetensors", .tensors = &tensor, .tensor_count = 1};
    fine = even_checkpoint_writer_add(writer, &file) == EVEN_OK;
  }
  if (!fine || even_checkpoint_writer_commit(writer, "{}") != EVEN_OK) {
    abort();
  }
}

static void remove_checkpoint(void) {
  even_os = even_os_real;
  (void)!even_checkpoint_remove(folder);
  (void)rmdir(place);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
  (void)argc;
  (void)argv;
  (void)setenv("HWLOC_SYNTHETIC", "core:2 pu:1", 1); /* devices of no machine, found at once */
  write_checkpoint();
  return atexit(remove_checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static even_follower follower; /* large, and its records stay zero */
  static const even_agent_params params = {.notice_seconds = 5,
                                           .observer = {.rank_started = on_started, .hang = on_hang, .line = on_line}};
  even_job_rank ranks[RANKS] = {0};
  even_link link = {.fd = -1, .peer = "10.0.0.2"};
  even_hosts hosts = {.params = {.program = "evenstep"}, .listener = -1};
  even_host_agent agents[2] = {{.name = "here"}, {.index = 1, .name = "there", .link = &link, .first = FIRST}};
  even_job job = {
      .params = &params, .ranks = ranks, .count = RANKS, .local = FIRST, .hosts = &hosts, .generation_fd = -1};
  const even_parcels_params between = {.size = sizeof between, .count = 2, .way = way};
  agents[1].hosts = &hosts;
  agents[1].count = RANKS - FIRST;
  hosts.agents = agents;
  hosts.count = 2;
  hosts.job = &job;
  follower.link = (even_link){.fd = -1, .peer = "10.0.0.1"};
  follower.host = 1;
  if (even_parcels_open(&between, &hosts.parcels) != EVEN_OK) {
    abort();
  }
  close_off();
  tell_all(&agents[1], &follower, data, size);
  even_os = even_os_real;
  even_parcels_close(hosts.parcels);
  even_bring_drop(&agents[1]);
  even_follower_close_parcels(&follower);
  even_bring_kept_free(&follower.kept);
  even_device_list_free(&follower.own);
  even_device_list_free(&follower.whole);
  even_text_free(&follower.facts);
  even_text_free(&follower.folder);
  return 0;
}
