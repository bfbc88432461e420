/* Builds a rank's environment. The names are torchrun's (torch.distributed.elastic, local_elastic_agent.py). */
#include "orchestrator/environment.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The place of a variable among lines that end with NULL, NULL where there are none. */
static char *const *find(char *const *lines, const char *name, size_t length) {
  for (; lines != NULL && *lines != NULL; lines++) {
    if (strncmp(*lines, name, length) == 0 && (*lines)[length] == '=') {
      return lines;
    }
  }
  return NULL;
}

const char *even_environment_value(char *const *lines, const char *name) {
  char *const *line = find(lines, name, strlen(name));
  return line == NULL ? NULL : *line + strlen(name) + 1;
}

const char *even_environment_get(const even_environment *environment, const char *name) {
  return even_environment_value(environment->lines, name);
}

/* Takes `line` over, also on failure. */
static even_status put(even_environment *environment, char *line) {
  size_t length = strcspn(line, "=");
  char *const *place = find(environment->lines, line, length);
  if (place != NULL) {
    even_free(*place);
    environment->lines[place - environment->lines] = line;
    return EVEN_OK;
  }
  even_status status = even_realloc((void **)&environment->lines, environment->count + 2, sizeof *environment->lines);
  if (status != EVEN_OK) {
    even_free(line);
    return status;
  }
  environment->lines[environment->count++] = line;
  environment->lines[environment->count] = NULL;
  return EVEN_OK;
}

even_status even_environment_put(even_environment *environment, const char *line) {
  char *copy = NULL;
  EVEN_TRY(even_duplicate(line, &copy));
  return put(environment, copy);
}

even_status even_environment_set(even_environment *environment, const char *name, const char *value) {
  even_text line = EVEN_TEXT_EMPTY;
  even_text_format(&line, "%s=%s", name, value);
  even_status status = even_text_status(&line);
  if (status != EVEN_OK) {
    even_text_free(&line);
    return status;
  }
  return put(environment, line.data);
}

static even_status set_number(even_environment *environment, const char *name, long value) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "%ld", value);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_environment_set(environment, name, text.data);
  }
  even_text_free(&text);
  return status;
}

static even_status set_unless_there(even_environment *environment, const char *name, const char *value) {
  return even_environment_get(environment, name) != NULL ? EVEN_OK : even_environment_set(environment, name, value);
}

/* What another job's rank, if we are started by one, has for itself alone. */
bool even_environment_is_of_a_rank(const char *line) {
  static const char *const names[] = {
      "EVENSTEP_AGENT=",         "EVENSTEP_JOB_KEY=",        "EVENSTEP_JOB=",
      "EVENSTEP_RUN_DIR=",       "EVENSTEP_DEVICE=",         "EVENSTEP_TELEMETRY_FD=",
      "EVENSTEP_SPEEDS=",        "EVENSTEP_RESUME=",         "EVENSTEP_REQUESTS_FD=",
      "EVENSTEP_PLAN=",          "EVENSTEP_PLAN_STEPS=",     "EVENSTEP_POLICY=",
      "EVENSTEP_CHECKPOINT_",    "EVENSTEP_SNAPSHOT_FD=",    "EVENSTEP_GENERATION_FD=",
      "EVENSTEP_JOINS=",         "EVENSTEP_STANDING_FD=",    "EVENSTEP_AWAITS=",
      "EVENSTEP_MEMORY_CAPS=",   "EVENSTEP_PARENT=",         "EVENSTEP_RUN_SIGN=",
      "EVENSTEP_RUN_SIGN_SEEN=", "EVENSTEP_UNSEEN_SECONDS=", "TORCHELASTIC_ERROR_FILE="};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strncmp(line, names[i], strlen(names[i])) == 0) {
      return true;
    }
  }
  return false;
}

/* The n-th entry of the user's own CUDA_VISIBLE_DEVICES, which device.h's numbers count in. */
static bool add_visible(even_text *out, const char *visible, int index) {
  while (index > 0 && visible != NULL) {
    visible = strchr(visible, ',');
    visible = visible == NULL ? NULL : visible + 1;
    index--;
  }
  if (visible == NULL || visible[0] == '\0') {
    return false;
  }
  even_text_append(out, visible, strcspn(visible, ","));
  return true;
}

/* All GPUs of the job's ranks on this host in their order: where every rank has one, LOCAL_RANK indexes them. */
static even_status set_visible_gpus(even_environment *environment, const even_device_list *devices, size_t first,
                                    size_t end) {
  even_text list = EVEN_TEXT_EMPTY;
  const char *visible = even_environment_get(environment, "CUDA_VISIBLE_DEVICES");
  bool any = false;
  for (size_t i = first; i < end; i++) {
    if (devices->items[i].kind != EVEN_DEVICE_CUDA) {
      continue;
    }
    even_text_add(&list, any ? "," : "");
    any = true;
    if (visible == NULL || !add_visible(&list, visible, devices->items[i].cuda_index)) {
      even_text_format(&list, "%d", devices->items[i].cuda_index);
    }
  }
  even_status status = even_text_status(&list);
  if (status == EVEN_OK && any) {
    status = even_environment_set(environment, "CUDA_VISIBLE_DEVICES", even_text_string(&list));
  }
  even_text_free(&list);
  return status;
}

static long thread_count(const even_device *device) {
  long threads = (long)(device->cores + 0.5);
  return threads < 1 ? 1 : threads;
}

/* Gloo takes the host's name for its address otherwise, which Debian gives to 127.0.1.1. */
static even_status set_interface(even_environment *environment, const even_rank_place *place) {
  char exactly[64];
  if (place->groups < 2 || place->interface == NULL || place->interface[0] == '\0') {
    return EVEN_OK;
  }
  (void)snprintf(exactly, sizeof exactly, "=%s", place->interface);
  EVEN_TRY(set_unless_there(environment, "GLOO_SOCKET_IFNAME", place->interface));
  EVEN_TRY(set_unless_there(environment, "TP_SOCKET_IFNAME", place->interface));
  return set_unless_there(environment, "NCCL_SOCKET_IFNAME", exactly);
}

void even_environment_mark_of_any(const even_rank_place *place, char out[EVEN_SWEEP_MARK]) {
  (void)snprintf(out, EVEN_SWEEP_MARK, "EVENSTEP_AGENT=%s-%d-", place->job,
                 place->group + place->era * EVEN_ERA_GROUPS);
}

void even_environment_mark(const even_rank_place *place, char out[EVEN_SWEEP_MARK]) {
  if (place->groups > 1 || place->era > 0) {
    even_environment_mark_of_any(place, out);
    size_t length = strlen(out);
    (void)snprintf(out + length, EVEN_SWEEP_MARK - length, "%ld", (long)place->keeper);
  } else {
    (void)snprintf(out, EVEN_SWEEP_MARK, "EVENSTEP_JOB=%s", place->job);
  }
}

static even_status set_agent(even_environment *environment, const even_rank_place *place) {
  char mark[EVEN_SWEEP_MARK];
  even_environment_mark(place, mark);
  return even_environment_put(environment, mark); /* EVENSTEP_JOB is set to the same */
}

/* Who was not started by this process is no rank of its, whatever else its environment says (evenstep.lineage). */
static even_status set_parent(even_environment *environment, const even_rank_place *place) {
  char text[64];
  if (place->agent <= 0) {
    return EVEN_OK;
  }
  (void)snprintf(text, sizeof text, "%ld %" PRIu64, (long)place->agent, place->agent_start);
  return even_environment_set(environment, "EVENSTEP_PARENT", text);
}

static even_status set_torchrun(even_environment *environment, const even_rank_place *place) {
  long world = (long)place->devices->count - place->spares;
  long local = place->local > 0 ? place->local : world;
  bool own = place->rank >= place->first && place->rank < place->first + local; /* else one of its spares */
  EVEN_TRY(set_number(environment, "RANK", place->rank));
  EVEN_TRY(set_number(
      environment, "LOCAL_RANK",
      own || place->first_spare == 0 ? place->rank - place->first : local + place->rank - place->first_spare));
  EVEN_TRY(set_number(environment, "WORLD_SIZE", world));
  EVEN_TRY(set_number(environment, "LOCAL_WORLD_SIZE", local));
  EVEN_TRY(set_number(environment, "GROUP_RANK", place->group));
  EVEN_TRY(set_number(environment, "GROUP_WORLD_SIZE", place->groups > 0 ? place->groups : 1));
  EVEN_TRY(set_number(environment, "ROLE_RANK", place->rank));
  EVEN_TRY(set_number(environment, "ROLE_WORLD_SIZE", world));
  EVEN_TRY(even_environment_set(environment, "ROLE_NAME", "default"));
  EVEN_TRY(even_environment_set(environment, "MASTER_ADDR",
                                place->master_address != NULL ? place->master_address : "127.0.0.1"));
  EVEN_TRY(set_number(environment, "MASTER_PORT", place->master_port));
  EVEN_TRY(set_number(environment, "TORCHELASTIC_RESTART_COUNT", place->attempt));
  EVEN_TRY(set_number(environment, "TORCHELASTIC_MAX_RESTARTS", place->max_restarts));
  EVEN_TRY(even_environment_set(environment, "TORCHELASTIC_RUN_ID", place->job));
  EVEN_TRY(even_environment_set(environment, "TORCHELASTIC_USE_AGENT_STORE", "False"));
  EVEN_TRY(set_unless_there(environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
  EVEN_TRY(set_interface(environment, place));
  return set_visible_gpus(environment, place->devices, (size_t)place->first, (size_t)(place->first + local));
}

static even_status set_turn(even_environment *environment, int64_t turn) {
  char text[24];
  (void)snprintf(text, sizeof text, "%" PRId64, turn);
  return turn > 0 ? even_environment_set(environment, "EVENSTEP_CHECKPOINT_TURN", text) : EVEN_OK;
}

static even_status set_seconds(even_environment *environment, const char *name, double seconds) {
  char text[32];
  (void)snprintf(text, sizeof text, "%.10g", seconds);
  return even_environment_set(environment, name, text);
}

/* The hosts have one silence, whatever the variable says on this one. */
static even_status set_silence(even_environment *environment, const even_rank_place *place) {
  if (place->silence_ms > 0) {
    EVEN_TRY(set_seconds(environment, "EVENSTEP_HOST_TIMEOUT", (double)place->silence_ms * 1e-3));
  }
  return place->unseen_seconds > 0 ? set_seconds(environment, "EVENSTEP_UNSEEN_SECONDS", place->unseen_seconds)
                                   : EVEN_OK;
}

static even_status set_evenstep(even_environment *environment, const even_rank_place *place) {
  const even_device *device = &place->devices->items[place->rank];
  if (even_environment_get(environment, "OMP_NUM_THREADS") == NULL) {
    EVEN_TRY(set_number(environment, "OMP_NUM_THREADS", thread_count(device)));
  }
  EVEN_TRY(even_environment_set(environment, "PYTHONUNBUFFERED", "1"));
  if (even_environment_get(environment, "PYTHON_COLORS") == NULL) { /* Python 3.13 obeys FORCE_COLOR */
    EVEN_TRY(even_environment_set(environment, "PYTHON_COLORS", "0"));
  }
  EVEN_TRY(even_environment_set(environment, "EVENSTEP_JOB", place->job));
  EVEN_TRY(set_agent(environment, place));
  EVEN_TRY(set_parent(environment, place));
  EVEN_TRY(even_environment_set(environment, "EVENSTEP_RUN_DIR", place->run_folder));
  EVEN_TRY(even_environment_set(environment, "EVENSTEP_DEVICE", device->name));
  if (place->telemetry_fd >= 0) {
    EVEN_TRY(set_number(environment, "EVENSTEP_TELEMETRY_FD", place->telemetry_fd));
  }
  if (place->snapshot_fd >= 0) {
    EVEN_TRY(set_number(environment, "EVENSTEP_SNAPSHOT_FD", place->snapshot_fd));
  }
  if (place->generation_fd > 0) {
    EVEN_TRY(set_number(environment, "EVENSTEP_GENERATION_FD", place->generation_fd));
  }
  if (place->standing_fd > 0) {
    EVEN_TRY(set_number(environment, "EVENSTEP_STANDING_FD", place->standing_fd));
  }
  if (place->joins) {
    EVEN_TRY(even_environment_set(environment, "EVENSTEP_JOINS", "1"));
  }
  if (place->sign_seen) {
    EVEN_TRY(even_environment_set(environment, "EVENSTEP_RUN_SIGN_SEEN", "1"));
  }
  if (place->resume != NULL) {
    EVEN_TRY(even_environment_set(environment, "EVENSTEP_RESUME", place->resume));
  }
  if (place->shortages != NULL) {
    EVEN_TRY(even_environment_set(environment, "EVENSTEP_MEMORY_CAPS", place->shortages));
  }
  EVEN_TRY(set_turn(environment, place->turn));
  if (place->memory != NULL) {
    EVEN_TRY(even_environment_set(environment, "EVENSTEP_CHECKPOINT_MEMORY", place->memory));
  }
  return EVEN_OK;
}

even_status even_environment_of_rank(const even_rank_place *place, char *const *inherited, char *const *extra,
                                     even_environment *out) {
  even_status status = EVEN_OK;
  *out = (even_environment){NULL, 0};
  for (size_t i = 0; status == EVEN_OK && inherited[i] != NULL; i++) {
    if (!even_environment_is_of_a_rank(inherited[i])) {
      status = even_environment_put(out, inherited[i]);
    }
  }
  if (status == EVEN_OK) {
    status = set_torchrun(out, place);
  }
  if (status == EVEN_OK) {
    status = set_evenstep(out, place);
  }
  for (size_t i = 0; status == EVEN_OK && extra != NULL && extra[i] != NULL; i++) {
    status = even_environment_put(out, extra[i]);
  }
  if (status == EVEN_OK) {
    status = set_silence(out, place);
  }
  if (status != EVEN_OK) {
    even_environment_free(out);
  }
  return status;
}

void even_environment_free(even_environment *environment) {
  for (size_t i = 0; i < environment->count; i++) {
    even_free(environment->lines[i]);
  }
  even_free((void *)environment->lines);
  *environment = (even_environment){NULL, 0};
}
