/* An attempt's part for one host, as JSON. */
#include "orchestrator/remote_start.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/environment.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/outlast.h"
#include "os/socket.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Of a list of words; before those behind a script it has the script's name, and how Python is started. Of the JSON of
 * a command a quarter of START is left to all else in it. */
enum { MOST_WORDS = 16384, FIRST_WORDS = 4, MOST_COMMAND = 3 << 20 };

bool even_remote_passes_on(const char *line) {
  static const char *const prefixes[] = {"EVENSTEP_", "PYTHON", "OMP_",    "MKL_", "TORCH",      "NCCL_",
                                         "UCX_",      "GLOO_",  "CUBLAS_", "HF_",  "TOKENIZERS_"};
  static const char *const own[] = {"EVENSTEP_HOST_ID=", "EVENSTEP_SSH=", "EVENSTEP_CHAOS_", "TORCHELASTIC_"};
  if (even_environment_is_of_a_rank(line)) {
    return false;
  }
  for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
    if (strncmp(line, own[i], strlen(own[i])) == 0) {
      return false;
    }
  }
  for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
    if (strncmp(line, prefixes[i], strlen(prefixes[i])) == 0) {
      return true;
    }
  }
  return false;
}

static void add_words(even_json *json, const char *key, char *const *words) {
  even_json_array(json, key);
  for (size_t i = 0; words != NULL && words[i] != NULL; i++) {
    even_json_string(json, NULL, words[i]);
  }
  even_json_array_end(json);
}

even_status even_remote_check_words(const char *const *words, size_t count) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  if (count > MOST_WORDS - FIRST_WORDS) {
    (void)even_fail(EVEN_ERR_USAGE, "the script is given %zu words, and those of several hosts take %d at most", count,
                    MOST_WORDS - FIRST_WORDS);
    return even_error_fix("name a folder instead of each file in it, or a file that lists them");
  }
  for (size_t i = 0; i < count; i++) {
    even_json_string(&json, NULL, words[i]);
  }
  even_status status = even_text_status(&text);
  size_t bytes = text.length;
  even_text_free(&text);
  if (status == EVEN_OK && bytes > MOST_COMMAND) {
    (void)even_fail(EVEN_ERR_USAGE,
                    "the script is given words of %zu bytes, and those of several hosts take %d at most", bytes,
                    MOST_COMMAND);
    return even_error_fix("name a folder instead of each file in it, or a file that lists them");
  }
  return status;
}

static void add_shortages(even_json *json, const even_job *job) {
  static const char name[] = "EVENSTEP_MEMORY_CAPS=";
  even_text line = EVEN_TEXT_EMPTY;
  even_text words = EVEN_TEXT_EMPTY;
  even_job_name_shortages(job, &words);
  if (words.length > 0) {
    even_text_format(&line, "%s%s", name, words.data);
    even_json_string(json, NULL, even_text_string(&line));
  }
  even_text_free(&words);
  even_text_free(&line);
}

static void add_turn(even_json *json, const even_job *job) {
  char line[64];
  (void)snprintf(line, sizeof line, "EVENSTEP_CHECKPOINT_TURN=%lld", (long long)job->turn);
  even_json_string(json, NULL, line);
}

double even_remote_unseen_seconds(const even_job *job) {
  const even_hosts *hosts = job->hosts;
  bool replaced = hosts != NULL && (hosts->voter != NULL || hosts->params.replaces_leader);
  return replaced ? 1.75e-3 * even_socket_silence() : 0; /* 2.5 S - 7/8 S, and time to hear of it */
}

static void add_unseen(even_json *json, const even_job *job) {
  char line[64];
  double seconds = even_remote_unseen_seconds(job);
  (void)snprintf(line, sizeof line, "EVENSTEP_UNSEEN_SECONDS=%.10g", seconds);
  if (seconds > 0) {
    even_json_string(json, NULL, line);
  }
}

static void add_environment(even_json *json, const even_job *job) {
  even_json_array(json, "environment");
  for (size_t i = 0; environ[i] != NULL; i++) {
    if (even_remote_passes_on(environ[i])) {
      even_json_string(json, NULL, environ[i]);
    }
  }
  for (size_t i = 0; job->params->environment != NULL && job->params->environment[i] != NULL; i++) {
    even_json_string(json, NULL, job->params->environment[i]);
  }
  add_shortages(json, job);
  add_turn(json, job);
  add_unseen(json, job);
  even_json_array_end(json);
}

static void add_quota(even_json *json, const even_job *job, size_t first, size_t count) {
  for (size_t i = first; i < first + count; i++) {
    even_json_number(json, NULL, job->params->cpu_quota == NULL ? (double)NAN : job->params->cpu_quota[i]);
  }
}

static bool is_shown(const even_job *job, size_t rank) {
  return job->params->shown == NULL || job->params->shown[rank];
}

static void add_shown(even_json *json, const even_job *job, size_t first, size_t count) {
  for (size_t i = first; i < first + count; i++) {
    even_json_bool(json, NULL, is_shown(job, i));
  }
}

/* Of ranks, and then of spares. */
static void add_ranks(even_json *json, const even_job *job, size_t first, size_t count, const even_host_agent *its) {
  even_json_array(json, "quota");
  add_quota(json, job, first, count);
  if (its != NULL) {
    add_quota(json, job, its->first_spare, its->spares);
  }
  even_json_array_end(json);
  even_json_array(json, "shown");
  add_shown(json, job, first, count);
  if (its != NULL) {
    add_shown(json, job, its->first_spare, its->spares);
  }
  even_json_array_end(json);
  even_json_bool(json, "shows_main", is_shown(job, 0));
}

/* Which of its devices, where some were set aside: also those that are there again. */
static void add_used(even_json *json, const even_host_agent *its) {
  if (its == NULL || its->whole.count == 0) {
    return;
  }
  even_json_array(json, "devices");
  for (size_t i = 0; i < its->used_count; i++) {
    even_json_unsigned(json, NULL, its->used[i]);
  }
  even_json_array_end(json);
}

/* By era and group each host knows its own processes. Where the attempt runs under another leader than the one that
 * began it, its hosts have other numbers now. */
static int era_of(const even_job *job, const even_host_agent *its) {
  bool numbered_anew = its != NULL && its->late && job->hosts->adopts;
  return job->era + (numbered_anew ? (int)job->hosts->generation : 0);
}

void even_remote_start_write(const even_job *job, size_t group, size_t first, size_t count, const even_host_agent *its,
                             even_text *out) {
  const even_agent_params *params = job->params;
  even_json json = even_json_begin(out, 0);
  even_telemetry *const *rings = job->hosts->rings;
  even_json_object(&json, NULL);
  even_json_string(&json, "job", job->id);
  even_json_integer(&json, "attempt", job->attempt);
  even_json_integer(&json, "max_restarts", params->max_restarts);
  even_json_string(&json, "master_address", job->master_address);
  even_json_integer(&json, "master_port", job->master_port);
  even_json_integer(&json, "world", (int64_t)job->count);
  even_json_integer(&json, "first", (int64_t)first);
  even_json_integer(&json, "count", (int64_t)count);
  even_json_integer(&json, "first_spare", its == NULL ? (int64_t)job->count : (int64_t)its->first_spare);
  even_json_integer(&json, "spares", its == NULL ? 0 : (int64_t)its->spares);
  even_json_integer(&json, "all_spares", its == NULL ? 0 : params->spares);
  even_json_integer(&json, "group", (int64_t)group);
  even_json_integer(&json, "groups", group < (size_t)job->groups ? job->groups : (int64_t)group + 1);
  even_json_integer(&json, "most_groups", job->most_groups);
  even_json_integer(&json, "era", era_of(job, its));
  add_words(&json, "command", params->command);
  add_environment(&json, job);
  add_ranks(&json, job, first, count, its);
  add_used(&json, its);
  even_json_string(&json, "run_folder", job->run_folder.data);
  const char *resume = NULL;
  bool late = its != NULL && its->late;
  if (job->resume.length > 0 && !late) { /* it may lie elsewhere there */
    const even_text *there = &job->hosts->agents[group].resume;
    resume = there->length > 0 ? there->data : job->resume.data;
  }
  even_json_string(&json, "resume", resume);
  even_json_number(&json, "hang_seconds", params->hang_seconds);
  even_json_number(&json, "notice_seconds", params->notice_seconds);
  even_json_string(&json, "notice_from", params->notice_from);
  even_json_number(&json, "notice_every_seconds", params->notice_every_seconds);
  even_json_number(&json, "outlast_seconds", even_outlast_holds(job) ? job->hosts->params.patience_seconds : 0);
  even_json_number(&json, "gpu_seconds", params->gpu_seconds); /* null: infinite */
  even_json_bool(&json, "restart_hung", params->restart_hung);
  even_json_bool(&json, "unpinned", params->unpinned);
  even_json_bool(&json, "shrink", params->shrink);
  even_json_bool(&json, "replace", even_job_takes_in(job));
  even_json_bool(&json, "late", late);
  even_json_bool(&json, "telemetry", rings != NULL);
  size_t most = (size_t)job->hosts->params.most_ranks; /* who takes this leader's place goes on with these rings */
  even_json_integer(&json, "rings", (int64_t)(most > job->count ? most : job->count));
  even_json_bool(&json, "calls", rings != NULL && even_telemetry_wants_calls(rings[first]));
  even_json_object_end(&json);
}

/* ---- reading ---- */

static even_status not_whole(const char *what) {
  return even_fail(EVEN_ERR_INPUT, "the start of an attempt without a proper \"%s\"", what);
}

static even_status read_integer(const json_t *object, const char *name, json_int_t least, json_int_t most, int *out) {
  const json_t *value = json_object_get(object, name);
  json_int_t number = json_integer_value(value);
  if (!json_is_integer(value) || number < least || number > most) {
    return not_whole(name);
  }
  *out = (int)number;
  return EVEN_OK;
}

static even_status read_words(const json_t *object, const char *name, size_t least, char ***out) {
  const json_t *list = json_object_get(object, name);
  size_t count = json_array_size(list);
  if (!json_is_array(list) || count < least || count > MOST_WORDS) {
    return not_whole(name);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(out, count + 1));
  for (size_t i = 0; i < count; i++) {
    const char *word = json_string_value(json_array_get(list, i));
    if (word == NULL) {
      return not_whole(name);
    }
    EVEN_TRY(even_duplicate(word, &(*out)[i]));
  }
  return EVEN_OK;
}

static even_status read_text(const json_t *object, const char *name, char *out, size_t room) {
  const char *text = json_string_value(json_object_get(object, name));
  if (text == NULL || text[0] == '\0' || strlen(text) >= room) {
    return not_whole(name);
  }
  memcpy(out, text, strlen(text) + 1);
  return EVEN_OK;
}

static even_status read_path(const json_t *object, const char *name, bool needed, char **out) {
  const char *text = json_string_value(json_object_get(object, name));
  if (text == NULL && !needed) {
    return EVEN_OK;
  }
  return text == NULL || text[0] != '/' ? not_whole(name) : even_duplicate(text, out);
}

/* Arrays of as many elements as the host has ranks and spares. */
static even_status read_ranks(const json_t *object, even_remote_start *out) {
  const json_t *quota = json_object_get(object, "quota");
  const json_t *shown = json_object_get(object, "shown");
  size_t count = (size_t)out->count + (size_t)out->spares;
  bool any = false;
  if (json_array_size(quota) != count || json_array_size(shown) != count) {
    return not_whole("quota");
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->quota, (size_t)out->world));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->shown, (size_t)out->world));
  for (size_t i = 0; i < (size_t)out->world; i++) {
    out->quota[i] = (double)NAN;
  }
  for (size_t i = 0; i < count; i++) {
    const json_t *one = json_array_get(quota, i);
    double fraction = json_is_number(one) ? json_number_value(one) : (double)NAN;
    if (json_is_number(one) && !(fraction > 0 && fraction <= 1)) {
      return not_whole("quota");
    }
    any = any || json_is_number(one);
    size_t rank = i < (size_t)out->count ? (size_t)out->first + i : (size_t)out->first_spare + i - (size_t)out->count;
    out->quota[rank] = fraction;
    out->shown[rank] = json_is_true(json_array_get(shown, i));
  }
  out->shows_main = json_is_true(json_object_get(object, "shows_main"));
  if (!any) {
    even_free(out->quota);
    out->quota = NULL;
  }
  return EVEN_OK;
}

/* One for each of its ranks, ascending. */
static even_status read_used(const json_t *object, even_remote_start *out) {
  const json_t *list = json_object_get(object, "devices");
  if (list == NULL) {
    return EVEN_OK;
  }
  if (json_array_size(list) != (size_t)out->count) {
    return not_whole("devices");
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->used, (size_t)out->count));
  for (size_t i = 0; i < (size_t)out->count; i++) {
    const json_t *one = json_array_get(list, i);
    json_int_t number = json_integer_value(one);
    if (!json_is_integer(one) || number < 0 || number >= EVEN_TELEMETRY_MOST_RANKS ||
        (i > 0 && (size_t)number <= out->used[i - 1])) {
      return not_whole("devices");
    }
    out->used[i] = (size_t)number;
  }
  return EVEN_OK;
}

static even_status read_all(const json_t *object, even_remote_start *out) {
  enum { MOST = EVEN_TELEMETRY_MOST_RANKS };
  bool late = json_is_true(json_object_get(object, "late")); /* its places may be such as were kept: the last ones */
  EVEN_TRY(read_text(object, "job", out->job, sizeof out->job));
  EVEN_TRY(read_text(object, "master_address", out->master_address, sizeof out->master_address));
  EVEN_TRY(read_integer(object, "attempt", 0, 1 << 24, &out->attempt));
  EVEN_TRY(read_integer(object, "max_restarts", 0, 1 << 24, &out->max_restarts));
  EVEN_TRY(read_integer(object, "master_port", 1, 65535, &out->master_port));
  EVEN_TRY(read_integer(object, "world", 1, MOST, &out->world));
  EVEN_TRY(read_integer(object, "count", 1, out->world, &out->count));
  EVEN_TRY(read_integer(object, "all_spares", 0, out->world - (late ? 1 : out->count), &out->all_spares));
  EVEN_TRY(read_integer(object, "first", 0, out->world - out->count - (late ? 0 : out->all_spares), &out->first));
  EVEN_TRY(read_integer(object, "spares", 0, out->all_spares, &out->spares));
  EVEN_TRY(
      read_integer(object, "first_spare", out->world - out->all_spares, out->world - out->spares, &out->first_spare));
  EVEN_TRY(read_integer(object, "groups", 1, MOST, &out->groups));
  EVEN_TRY(read_integer(object, "group", 0, out->groups - 1, &out->group));
  EVEN_TRY(read_integer(object, "most_groups", out->groups, MOST, &out->most_groups));
  EVEN_TRY(read_integer(object, "era", 0, 1 << 20, &out->era));
  EVEN_TRY(read_words(object, "command", 1, &out->command));
  EVEN_TRY(read_words(object, "environment", 0, &out->environment));
  EVEN_TRY(read_path(object, "run_folder", true, &out->run_folder));
  EVEN_TRY(read_path(object, "resume", false, &out->resume));
  out->hang_seconds = json_number_value(json_object_get(object, "hang_seconds"));
  if (!(out->hang_seconds >= 0 && out->hang_seconds <= 1e7)) {
    return not_whole("hang_seconds");
  }
  out->notice_seconds = json_number_value(json_object_get(object, "notice_seconds"));
  if (!(out->notice_seconds >= 0 && out->notice_seconds <= 1e7)) {
    return not_whole("notice_seconds");
  }
  const char *notice_from = json_string_value(json_object_get(object, "notice_from"));
  EVEN_TRY(notice_from == NULL ? EVEN_OK : even_duplicate(notice_from, &out->notice_from));
  out->notice_every_seconds = json_number_value(json_object_get(object, "notice_every_seconds"));
  if (!(out->notice_every_seconds >= 0 && out->notice_every_seconds <= 1e7)) {
    return not_whole("notice_every_seconds");
  }
  out->outlast_seconds = json_number_value(json_object_get(object, "outlast_seconds"));
  if (!(out->outlast_seconds >= 0 && out->outlast_seconds <= 3600)) {
    return not_whole("outlast_seconds");
  }
  const json_t *gpu_seconds = json_object_get(object, "gpu_seconds");
  out->gpu_seconds = json_is_null(gpu_seconds) ? (double)INFINITY : json_number_value(gpu_seconds);
  bool as_an_option = out->gpu_seconds >= 0.1 && out->gpu_seconds <= 3600;
  if (out->gpu_seconds != 0 && !isinf(out->gpu_seconds) && !as_an_option) {
    return not_whole("gpu_seconds");
  }
  out->restart_hung = json_is_true(json_object_get(object, "restart_hung"));
  out->unpinned = json_is_true(json_object_get(object, "unpinned"));
  out->shrink = json_is_true(json_object_get(object, "shrink"));
  out->replace = json_is_true(json_object_get(object, "replace"));
  out->late = late;
  EVEN_TRY(read_integer(object, "rings", out->world, MOST, &out->rings));
  out->telemetry = json_is_true(json_object_get(object, "telemetry"));
  out->calls = json_is_true(json_object_get(object, "calls"));
  EVEN_TRY(read_used(object, out));
  return read_ranks(object, out);
}

even_status even_remote_start_of(const json_t *object, even_remote_start *out) {
  *out = (even_remote_start){.job = ""};
  return read_all(object, out);
}

even_status even_remote_start_read(const char *json, size_t bytes, even_remote_start *out) {
  json_t *object = NULL;
  *out = (even_remote_start){.job = ""};
  EVEN_TRY(even_json_parse("the start of an attempt", json, bytes, &object));
  even_status status = even_remote_start_of(object, out);
  json_decref(object);
  return status;
}

static void free_words(char **words) {
  for (size_t i = 0; words != NULL && words[i] != NULL; i++) {
    even_free(words[i]);
  }
  even_free((void *)words);
}

void even_remote_start_free(even_remote_start *start) {
  free_words(start->command);
  free_words(start->environment);
  even_free(start->run_folder);
  even_free(start->resume);
  even_free(start->notice_from);
  even_free(start->quota);
  even_free(start->shown);
  even_free(start->used);
  *start = (even_remote_start){.job = ""};
}
