/* Starts processes of the next attempt, reads what they print until they are taken, and lets them go on. */
#include "orchestrator/warm.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "os/socket.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

enum { CHUNK = 16384, MOST_SAID = 1 << 20, MOST_REST = 60000 }; /* the last: what a pipe holds */

static const char speeds[] = "EVENSTEP_SPEEDS=";

typedef struct warm_rank {
  even_loop *loop;
  pid_t pid; /* -1: none, or it was taken, or reaped */
  int go;    /* what is written there lets it go on; -1: none */
  bool waits;
  bool ended;
  even_loop_watch ready;
  even_loop_watch streams[2];
  even_text said[2];
} warm_rank;

struct even_warm {
  even_rank_place place; /* its texts are those below, and it has no devices */
  size_t world;
  char address[64];
  char interface[32];
  char job[40];
  size_t count;
  warm_rank *ranks;
};

/* ---- what they say ---- */

static void stop_watching(warm_rank *rank, even_loop_watch *watch, bool closes) {
  int fd = watch->fd;
  if (fd >= 0) {
    even_loop_remove(rank->loop, watch);
    watch->fd = -1;
    if (closes) {
      even_pipe_close(fd);
    }
  }
}

/* Who has printed so much is not heard until it is taken: it stands still then, as before any pipe that nobody reads.
 */
static void read_stream(warm_rank *rank, int which, int fd) {
  char buffer[CHUNK];
  size_t got = 0;
  even_pipe_state state = EVEN_PIPE_DATA;
  while (state == EVEN_PIPE_DATA && rank->said[which].length < MOST_SAID) {
    state = even_pipe_read(fd, buffer, sizeof buffer, &got);
    if (state == EVEN_PIPE_DATA) {
      even_text_append(&rank->said[which], buffer, got);
    }
  }
  if (state != EVEN_PIPE_EMPTY) {
    even_loop_remove(rank->loop, &rank->streams[which]); /* the descriptor stays: who takes it sees its end */
    rank->streams[which].fd = fd;
  }
}

static void output_ready(void *context, int fd) {
  read_stream(context, 0, fd);
}

static void error_ready(void *context, int fd) {
  read_stream(context, 1, fd);
}

static void is_ready(void *context, int fd) {
  warm_rank *rank = context;
  char byte = 0;
  size_t got = 0;
  if (even_pipe_read(fd, &byte, 1, &got) == EVEN_PIPE_DATA) {
    rank->waits = true;
  } else {
    rank->ended = rank->ended || !rank->waits;
  }
  stop_watching(rank, &rank->ready, true);
}

size_t even_warm_settled(const even_warm *warm) {
  size_t settled = 0;
  for (size_t i = 0; warm != NULL && i < warm->count; i++) {
    settled += warm->ranks[i].waits || warm->ranks[i].ended;
  }
  return settled;
}

size_t even_warm_lost(const even_warm *warm) {
  size_t lost = 0;
  for (size_t i = 0; warm != NULL && i < warm->count; i++) {
    lost += warm->ranks[i].ended;
  }
  return lost;
}

/* ---- starting ---- */

static even_status make_environment(const even_warm_params *params, const even_rank_place *place, int go, int ready,
                                    even_environment *out) {
  char pipes[32];
  (void)snprintf(pipes, sizeof pipes, "%d,%d", go, ready);
  EVEN_TRY(even_environment_of_rank(place, environ, params->environment, out));
  even_status status = even_environment_set(out, "EVENSTEP_AWAITS", pipes);
  if (status == EVEN_OK) {
    status = even_environment_put(out, speeds); /* of this attempt's ranks */
  }
  if (status != EVEN_OK) {
    even_environment_free(out);
  }
  return status;
}

static even_status start_process(const even_warm_params *params, const even_rank_place *place, int go, int ready,
                                 even_process *out) {
  const even_device *device = &place->devices->items[place->rank];
  const int inherit[2] = {go, ready};
  even_environment environment;
  EVEN_TRY(make_environment(params, place, go, ready, &environment));
  even_process_params process = {.arguments = params->command,
                                 .environment = environment.lines,
                                 .cpus = device->cpus,
                                 .cpu_count = params->unpinned ? 0 : device->cpu_count,
                                 .inherit = inherit,
                                 .inherit_count = 2,
                                 .descriptors = params->descriptors,
                                 .ignored = params->ignored};
  even_status status = even_process_start(&process, out);
  even_environment_free(&environment);
  return status;
}

/* One that cannot be watched is closed with the rank all the same. */
static even_status watch(warm_rank *rank, even_loop_watch *watch, void (*ready)(void *context, int fd)) {
  int fd = watch->fd;
  even_status status = even_loop_add(rank->loop, watch, fd, ready, rank);
  watch->fd = fd;
  return status;
}

static even_status watch_all(warm_rank *rank) {
  EVEN_TRY(watch(rank, &rank->ready, is_ready));
  EVEN_TRY(watch(rank, &rank->streams[0], output_ready));
  return watch(rank, &rank->streams[1], error_ready);
}

static even_status start_rank(const even_warm_params *params, const even_rank_place *place, warm_rank *rank) {
  int go[2] = {-1, -1};
  int ready[2] = {-1, -1};
  even_process process = {.pid = -1, .output = -1, .error = -1};
  even_status status = even_pipe_pair(go);
  if (status == EVEN_OK) {
    status = even_pipe_pair(ready);
  }
  if (status == EVEN_OK) {
    status = start_process(params, place, go[0], ready[1], &process);
  }
  even_pipe_close(go[0]);
  even_pipe_close(ready[1]);
  rank->go = go[1];
  if (status != EVEN_OK) {
    even_pipe_close(ready[0]);
    return status;
  }
  rank->pid = process.pid;
  rank->ready.fd = ready[0];
  rank->streams[0].fd = process.output;
  rank->streams[1].fd = process.error;
  return watch_all(rank);
}

static even_status make(const even_warm_params *params, even_warm **out) {
  EVEN_TRY(EVEN_NEW(out));
  even_warm *warm = *out;
  warm->place = params->place;
  warm->place.devices = NULL;
  warm->world = params->world;
  (void)snprintf(warm->address, sizeof warm->address, "%s", params->place.master_address);
  (void)snprintf(warm->interface, sizeof warm->interface, "%s", params->place.interface);
  (void)snprintf(warm->job, sizeof warm->job, "%s", params->place.job);
  warm->count = (size_t)params->place.local;
  even_status status = EVEN_NEW_ARRAY(&warm->ranks, warm->count);
  for (size_t i = 0; status == EVEN_OK && i < warm->count; i++) {
    warm->ranks[i] = (warm_rank){
        .loop = params->loop, .pid = -1, .go = -1, .ready = {.fd = -1}, .streams = {{.fd = -1}, {.fd = -1}}};
  }
  return status;
}

/* The devices of all ranks, of which only their own are looked at. */
static even_status make_world(const even_warm_params *params, even_device_list *out) {
  *out = (even_device_list){NULL, params->world};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, params->world));
  for (size_t i = 0; i < params->own->count; i++) {
    out->items[(size_t)params->place.first + i] = params->own->items[i];
  }
  return EVEN_OK;
}

static even_status start_all(const even_warm_params *params, even_warm *warm) {
  even_device_list world;
  even_rank_place place = params->place;
  EVEN_TRY(make_world(params, &world));
  place.devices = &world;
  even_status status = EVEN_OK;
  for (size_t i = 0; status == EVEN_OK && i < warm->count; i++) {
    place.rank = params->place.first + (int)i;
    status = start_rank(params, &place, &warm->ranks[i]);
  }
  even_free(world.items); /* what it points to is the caller's */
  return status;
}

even_status even_warm_start(const even_warm_params *params, even_warm **out) {
  even_warm *warm = NULL;
  *out = NULL;
  even_status status = make(params, &warm);
  if (status == EVEN_OK) {
    status = start_all(params, warm);
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    even_warm_close(warm);
    return even_error_restore(&kept);
  }
  *out = warm;
  return EVEN_OK;
}

/* ---- taking ---- */

static bool is_same_place(const even_warm *warm, const even_rank_place *place) {
  const even_rank_place *own = &warm->place;
  return warm->world == place->devices->count && own->first == place->first && own->local == place->local &&
         own->group == place->group && own->groups == place->groups && own->era == place->era &&
         own->master_port == place->master_port && own->attempt == place->attempt &&
         strcmp(warm->address, place->master_address) == 0 && strcmp(warm->interface, place->interface) == 0 &&
         strcmp(warm->job, place->job) == 0;
}

static void add_path(even_json *json, const char *name, int fd) {
  char path[48];
  if (fd >= 0) {
    (void)snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)even_own_process(), fd);
    even_json_string(json, name, path);
  }
}

/* All others it has had since its start, and its script may have set them since. */
static void add_variables(even_json *json, const even_rank_place *place, char *const *extra) {
  if (place->resume != NULL) {
    even_json_string(json, "EVENSTEP_RESUME", place->resume);
  }
  if (place->shortages != NULL) {
    even_json_string(json, "EVENSTEP_MEMORY_CAPS", place->shortages);
  }
  if (place->memory != NULL) {
    even_json_string(json, "EVENSTEP_CHECKPOINT_MEMORY", place->memory);
  }
  if (place->sign_seen) {
    even_json_string(json, "EVENSTEP_RUN_SIGN_SEEN", "1");
  }
  if (place->turn > 0) {
    char turn[24];
    (void)snprintf(turn, sizeof turn, "%lld", (long long)place->turn);
    even_json_string(json, "EVENSTEP_CHECKPOINT_TURN", turn);
  }
  for (size_t i = 0; extra != NULL && extra[i] != NULL; i++) { /* what the leader says of its attempt */
    static const char *const names[] = {"EVENSTEP_SPEEDS", "EVENSTEP_MEMORY_CAPS", "EVENSTEP_CHECKPOINT_TURN"};
    for (size_t at = 0; at < sizeof names / sizeof names[0]; at++) {
      size_t length = strlen(names[at]);
      if (strncmp(extra[i], names[at], length) == 0 && extra[i][length] == '=') {
        even_json_string(json, names[at], extra[i] + length + 1);
      }
    }
  }
}

static even_status write_rest(const even_rank_place *place, char *const *extra, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_object(&json, "set");
  add_variables(&json, place, extra);
  even_json_object_end(&json);
  even_json_object(&json, "open");
  add_path(&json, "EVENSTEP_TELEMETRY_FD", place->telemetry_fd);
  add_path(&json, "EVENSTEP_SNAPSHOT_FD", place->snapshot_fd);
  add_path(&json, "EVENSTEP_GENERATION_FD", place->generation_fd);
  add_path(&json, "EVENSTEP_STANDING_FD", place->standing_fd > 0 ? place->standing_fd : -1);
  even_json_object_end(&json);
  even_json_object_end(&json);
  even_text_add(out, "\n");
  return even_text_status(out);
}

/* Smaller than a pipe's room, or it is not taken: none waits for another one to read. */
static bool tell_rest(const warm_rank *rank, const even_rank_place *place, char *const *extra) {
  even_text text = EVEN_TEXT_EMPTY;
  bool broken = false;
  int reason = 0;
  const even_error kept = *even_error_last();
  bool told = write_rest(place, extra, &text) == EVEN_OK && text.length <= MOST_REST &&
              even_socket_write(rank->go, text.data, text.length, &broken, &reason) == text.length && !broken;
  even_text_free(&text);
  (void)even_error_restore(&kept);
  return told;
}

static void kill_rank(warm_rank *rank) {
  if (rank->pid > 0) {
    (void)even_process_signal_group(rank->pid, SIGKILL);
    even_process_wait(rank->pid);
  }
  rank->pid = -1;
  even_pipe_close(rank->go);
  rank->go = -1;
  stop_watching(rank, &rank->ready, true);
  stop_watching(rank, &rank->streams[0], true);
  stop_watching(rank, &rank->streams[1], true);
  even_text_free(&rank->said[0]);
  even_text_free(&rank->said[1]);
  rank->said[0] = rank->said[1] = (even_text)EVEN_TEXT_EMPTY;
}

bool even_warm_take(even_warm *warm, const even_rank_place *place, char *const *extra, even_warm_process *out) {
  if (warm == NULL || place->rank < warm->place.first || place->rank >= warm->place.first + warm->place.local) {
    return false;
  }
  warm_rank *rank = &warm->ranks[place->rank - warm->place.first];
  if (rank->pid <= 0 || rank->ended || place->joins || !is_same_place(warm, place) ||
      even_process_has_ended(rank->pid) || !tell_rest(rank, place, extra)) {
    return false;
  }
  *out =
      (even_warm_process){.process = {.pid = rank->pid, .output = rank->streams[0].fd, .error = rank->streams[1].fd}};
  for (int i = 0; i < 2; i++) {
    stop_watching(rank, &rank->streams[i], false);
    out->said[i] = rank->said[i];
    rank->said[i] = (even_text)EVEN_TEXT_EMPTY;
  }
  rank->pid = -1;
  kill_rank(rank); /* what is left of it here: pipes that it needs no more */
  return true;
}

bool even_warm_reaped(even_warm *warm, pid_t pid) {
  for (size_t i = 0; warm != NULL && i < warm->count; i++) {
    if (warm->ranks[i].pid == pid) {
      warm->ranks[i].pid = -1;
      warm->ranks[i].ended = true;
      return true;
    }
  }
  return false;
}

void even_warm_close(even_warm *warm) {
  for (size_t i = 0; warm != NULL && warm->ranks != NULL && i < warm->count; i++) {
    kill_rank(&warm->ranks[i]);
  }
  if (warm != NULL) {
    even_free(warm->ranks);
    even_free(warm);
  }
}
