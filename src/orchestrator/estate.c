/* What is handed down. */
#include "orchestrator/estate.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/hold.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/remote_start.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/path.h"
#include "os/pipe.h"

#include <math.h>
#include <string.h>

enum { MOST_COMMAND = 1 << 22 };

/* ---- writing ---- */

/* The command as it was typed: what its options say to one host they say to another one, too. */
static even_status add_arguments(even_json *json) {
  even_text words = EVEN_TEXT_EMPTY;
  even_status status = even_file_read("/proc/self/cmdline", MOST_COMMAND, &words);
  even_json_array(json, "arguments");
  for (size_t at = 0; status == EVEN_OK && at < words.length; at += strlen(words.data + at) + 1) {
    even_json_string(json, NULL, words.data + at);
  }
  even_json_array_end(json);
  even_text_free(&words);
  return status;
}

static void add_environment(even_json *json) {
  even_json_array(json, "environment");
  for (size_t i = 0; environ[i] != NULL; i++) {
    if (even_remote_passes_on(environ[i]) || strncmp(environ[i], "EVENSTEP_SSH=", 13) == 0) {
      even_json_string(json, NULL, environ[i]);
    }
  }
  even_json_array_end(json);
}

/* One that is lost, and whose places others have, has no part in what follows. */
static bool has_part(const even_host_agent *agent) {
  return agent->member != 0 && !(agent->lost && agent->link == NULL && agent->count == 0);
}

static void add_host(even_json *json, const even_job *job, size_t i) {
  const even_host_agent *agent = &job->hosts->agents[i];
  size_t first = i == 0 ? job->first : agent->first;
  size_t count = i == 0 ? job->local : agent->witness ? 0 : agent->count;
  even_json_object(json, NULL);
  even_json_string(json, "name", agent->name);
  even_json_unsigned(json, "member", i == 0 ? job->hosts->self : agent->member);
  even_json_integer(json, "ranks", agent->came && agent->wish == 0 ? (int64_t)agent->count : agent->wish);
  even_json_bool(json, "witness", agent->witness);
  even_json_bool(json, "came", agent->came);
  even_json_bool(json, "leaves", i > 0 && job->hosts->handed && !even_elastic_stays(agent));
  even_json_integer(json, "first", (int64_t)first);
  even_json_integer(json, "first_spare", (int64_t)(i == 0 ? job->first_spare : agent->first_spare));
  even_json_integer(json, "spares", (int64_t)(i == 0 ? job->spares : agent->spares));
  even_json_array(json, "devices");
  for (size_t rank = first; rank < first + count && rank < job->params->devices->count; rank++) {
    even_json_string(json, NULL, job->params->devices->items[rank].name);
  }
  even_json_array_end(json);
  if (job->params->cpu_quota != NULL) {
    even_json_array(json, "cpu_quota");
    for (size_t rank = first; rank < first + count && rank < job->params->devices->count; rank++) {
      even_json_number(json, NULL, isnan(job->params->cpu_quota[rank]) ? 0 : job->params->cpu_quota[rank]);
    }
    even_json_array_end(json);
  }
  even_json_object_end(json);
}

static void add_shortages(even_json *json, const even_shortages *list) {
  even_json_array(json, "shortages");
  for (size_t i = 0; i < list->count; i++) {
    even_json_object(json, NULL);
    even_json_string(json, "place", list->items[i].place);
    even_json_integer(json, "most", list->items[i].most);
    even_json_integer(json, "batch", list->items[i].batch);
    even_json_integer(json, "part", list->items[i].part);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}

/* Clocks of two hosts differ: how long each is still to be left out. */
static void add_aside(even_json *json, const even_aside *aside) {
  const uint64_t now = even_clock_ns();
  even_json_array(json, "aside");
  for (size_t i = 0; aside != NULL && i < aside->count; i++) {
    const even_aside_place *one = &aside->items[i];
    even_json_object(json, NULL);
    even_json_string(json, "host", one->host);
    even_json_unsigned(json, "place", one->place);
    even_json_string(json, "device", one->device);
    even_json_unsigned(json, "times", one->times);
    even_json_number(json, "seconds", one->until_ns > now ? (double)(one->until_ns - now) * 1e-9 : 0);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}

even_status even_estate_write(const even_job *job, even_text *out) {
  const even_hosts *hosts = job->hosts;
  const even_agent_params *params = job->params;
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  if (hosts->params.estate == NULL) {
    EVEN_TRY(add_arguments(&json));
  } else {
    char *arguments = json_dumps(json_object_get(hosts->params.estate->content, "arguments"), JSON_COMPACT);
    even_json_raw(&json, "arguments", arguments == NULL ? "[]" : arguments);
    free(arguments);
  }
  add_environment(&json);
  even_json_array(&json, "hosts");
  for (size_t i = 0; i < hosts->count; i++) {
    if (i == 0 || has_part(&hosts->agents[i])) {
      add_host(&json, job, i);
    }
  }
  even_json_array_end(&json);
  even_json_string(&json, "python", hosts->params.python);
  even_json_string(&json, "run_name", even_path_name(job->run_folder.data));
  even_json_string(&json, "run_folder", job->run_folder.data);
  even_json_string(&json, "members_folder", even_text_string(&hosts->members_folder));
  even_json_string(&json, "checkpoint_folder", params->checkpoint_folder);
  even_json_integer(&json, "join_port", hosts->join_port);
  even_json_string(&json, "job", job->id);
  even_json_integer(&json, "attempt", job->attempt);
  even_json_integer(&json, "planned", job->planned);
  even_json_integer(&json, "restarts_made", job->restarts.made);
  even_json_integer(&json, "restarts_since", job->restarts.since);
  even_json_integer(&json, "era", job->era);
  even_json_integer(&json, "turn", job->turn);
  even_json_bool(&json, "shares", job->shares);
  even_json_bool(&json, "handed", hosts->handed);
  add_shortages(&json, &job->shortages);
  add_aside(&json, params->aside);
  even_json_string(&json, "resume", job->resume.length > 0 ? job->resume.data : NULL);
  even_json_string(&json, "foreign", even_text_string(&job->foreign));
  even_json_string(&json, "lineage", even_text_string(&job->lineage));
  even_json_string(&json, "began", even_text_string(&job->began));
  even_copies_write(job, &json);
  even_json_object_end(&json);
  return even_text_status(out);
}

/* ---- reading ---- */

static uint32_t number_of(const json_t *object, const char *name) {
  json_int_t value = json_integer_value(json_object_get(object, name));
  return value > 0 && value <= UINT32_MAX ? (uint32_t)value : 0;
}

/* What says nothing is left out: a rank that lacks memory again says it again. */
static void take_shortages(const even_estate *estate, even_shortages *out) {
  size_t at = 0;
  json_t *item = NULL;
  *out = (even_shortages){.count = 0};
  json_array_foreach(json_object_get(estate->content, "shortages"), at, item) {
    const char *place = json_string_value(json_object_get(item, "place"));
    even_shortage one = {
        .most = number_of(item, "most"), .batch = number_of(item, "batch"), .part = number_of(item, "part")};
    if (place != NULL && strlen(place) < sizeof one.place && one.part > 0 && one.most <= one.batch &&
        out->count < EVEN_SHORTAGES_MOST) {
      memcpy(one.place, place, strlen(place) + 1);
      out->items[out->count++] = one;
    }
  }
}

/* What says nothing is left out: such a place takes part. */
void even_estate_aside(const even_estate *estate, even_aside *out) {
  size_t at = 0;
  json_t *item = NULL;
  json_array_foreach(json_object_get(estate->content, "aside"), at, item) {
    even_aside_place one = {.place = number_of(item, "place"), .times = number_of(item, "times")};
    const char *host = json_string_value(json_object_get(item, "host"));
    const char *device = json_string_value(json_object_get(item, "device"));
    double seconds = json_number_value(json_object_get(item, "seconds"));
    if (host == NULL || device == NULL || strlen(host) >= sizeof one.host || strlen(device) >= sizeof one.device ||
        !(seconds >= 0 && seconds <= (double)EVEN_ASIDE_LONGEST_SECONDS) || one.times == 0 ||
        out->count == EVEN_ASIDE_MOST) {
      continue;
    }
    memcpy(one.host, host, strlen(host) + 1);
    memcpy(one.device, device, strlen(device) + 1);
    one.until_ns = seconds > 0 ? estate->left_ns + (uint64_t)(seconds * 1e9) : 0;
    out->items[out->count++] = one;
  }
}

static bool are_texts(const json_t *list) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    if (!json_is_string(json_array_get(list, i))) {
      return false;
    }
  }
  return true;
}

static bool is_whole(const json_t *content) {
  static const char *const texts[] = {"run_name", "run_folder", "members_folder", "checkpoint_folder",
                                      "job",      "foreign",    "lineage",        "began"};
  static const char *const lists[] = {"arguments", "environment"};
  size_t at = 0;
  json_t *item = NULL;
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    if (!json_is_string(json_object_get(content, texts[i]))) {
      return false;
    }
  }
  for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
    const json_t *list = json_object_get(content, lists[i]);
    if (!json_is_array(list) || !are_texts(list)) {
      return false;
    }
  }
  json_array_foreach(json_object_get(content, "hosts"), at, item) {
    if (!json_is_string(json_object_get(item, "name")) || json_integer_value(json_object_get(item, "member")) < 1 ||
        !are_texts(json_object_get(item, "devices"))) {
      return false;
    }
  }
  return json_array_size(json_object_get(content, "hosts")) > 0 &&
         json_string_length(json_object_get(content, "job")) == 32;
}

even_status even_estate_read(const char *json, size_t bytes, json_t **out) {
  EVEN_TRY(even_json_parse("what the leader leaves", json, bytes, out));
  if (is_whole(*out)) {
    return EVEN_OK;
  }
  json_decref(*out);
  *out = NULL;
  return even_fail(EVEN_ERR_INPUT, "what the leader leaves to another one is not whole");
}

void even_estate_free(even_estate *estate) {
  if (estate == NULL) {
    return;
  }
  if (estate->voter != NULL) {
    even_voter_view view;
    even_voter_look(estate->voter, &view);
    even_voter_close(estate->voter, even_leadership_ended(&view.newest));
  }
  even_hold_free(estate->holds);
  json_decref(estate->content);
  even_host_memory_close(estate->memory);
  explicit_bzero(estate->key_digits, sizeof estate->key_digits);
  even_free(estate);
}

void even_estate_note(const json_t *content, const char *words) {
  if (content != NULL) { /* else the folder is not known */
    even_estate_note_in(json_string_value(json_object_get(content, "run_folder")), words);
  }
}

void even_estate_note_in(const char *run_folder, const char *words) {
  char host[64];
  even_text line = EVEN_TEXT_EMPTY;
  even_text path = EVEN_TEXT_EMPTY;
  int log = -1;
  even_host_name(host, sizeof host);
  even_text_format(&path, "%s/logs/leader.log", run_folder);
  even_text_format(&line, "evenstep: host %s: %s\n", host, words);
  if (even_text_status(&path) == EVEN_OK && even_text_status(&line) == EVEN_OK &&
      even_log_open_private(path.data, &log) == EVEN_OK) {
    (void)!even_file_write_all(log, line.data, line.length);
    even_pipe_close(log);
  }
  even_error_clear(); /* a folder that is not there is one in which nobody looks */
  even_text_free(&line);
  even_text_free(&path);
}

const char *even_estate_text(const even_estate *estate, const char *name) {
  return json_string_value(json_object_get(estate->content, name));
}

static uint64_t member_of(const json_t *host) {
  return (uint64_t)json_integer_value(json_object_get(host, "member"));
}

static bool is_witness(const json_t *host) {
  return json_is_true(json_object_get(host, "witness"));
}

static bool is_left_out(const json_t *host) {
  return is_witness(host) || json_is_true(json_object_get(host, "leaves"));
}

static void add_wish(const json_t *host, even_text *out) {
  json_int_t ranks = json_integer_value(json_object_get(host, "ranks"));
  even_text_format(out, "%s%s", out->length > 0 ? "," : "", json_string_value(json_object_get(host, "name")));
  if (ranks > 0) {
    even_text_format(out, ":%lld", (long long)ranks);
  }
}

/* The leader that is gone was the first: it has no part in what begins anew. */
even_status even_estate_hosts(const even_estate *estate, even_text *out) {
  const json_t *hosts = json_object_get(estate->content, "hosts");
  for (size_t i = 1; i < json_array_size(hosts); i++) {
    if (member_of(json_array_get(hosts, i)) == estate->self) {
      add_wish(json_array_get(hosts, i), out);
    }
  }
  for (size_t i = 1; i < json_array_size(hosts); i++) {
    if (member_of(json_array_get(hosts, i)) != estate->self && !is_left_out(json_array_get(hosts, i))) {
      add_wish(json_array_get(hosts, i), out);
    }
  }
  if (even_estate_goes_on(estate)) {
    add_wish(json_array_get(hosts, 0), out);
  }
  return even_text_status(out);
}

const char *even_estate_witness(const even_estate *estate) {
  size_t at = 0;
  json_t *host = NULL;
  json_array_foreach(json_object_get(estate->content, "hosts"), at, host) {
    if (is_witness(host)) {
      return json_string_value(json_object_get(host, "name"));
    }
  }
  return NULL;
}

even_status even_estate_words(const even_estate *estate, const char *name, char ***out, size_t *count) {
  const json_t *list = json_object_get(estate->content, name);
  *count = json_array_size(list);
  EVEN_TRY(EVEN_NEW_ARRAY(out, *count + 1));
  for (size_t i = 0; i < *count; i++) {
    (*out)[i] = (char *)json_string_value(json_array_get(list, i)); /* read, as argv is */
  }
  return EVEN_OK;
}

static even_status take_line(const even_estate *estate, even_job *job) {
  const char *resume = even_estate_text(estate, "resume");
  job->planned = (int)json_integer_value(json_object_get(estate->content, "planned"));
  job->restarts.made = (int)json_integer_value(json_object_get(estate->content, "restarts_made"));
  job->restarts.since = (int64_t)json_integer_value(json_object_get(estate->content, "restarts_since"));
  job->turn = (int64_t)json_integer_value(json_object_get(estate->content, "turn"));
  job->shares = job->shares || json_is_true(json_object_get(estate->content, "shares"));
  take_shortages(estate, &job->shortages);
  even_text_clear(&job->resume);
  even_text_add(&job->foreign, even_estate_text(estate, "foreign"));
  even_text_add(&job->lineage, even_estate_text(estate, "lineage"));
  even_text_add(&job->began, even_estate_text(estate, "began"));
  even_text_add(&job->resume, resume == NULL ? "" : resume);
  EVEN_TRY(even_text_status(&job->foreign));
  EVEN_TRY(even_text_status(&job->lineage));
  EVEN_TRY(even_text_status(&job->began));
  EVEN_TRY(even_text_status(&job->resume));
  return even_copies_read(job, json_object_get(estate->content, "copies"));
}

even_status even_estate_continue(const even_estate *estate, even_job *job) {
  return take_line(estate, job);
}

even_status even_estate_take(const even_estate *estate, even_job *job) {
  memcpy(job->id, even_estate_text(estate, "job"), sizeof job->id);
  job->attempt =
      (int)json_integer_value(json_object_get(estate->content, "attempt")) + (even_estate_is_handed(estate) ? 0 : 1);
  job->era = (int)json_integer_value(json_object_get(estate->content, "era")) + 1;
  return take_line(estate, job);
}

bool even_estate_is_handed(const even_estate *estate) {
  return json_is_true(json_object_get(estate->content, "handed"));
}

/* ---- an attempt that goes on ---- */

bool even_estate_goes_on(const even_estate *estate) {
  return estate->holds != NULL;
}

void even_estate_let_go(even_estate *estate) {
  even_hold_free(estate->holds);
  estate->holds = NULL;
}

int even_estate_join_port(const even_estate *estate) {
  json_int_t port = json_integer_value(json_object_get(estate->content, "join_port"));
  return port > 0 && port < 65536 ? (int)port : 0;
}

const char *even_estate_predecessor(const even_estate *estate) {
  const json_t *hosts = json_object_get(estate->content, "hosts");
  return json_string_value(json_object_get(json_array_get(hosts, 0), "name"));
}

bool even_estate_find(const even_estate *estate, const char *name, even_estate_host *out) {
  size_t at = 0;
  json_t *host = NULL;
  json_array_foreach(json_object_get(estate->content, "hosts"), at, host) {
    if (strcmp(json_string_value(json_object_get(host, "name")), name) == 0) {
      const json_t *devices = json_object_get(host, "devices");
      *out = (even_estate_host){.name = json_string_value(json_object_get(host, "name")),
                                .member = member_of(host),
                                .first = number_of(host, "first"),
                                .count = json_array_size(devices),
                                .first_spare = number_of(host, "first_spare"),
                                .spares = number_of(host, "spares"),
                                .came = json_is_true(json_object_get(host, "came")),
                                .devices = devices,
                                .cpu_quota = json_object_get(host, "cpu_quota")};
      return true;
    }
  }
  return false;
}

const char *even_estate_own_name(const even_estate *estate) {
  size_t at = 0;
  json_t *host = NULL;
  json_array_foreach(json_object_get(estate->content, "hosts"), at, host) {
    if (member_of(host) == estate->self) {
      return json_string_value(json_object_get(host, "name"));
    }
  }
  return "";
}

double even_estate_quota(const even_estate *estate, const char *name, size_t number) {
  even_estate_host was;
  double quota = even_estate_find(estate, name, &was) ? json_number_value(json_array_get(was.cpu_quota, number)) : 0;
  return quota > 0 && quota <= 1 ? quota : (double)NAN;
}
