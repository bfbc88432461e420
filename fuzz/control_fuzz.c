/* The line that a command (`evenstep drain`) writes to the agent that leads a job, over its socket, in pieces as the
 * agent reads them: what a drain is planned by, in a job of three hosts. No host is reached by ssh, and no process
 * starts: a plan is made, or refused, and answered. */
#include "base/json_reader.h"
#include "orchestrator/control.h"
#include "orchestrator/elastic.h"
#include "orchestrator/remote.h"
#include "os/calls.h"
#include "os/local_socket.h"

#include <errno.h>
#include <evenstep/telemetry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HOSTS = 3, EACH = 2, RANKS = HOSTS * EACH, TURNS = 8 };

static char folder[] = "/tmp/evenstep-fuzz-XXXXXX";
static even_host_agent agents[HOSTS] = {
    {.name = "here"}, {.index = 1, .name = "b", .places = 3}, {.index = 2, .name = "c#2", .places = 8}};
static even_elastic elastic;
static even_progress progress; /* ranks that could be asked to save their state */
static even_hosts hosts = {.agents = agents, .count = HOSTS, .listener = -1, .elastic = &elastic};

static pid_t no_process(void) {
  abort(); /* nobody is to be started by a plan among hosts that are there */
}

static void on_notice(void *context, const char *words) {
  (void)context;
  if (strlen(words) >= EVEN_JOB_NOTICE) {
    abort();
  }
}

static void close_all(void) {
  even_os = even_os_real;
  even_control_close(&elastic.control, "");
  even_loop_close(&hosts.loop);
  even_progress_close(&progress);
  (void)rmdir(folder);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
  (void)argc;
  (void)argv;
  int fd = -1;
  if (mkdtemp(folder) == NULL || even_loop_open(&hosts.loop) != EVEN_OK ||
      even_telemetry_create_segment(RANKS, 16, &fd) != EVEN_OK || even_progress_open(fd, RANKS, &progress) != EVEN_OK) {
    abort();
  }
  (void)close(fd);
  return atexit(close_all);
}

/* The answer, where there is one: a line of JSON with a status and words. */
static void read_answer(int fd) {
  char answer[8192];
  json_t *content = NULL;
  ssize_t got = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
  if (got <= 0) {
    return;
  }
  if (answer[got - 1] != '\n' || even_json_parse("the answer", answer, (size_t)got, &content) != EVEN_OK ||
      !json_is_integer(json_object_get(content, "status")) || even_json_text(content, "text")[0] == '\0') {
    abort();
  }
  json_decref(content);
}

/* Every rank of the job has a place, and none has two. */
static void check_plan(void) {
  size_t ranks = 0;
  if (elastic.move.stage == EVEN_MOVE_NONE) {
    return;
  }
  for (size_t i = 0; i < HOSTS; i++) {
    bool leaves = strcmp(agents[i].name, elastic.move.from) == 0;
    ranks += leaves ? 0 : agents[i].next.count;
    if (leaves ? i == 0 : agents[i].next.count < EACH) {
      abort();
    }
  }
  if (ranks < RANKS - EACH || ranks > RANKS) {
    abort();
  }
}

static void begin(even_job *job) {
  elastic.move = (even_move){.stage = EVEN_MOVE_NONE};
  for (size_t i = 0; i < HOSTS; i++) {
    agents[i].hosts = &hosts;
    agents[i].first = i * EACH;
    agents[i].count = EACH;
    agents[i].leaves = false;
    agents[i].next = (even_host_next){.asked = false};
  }
  hosts.job = job;
  even_elastic_begin(job); /* the socket stays for all inputs */
  if (elastic.control.loop == NULL) {
    abort();
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static even_device devices[RANKS] = {{.name = "cpu"}, {.name = "cpu"}, {.name = "cpu"},
                                       {.name = "cpu"}, {.name = "cpu"}, {.name = "cpu"}};
  static const even_device_list listed = {devices, RANKS};
  static const even_agent_params params = {.devices = &listed, .observer = {.notice = on_notice}};
  even_job_rank ranks[RANKS] = {{0}};
  even_job job = {.params = &params,
                  .ranks = ranks,
                  .count = RANKS,
                  .local = EACH,
                  .hosts = &hosts,
                  .generation_fd = -1,
                  .run_folder = {.data = folder, .length = sizeof folder - 1},
                  .progress = progress};
  int fd = -1;
  begin(&job);
  if (even_local_socket_connect(folder, EVEN_CONTROL_NAME, &fd) != EVEN_OK ||
      send(fd, data, size, MSG_NOSIGNAL) != (ssize_t)size) {
    abort();
  }
  even_os.fork = no_process;
  for (int i = 0; i < TURNS; i++) {
    (void)!even_loop_turn(&hosts.loop, 0);
  }
  even_os = even_os_real;
  check_plan();
  read_answer(fd);
  (void)close(fd);
  (void)!even_loop_turn(&hosts.loop, 0);
  for (size_t i = 0; i < EVEN_CONTROL_CLIENTS; i++) {
    if (elastic.control.clients[i].fd >= 0) {
      abort(); /* whoever has gone has let its place go */
    }
  }
  return 0;
}
