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

void even_bench_mpi(const char *python, const char *ranks, char *const *words, json_t **out, char *note,
                    size_t note_bytes) {
  char mpirun[4096];
  char *arguments[MOST_WORDS];
  even_dialogue dialogue;
  size_t count = 0;
  *out = NULL;
  note[0] = '\0';
  arguments[count++] = (char *)(uintptr_t)find_mpirun(python, mpirun, sizeof mpirun);
  const char *const first[] = {"-n", ranks, python, "-m", "evenstep.bench_comm", "--mpi"};
  for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
    arguments[count++] = (char *)(uintptr_t)first[i];
  }
  for (size_t i = 0; words[i] != NULL && count < MOST_WORDS - 1; i++) {
    arguments[count++] = words[i];
  }
  arguments[count] = NULL;
  allow_any_user();
  if (even_dialogue_start(arguments, &dialogue) != EVEN_OK) {
    (void)snprintf(note, note_bytes, "no mpirun beside the interpreter or on PATH");
    return;
  }
  hear(&dialogue, out, note, note_bytes);
  even_dialogue_end(&dialogue);
}
