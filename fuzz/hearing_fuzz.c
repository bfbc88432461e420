/* What a job hears from another host's agent (STARTED, STOPPED, HANG, HUNG, ENDED, SETTLED, HOLDS, FOUND, LINE, NOTICE,
 * FAILED, DRAIN, PLACED), what an agent hears from its leader (CHECK, CHECKPOINT, SEEK, SIGNAL, FILL, ADOPT, LEADER,
 * REFUSE), and what both do (WAITING), by the calls that take them. No file is there for these, no process starts, none
 * is signalled but the agent's two ranks by SIGNAL, nobody is connected: the table of calls (os/calls.h) says so. */
#include "checkpoint/reader.h"
#include "orchestrator/bring_back.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/remote.h"
#include "os/calls.h"

#include <errno.h>
#include <evenstep/checkpoint.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4, FIRST = 2, FILES = 2, PROCESS = 1 << 30 }; /* no system has so large a number of a process */

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

static bool may_signal; /* the ranks of the agent that is led */

static pid_t no_process(void) {
  errno = EAGAIN;
  return -1;
}

static int no_signal(pid_t pid, int signal) {
  pid_t own = pid < 0 ? -pid : pid;
  if (!may_signal || own < PROCESS + FIRST || own >= PROCESS + RANKS || signal < 1 || signal >= NSIG) {
    abort(); /* of what a message says alone */
  }
  return 0;
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

static void on_notice(void *context, const char *words) {
  (void)context;
  if (strlen(words) >= EVEN_JOB_NOTICE) {
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
  size_t alive = 0;
  for (int i = 0; i < RANKS; i++) { /* another host's words are of its own ranks */
    const even_job_rank *rank = &job->ranks[i];
    alive += rank->alive ? 1 : 0;
    if (i < FIRST && (rank->pid != 0 || rank->out_of_memory || rank->hung || rank->stands || rank->alive)) {
      abort();
    }
  }
  if (job->alive != alive || job->ended != RANKS - FIRST - alive || job->stage > EVEN_JOB_KILLED) {
    abort();
  }
  if (agent->next.placed && agent->next.devices.count != agent->next.count) {
    abort();
  }
  if (even_bring_state(agent, NULL) == EVEN_BRING_HOLDS && even_text_string(&agent->resume)[0] != '/') {
    abort();
  }
}

static bool is_for_leader(even_message_kind kind) {
  return kind == EVEN_MESSAGE_STARTED || kind == EVEN_MESSAGE_STOPPED || kind == EVEN_MESSAGE_HANG ||
         kind == EVEN_MESSAGE_HUNG || kind == EVEN_MESSAGE_ENDED || kind == EVEN_MESSAGE_SETTLED ||
         kind == EVEN_MESSAGE_HOLDS || kind == EVEN_MESSAGE_FOUND || kind == EVEN_MESSAGE_LINE ||
         kind == EVEN_MESSAGE_NOTICE || kind == EVEN_MESSAGE_FAILED || kind == EVEN_MESSAGE_DRAIN ||
         kind == EVEN_MESSAGE_PLACED || kind == EVEN_MESSAGE_WAITING;
}

static bool is_for_agent(even_message_kind kind) {
  return kind == EVEN_MESSAGE_CHECK || kind == EVEN_MESSAGE_CHECKPOINT || kind == EVEN_MESSAGE_SEEK ||
         kind == EVEN_MESSAGE_SIGNAL || kind == EVEN_MESSAGE_FILL || kind == EVEN_MESSAGE_ADOPT ||
         kind == EVEN_MESSAGE_LEADER || kind == EVEN_MESSAGE_REFUSE || kind == EVEN_MESSAGE_WAITING;
}

static void tell(even_host_agent *agent, const even_message *message) {
  static even_elastic drained = {.move = {.number = 1}};
  agent->hosts->elastic = message->kind == EVEN_MESSAGE_PLACED ? &drained : NULL; /* hosts change for that alone */
  agent->next.asked = true;
  agent->next.count = RANKS - FIRST;
  drained.move.failure.status = EVEN_OK;
  (void)!even_hosts_job_message(agent, message);
  check_leader(agent->hosts->job, agent);
}

/* In the state in which an agent hears such a message: while its ranks run, while they are held, or as it comes. */
static void hear(even_follower *follower, const even_message *message) {
  static const even_join_wish wish = {.ranks = 0};
  if (message->kind == EVEN_MESSAGE_ADOPT) {
    even_follower_close_parcels(follower);
  } else if ((message->kind == EVEN_MESSAGE_CHECKPOINT || message->kind == EVEN_MESSAGE_SEEK) &&
             even_follower_open_parcels(follower) != EVEN_OK) {
    return;
  }
  follower->held = message->kind == EVEN_MESSAGE_ADOPT;
  may_signal = message->kind == EVEN_MESSAGE_SIGNAL;
  follower->running = may_signal || message->kind == EVEN_MESSAGE_FILL || message->kind == EVEN_MESSAGE_WAITING;
  follower->joins = message->kind == EVEN_MESSAGE_LEADER ? &wish : NULL;
  follower->taken = follower->taken && message->kind != EVEN_MESSAGE_LEADER;
  even_status status = even_follower_hear(follower, &follower->link, message);
  may_signal = false;
  bool named = follower->parcels != NULL || (status == EVEN_OK && message->kind == EVEN_MESSAGE_ADOPT);
  if (named && (follower->host < 0 || follower->host >= EVEN_FOLLOWER_MOST_NUMBERS)) {
    abort();
  }
  if (follower->recalled < 0 || follower->recalled >= NSIG || follower->job.stage > EVEN_JOB_KILLED) {
    abort();
  }
}

/* The one that is there: no other file is. */
static void bring(even_host_agent *agent) {
  even_os = even_os_real;
  if (even_bring_begin(agent->hosts->job, agent, folder, true, false) != EVEN_OK) {
    abort();
  }
  close_off();
}

/* The host is asked for what it has, once. */
static void seek(even_host_agent *agent) {
  static const even_bring_back_wish wish = {.after = "", .job = "", .lineage = "", .until = "", .any = true};
  even_bring_back *back = NULL;
  if (even_bring_back_open(agent->hosts->job, &wish, &back) != EVEN_OK || even_bring_back_ask(back) != EVEN_OK) {
    abort();
  }
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
    if (message.kind == EVEN_MESSAGE_FOUND && agent->hosts->back == NULL) {
      seek(agent);
    }
    if (is_for_leader(message.kind)) {
      tell(agent, &message);
    }
    if (is_for_agent(message.kind)) {
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

/* Two ranks that live: another host's as its leader sees them, or as their own agent does. */
static void begin(even_job *job, bool elsewhere) {
  job->count = RANKS;
  job->generation_fd = -1;
  job->alive = RANKS - FIRST;
  for (int i = FIRST; i < RANKS; i++) {
    job->ranks[i] =
        (even_job_rank){.alive = true,
                        .elsewhere = elsewhere,
                        .pid = elsewhere ? 0 : PROCESS + i,
                        .output = {.rank = i, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}}};
  }
}

static void end_ranks(even_job *job) {
  for (int i = 0; i < RANKS; i++) {
    even_text_free(&job->ranks[i].output.streams[0].tail);
    even_text_free(&job->ranks[i].output.streams[1].tail);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static even_follower follower; /* large, and its records stay zero */
  static even_device devices[RANKS] = {{.name = "cpu"}, {.name = "cpu"}, {.name = "cpu"}, {.name = "cpu"}};
  static const even_device_list listed = {devices, RANKS};
  static const even_agent_params params = {
      .notice_seconds = 5,
      .devices = &listed,
      .observer = {.rank_started = on_started, .hang = on_hang, .line = on_line, .notice = on_notice}};
  even_job_rank ranks[2][RANKS] = {{{0}}};
  even_rank_progress progress[2][RANKS] = {{{0}}};
  size_t order[RANKS];
  even_link link = {.fd = -1, .peer = "10.0.0.2"};
  even_hosts hosts = {.params = {.program = "evenstep"}, .listener = -1};
  even_host_agent agents[2] = {{.name = "here"}, {.index = 1, .name = "there", .link = &link, .first = FIRST}};
  even_job job = {.params = &params,
                  .ranks = ranks[0],
                  .local = FIRST,
                  .hosts = &hosts,
                  .order = order,
                  .progress = {.ranks = progress[0]}};
  const even_parcels_params between = {.size = sizeof between, .count = 2, .way = way};
  begin(&job, true);
  agents[1].hosts = &hosts;
  agents[1].count = RANKS - FIRST;
  agents[1].fits = true;
  hosts.agents = agents;
  hosts.count = 2;
  hosts.job = &job;
  follower.link = (even_link){.fd = -1, .peer = "10.0.0.1"};
  follower.host = 1;
  follower.job = (even_job){.params = &params,
                            .ranks = ranks[1],
                            .progress = {.ranks = progress[1]},
                            .first = FIRST,
                            .local = RANKS - FIRST,
                            .follower = &follower};
  begin(&follower.job, false);
  atomic_store(&follower.signals, 0);
  if (even_parcels_open(&between, &hosts.parcels) != EVEN_OK) {
    abort();
  }
  close_off();
  tell_all(&agents[1], &follower, data, size);
  even_os = even_os_real;
  end_ranks(&job);
  even_parcels_close(hosts.parcels);
  even_bring_drop(&agents[1]);
  if (hosts.back != NULL) {
    even_bring_back_close(hosts.back);
  }
  even_device_list_free(&agents[1].next.devices);
  even_follower_close_parcels(&follower);
  even_bring_kept_free(&follower.kept);
  even_device_list_free(&follower.own);
  even_device_list_free(&follower.whole);
  even_text_free(&follower.facts);
  even_text_free(&follower.folder);
  json_decref(follower.pointed);
  follower.pointed = NULL;
  return 0;
}
