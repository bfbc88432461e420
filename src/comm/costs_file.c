/* The table of costs as a file: JSON, replaced as a whole, by one process at a time. Costs are whole nanoseconds there:
 * no locale writes these in a way of its own. */
#include "comm/costs.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_check.h"
#include "base/json_walk.h"
#include "base/json_writer.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/thread.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char format[] = "evenstep-comm-costs-1";

enum { LARGEST_FILE = 8 << 20 };
static const int64_t OLDEST_SECONDS = INT64_C(90) * 24 * 3600;
static const uint64_t LOCK_LIMIT_NS = UINT64_C(1000000000);
static const uint64_t LOCK_PAUSE_NS = UINT64_C(2000000);

static int64_t now_seconds(void) {
  return (int64_t)(even_clock_wall_ns() / UINT64_C(1000000000));
}

/* ---- writing ---- */

static void write_entry(even_json *json, const even_comm_cost *cost) {
  even_json_object(json, NULL);
  even_json_string(json, "collective", cost->collective);
  even_json_unsigned(json, "bytes", cost->bytes);
  even_json_string(json, "engine", cost->engine);
  even_json_string(json, "way", cost->way);
  even_json_integer(json, "ns", (int64_t)fmax(1, fmin(cost->seconds * 1e9, 9e15)));
  even_json_unsigned(json, "samples", cost->samples);
  even_json_integer(json, "at", cost->at);
  even_json_string(json, "shape", cost->shape);
  even_json_object_end(json);
}

void even_comm_costs_write(even_comm_costs *costs, even_text *out) {
  even_json json = even_json_begin(out, 1);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", format);
  even_json_array(&json, "costs");
  (void)pthread_mutex_lock(&costs->lock);
  for (size_t i = 0; i < costs->count; i++) {
    write_entry(&json, &costs->entries[i].cost);
  }
  (void)pthread_mutex_unlock(&costs->lock);
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_text_add(out, "\n");
}

/* ---- reading ---- */

typedef struct reading {
  const char *origin;
  size_t number; /* of the entry, from 1 */
  even_comm_costs *into;
  int64_t oldest;
} reading;

static even_status wrong(const reading *now, const char *what) {
  return even_fail(EVEN_ERR_INPUT, "%s: cost %zu: %s", now->origin, now->number, what);
}

/* A whole number that a double holds exactly. */
static even_status read_count(const reading *now, even_json_walk value, const char *name, double least, double most,
                              double *out) {
  char words[96];
  if (!even_json_walk_number(value, out) || !(*out >= least) || !(*out <= most) || floor(*out) != *out) {
    (void)snprintf(words, sizeof words, "its \"%s\" is no whole number of %.0f to %.0f", name, least, most);
    return wrong(now, words);
  }
  return EVEN_OK;
}

static even_status read_word(const reading *now, even_json_walk value, const char *name, char *out, size_t room) {
  char words[96];
  if (!even_json_walk_string(value, out, room) || out[0] == '\0') {
    (void)snprintf(words, sizeof words, "its \"%s\" is no text of 1 to %zu bytes", name, room - 1);
    return wrong(now, words);
  }
  return EVEN_OK;
}

static even_status read_member(const reading *now, const char *name, even_json_walk value, even_comm_cost *cost) {
  static const double most = 9007199254740992.0; /* 2^53 */
  double number = 0;
  even_status status = EVEN_OK;
  if (strcmp(name, "collective") == 0) {
    status = read_word(now, value, name, cost->collective, sizeof cost->collective);
  } else if (strcmp(name, "shape") == 0) {
    status = read_word(now, value, name, cost->shape, sizeof cost->shape);
  } else if (strcmp(name, "engine") == 0) {
    status = read_word(now, value, name, cost->engine, sizeof cost->engine);
  } else if (strcmp(name, "way") == 0) {
    status = read_word(now, value, name, cost->way, sizeof cost->way);
  } else if (strcmp(name, "bytes") == 0) {
    status = read_count(now, value, name, 1, most, &number);
    cost->bytes = status == EVEN_OK ? (uint64_t)number : 0;
  } else if (strcmp(name, "ns") == 0) {
    status = read_count(now, value, name, 1, most, &number);
    cost->seconds = number * 1e-9;
  } else if (strcmp(name, "samples") == 0) {
    status = read_count(now, value, name, 1, UINT32_MAX, &number);
    cost->samples = status == EVEN_OK ? (uint32_t)number : 0;
  } else if (strcmp(name, "at") == 0) {
    status = read_count(now, value, name, 0, most, &number);
    cost->at = status == EVEN_OK ? (int64_t)number : 0;
  }
  return status; /* what a later version adds is passed over */
}

static even_status read_entry(const reading *now, even_json_walk value) {
  even_comm_cost cost = {.at = -1};
  even_json_walk inside;
  char name[16];
  if (!even_json_walk_enter(value, '{', &inside)) {
    return wrong(now, "it is no object");
  }
  while (even_json_walk_member(&inside, name, sizeof name, &value)) {
    EVEN_TRY(read_member(now, name, value, &cost));
  }
  const struct {
    const char *name;
    bool given;
  } needed[] = {{"collective", cost.collective[0] != '\0'},
                {"bytes", cost.bytes != 0},
                {"engine", cost.engine[0] != '\0'},
                {"way", cost.way[0] != '\0'},
                {"ns", cost.seconds > 0},
                {"samples", cost.samples != 0},
                {"at", cost.at >= 0},
                {"shape", cost.shape[0] != '\0'}};
  for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
    if (!needed[i].given) {
      char words[64];
      (void)snprintf(words, sizeof words, "it has no \"%s\"", needed[i].name);
      return wrong(now, words);
    }
  }
  even_comm_cost_key key = even_comm_cost_key_of(&cost);
  if (even_comm_costs_check(&key) != EVEN_OK) {
    return wrong(now, even_error_last()->what);
  }
  return cost.at < now->oldest ? EVEN_OK : even_comm_costs_merge(now->into, &cost);
}

static even_status read_list(reading *now, even_json_walk list) {
  even_json_walk value;
  while (even_json_walk_element(&list, &value)) {
    now->number++;
    if (now->number > EVEN_COMM_COSTS_MOST) {
      return even_fail(EVEN_ERR_INPUT, "%s has more than %d costs", now->origin, EVEN_COMM_COSTS_MOST);
    }
    EVEN_TRY(read_entry(now, value));
  }
  return EVEN_OK;
}

static even_status read_document(reading *now, const char *text) {
  even_json_walk inside;
  even_json_walk value;
  even_json_walk list;
  char name[16];
  char found[48] = "missing";
  bool has_list = false;
  (void)even_json_walk_enter(even_json_walk_begin(text), '{', &inside); /* it was checked to be an object */
  while (even_json_walk_member(&inside, name, sizeof name, &value)) {
    if (strcmp(name, "format") == 0 && !even_json_walk_string(value, found, sizeof found)) {
      (void)snprintf(found, sizeof found, "no short text");
    }
    has_list = (strcmp(name, "costs") == 0 && even_json_walk_enter(value, '[', &list)) || has_list;
  }
  if (strcmp(found, format) != 0) {
    return even_fail(EVEN_ERR_INPUT, "%s is no table of communication costs: its format is %s, not %s", now->origin,
                     found, format);
  }
  return has_list ? read_list(now, list) : even_fail(EVEN_ERR_INPUT, "%s has no list of costs", now->origin);
}

/* Both tables are the caller's, and `from` is nobody else's. */
static even_status take_all(even_comm_costs *into, const even_comm_costs *from) {
  even_status status = EVEN_OK;
  (void)pthread_mutex_lock(&into->lock);
  for (size_t i = 0; i < from->count && status == EVEN_OK; i++) {
    status = even_comm_costs_merge(into, &from->entries[i].cost);
  }
  (void)pthread_mutex_unlock(&into->lock);
  return status;
}

even_status even_comm_costs_read(even_comm_costs *costs, const char *origin, const char *text, size_t length,
                                 int64_t oldest) {
  reading now = {.origin = origin, .oldest = oldest};
  if (strlen(text) != length) {
    return even_fail(EVEN_ERR_INPUT, "%s has a NUL in its text", origin);
  }
  if (even_json_check_object(origin, text) != EVEN_OK) {
    even_error why = *even_error_last();
    why.status = EVEN_ERR_INPUT; /* it is a file's content, not a caller's argument */
    return even_error_restore(&why);
  }
  EVEN_TRY(even_comm_costs_open(&now.into));
  even_status status = read_document(&now, text);
  status = status == EVEN_OK ? take_all(costs, now.into) : status;
  even_comm_costs_close(now.into);
  return status;
}

/* ---- the file ---- */

static even_status fix(even_status status) {
  return status == EVEN_ERR_INPUT ? even_error_fix(
                                        "remove the file, or name another with EVENSTEP_COMM_COSTS: what it "
                                        "should hold is measured anew")
                                  : status;
}

static even_status load(even_comm_costs *costs, const char *path, int64_t oldest) {
  even_text text = EVEN_TEXT_EMPTY;
  if (!even_path_exists(path)) {
    return EVEN_OK;
  }
  even_status status = even_file_read(path, LARGEST_FILE, &text);
  if (status == EVEN_OK && text.length == 0) {
    status = even_fail(EVEN_ERR_INPUT, "%s is empty", path);
  }
  if (status == EVEN_OK) {
    status = even_comm_costs_read(costs, path, even_text_string(&text), text.length, oldest);
  }
  even_text_free(&text);
  return fix(status);
}

even_status even_comm_costs_load(even_comm_costs *costs, const char *path) {
  return load(costs, path, now_seconds() - OLDEST_SECONDS);
}

/* Its folder, "." where the path names none. Free *out. */
static even_status folder_of(const char *path, char **out) {
  const char *slash = strrchr(path, '/');
  EVEN_TRY(even_duplicate(slash == NULL ? "." : path, out));
  if (slash != NULL) {
    (*out)[slash == path ? 1 : slash - path] = '\0';
  }
  return EVEN_OK;
}

static even_status lock_folder(const char *folder, int *fd) {
  uint64_t until = even_clock_ns() + LOCK_LIMIT_NS;
  for (;;) {
    even_status status = even_folder_lock(folder, fd);
    if (status == EVEN_ERR_UNSUPPORTED) {
      return EVEN_OK; /* without turns: the file stays whole, a sample may be lost */
    }
    if (status != EVEN_OK || *fd >= 0) {
      return status;
    }
    if (even_clock_ns() >= until) {
      return even_fail(EVEN_ERR_IN_USE, "folder %s is locked by another process", folder);
    }
    even_clock_sleep_ns(LOCK_PAUSE_NS); /* a lock has no event but its own blocking call, which has no limit */
  }
}

/* What `costs` learnt since the last save, taken out of it and into the table of the file. */
static even_status move_fresh(even_comm_costs *costs, even_comm_costs *file) {
  int64_t now = now_seconds();
  even_status status = EVEN_OK;
  (void)pthread_mutex_lock(&costs->lock);
  for (size_t i = 0; i < costs->count && status == EVEN_OK; i++) {
    even_cost_entry *entry = &costs->entries[i];
    if (entry->fresh > 0) {
      even_comm_cost learnt = entry->cost;
      learnt.samples = entry->fresh;
      learnt.at = now;
      status = even_comm_costs_merge(file, &learnt);
    }
  }
  (void)pthread_mutex_unlock(&costs->lock);
  return status;
}

static void forget_fresh(even_comm_costs *costs) {
  int64_t now = now_seconds();
  (void)pthread_mutex_lock(&costs->lock);
  for (size_t i = 0; i < costs->count; i++) {
    if (costs->entries[i].fresh > 0) {
      costs->entries[i].fresh = 0;
      costs->entries[i].cost.at = now;
    }
  }
  (void)pthread_mutex_unlock(&costs->lock);
}

/* Where no lock keeps others away, the file that is written meanwhile has a name of this process's own. */
static even_status replace_apart(const char *path, const even_text *content) {
  even_text own = EVEN_TEXT_EMPTY;
  char host[64];
  even_host_name(host, sizeof host);
  even_text_format(&own, "%s.%s.%ld", path, host, (long)even_own_process());
  even_status status = even_text_status(&own);
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&own), even_text_string(content), content->length);
  }
  if (status == EVEN_OK) {
    status = even_file_rename(even_text_string(&own), path);
    if (status != EVEN_OK) {
      const even_error why = *even_error_last();
      if (even_file_remove(even_text_string(&own)) != EVEN_OK) {
        even_error_clear(); /* it stays there; what is told is why it did not become the table */
      }
      status = even_error_restore(&why);
    }
  }
  even_text_free(&own);
  return status;
}

static even_status replace(even_comm_costs *costs, const char *path, bool locked) {
  even_comm_costs *file = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_comm_costs_open(&file));
  even_status status = load(file, path, now_seconds() - OLDEST_SECONDS);
  status = status == EVEN_OK ? move_fresh(costs, file) : status;
  if (status == EVEN_OK) {
    even_comm_costs_write(file, &text);
    status = even_text_status(&text);
  }
  if (status == EVEN_OK) {
    status = locked ? even_file_replace(path, even_text_string(&text), text.length) : replace_apart(path, &text);
  }
  even_text_free(&text);
  even_comm_costs_close(file);
  return status;
}

static bool has_fresh(even_comm_costs *costs) {
  bool found = false;
  (void)pthread_mutex_lock(&costs->lock);
  for (size_t i = 0; i < costs->count && !found; i++) {
    found = costs->entries[i].fresh > 0;
  }
  (void)pthread_mutex_unlock(&costs->lock);
  return found;
}

even_status even_comm_costs_save(even_comm_costs *costs, const char *path) {
  char *folder = NULL;
  int fd = -1;
  if (!has_fresh(costs)) {
    return EVEN_OK;
  }
  EVEN_TRY(folder_of(path, &folder));
  even_status status = even_folder_make(folder);
  status = status == EVEN_OK ? lock_folder(folder, &fd) : status;
  if (status == EVEN_OK) {
    status = replace(costs, path, fd >= 0);
    even_folder_unlock(fd);
  }
  even_free(folder);
  if (status == EVEN_OK) {
    forget_fresh(costs);
  }
  return status;
}
