/* MPI's own figures beside ours, where an MPI and its Python package are found. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/bench_comm.h"
#include "os/dialogue.h"
#include "os/folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 32, LIMIT_MS = 600000, ENDING_MS = 10000 };

/* Packages of PyPI put it beside the interpreter. */
static const char *find_mpirun(const char *python, char *out, size_t bytes) {
  const char *slash = strrchr(python, '/');
  if (slash != NULL) {
    (void)snprintf(out, bytes, "%.*s/mpirun", (int)(slash - python), python);
    if (even_path_exists(out)) {
      return out;
    }
  }
  (void)snprintf(out, bytes, "mpirun");
  return out;
}

/* What Open MPI wants to be told of a root user and of more ranks than cores; others do not look at it. */
static void allow_any_user(void) {
  (void)setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  (void)setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  (void)setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
  (void)setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe", 1);
}

/* Ranks that have no mpi4py say so, instead of figures. */
static void look_for_refusal(json_t **out, char *note, size_t note_bytes) {
  const char *missing = json_string_value(json_object_get(*out, "missing"));
  if (missing != NULL) {
    (void)snprintf(note, note_bytes, "%s", missing);
    json_decref(*out);
    *out = NULL;
  }
}

/* Until it has closed its output: an MPI that is ended before it ends by itself leaves its segments behind. */
static void let_end(even_dialogue *dialogue) {
  const char *line = NULL;
  while (even_dialogue_hear(dialogue, ENDING_MS, &line) == EVEN_OK && line != NULL) {
  }
}

/* Its JSON, on the one line that begins like it; what MPI itself prints is passed over. */
static void hear(even_dialogue *dialogue, json_t **out, char *note, size_t note_bytes) {
  for (;;) {
    const char *line = NULL;
    even_status status = even_dialogue_hear(dialogue, LIMIT_MS, &line);
    if (status == EVEN_OK && line == NULL) {
      even_dialogue_complaint(dialogue, note, note_bytes);
      return;
    }
    if (status == EVEN_OK && line[0] == '{') {
      status = even_json_parse("MPI's figures", line, strlen(line), out);
      if (status == EVEN_OK) {
        look_for_refusal(out, note, note_bytes);
        let_end(dialogue);
        return;
      }
    }
    if (status != EVEN_OK) { /* ours are measured already: they are not lost for it */
      (void)snprintf(note, note_bytes, "%s", even_error_last()->what);
      return;
    }
  }
}

/* What the ranks of one interpreter's MPI say, NULL without figures, and `note` why. */
static json_t *measure_one(const char *python, const char *ranks, char *const *words, char *note, size_t note_bytes) {
  char mpirun[4096];
  char *arguments[MOST_WORDS];
  even_dialogue dialogue;
  json_t *out = NULL;
  size_t count = 0;
  arguments[count++] = (char *)(uintptr_t)find_mpirun(python, mpirun, sizeof mpirun);
  const char *const first[] = {"-n", ranks, python, "-m", "evenstep.bench_comm", "--mpi"};
  for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
    arguments[count++] = (char *)(uintptr_t)first[i];
  }
  for (size_t i = 0; words[i] != NULL && count < MOST_WORDS - 1; i++) {
    arguments[count++] = words[i];
  }
  arguments[count] = NULL;
  if (even_dialogue_start(arguments, &dialogue) != EVEN_OK) {
    (void)snprintf(note, note_bytes, "no mpirun beside the interpreter or on PATH");
    return NULL;
  }
  hear(&dialogue, &out, note, note_bytes);
  even_dialogue_end(&dialogue);
  return out;
}

static double seconds_of(const json_t *row) {
  return json_number_value(json_object_get(json_object_get(row, "seconds"), "mpi"));
}

/* Each row of the first MPI is replaced by the other's of the same exchange, where that took less time: all were asked
 * for the same ones, in the same order. */
static void keep_fastest(json_t *rows, const json_t *others) {
  for (size_t i = 0; i < json_array_size(rows) && i < json_array_size(others); i++) {
    json_t *other = json_array_get(others, i);
    if (seconds_of(other) > 0 && seconds_of(other) < seconds_of(json_array_get(rows, i))) {
      (void)json_array_set(rows, i, other); /* without memory for it the slower one stays */
    }
  }
}

static void name_rows(const json_t *one) {
  json_t *rows = json_object_get(one, "rows");
  for (size_t i = 0; i < json_array_size(rows); i++) {
    (void)json_object_set(json_array_get(rows, i), "library", json_object_get(one, "library"));
  }
}

/* "library" and "rows" of *all become those of all that were measured; "each" has them one by one. */
static void add_one(json_t **all, json_t *one) {
  name_rows(one);
  json_t *each = json_object_get(*all, "each");
  if (*all == NULL) {
    *all = json_pack("{s:O, s:o, s:[O]}", "library", json_object_get(one, "library"), "rows",
                     json_copy(json_object_get(one, "rows")), "each", one);
  } else if (json_array_append(each, one) == 0) {
    const char *library = json_string_value(json_object_get(*all, "library"));
    json_t *more = json_object_get(one, "library");
    (void)json_object_set_new(*all, "library", json_sprintf("%s; %s", library, json_string_value(more)));
    keep_fastest(json_object_get(*all, "rows"), json_object_get(one, "rows"));
  }
  json_decref(one);
}

void even_bench_mpi(const char *pythons, const char *ranks, char *const *words, json_t **out, char *note,
                    size_t note_bytes) {
  const char *at = pythons;
  *out = NULL;
  note[0] = '\0';
  allow_any_user();
  while (at != NULL) {
    const char *comma = strchr(at, ',');
    char python[4096];
    char why[sizeof even_error_last()->what] = "";
    (void)snprintf(python, sizeof python, "%.*s", (int)(comma == NULL ? strlen(at) : (size_t)(comma - at)), at);
    json_t *one = measure_one(python, ranks, words, why, sizeof why);
    if (one != NULL) {
      add_one(out, one);
    } else if (strchr(pythons, ',') == NULL) {
      (void)snprintf(note, note_bytes, "%s", why);
    } else {
      (void)snprintf(note, note_bytes, "%s: %s", python, why);
    }
    at = comma == NULL ? NULL : comma + 1;
  }
}
