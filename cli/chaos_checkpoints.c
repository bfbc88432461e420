/* The checkpoints of a job under `evenstep chaos`: which of them are there, and faults that damage the newest. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "cli/chaos_hosts.h"
#include "os/changed_copy.h"
#include "os/clock.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static even_status names_of(const even_chaos_job *job, even_text *folder, even_names *names) {
  even_text_format(folder, "%s/checkpoints", even_text_string(&job->folder));
  EVEN_TRY(even_text_status(folder));
  return even_path_is_folder(even_text_string(folder)) ? even_folder_names(even_text_string(folder), names) : EVEN_OK;
}

/* Whether it has its name for good, which it gets when it is whole. */
static bool is_whole(const char *name) {
  return strstr(name, EVEN_CHECKPOINT_PARTIAL) == NULL;
}

/* ---- which there are ---- */

/* "step-00000120", and more behind where another training has that name; -1: it is no step's. */
static int64_t steps_of(const char *name) {
  static const char prefix[] = "step-";
  char *end = NULL;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0 || !is_whole(name)) {
    return -1;
  }
  long long steps = strtoll(name + sizeof prefix - 1, &end, 10);
  return end == name + sizeof prefix - 1 || (*end != '\0' && *end != '-') ? -1 : (int64_t)steps;
}

static even_chaos_checkpoint *find(const even_chaos_checkpoints *seen, const char *name) {
  for (size_t i = seen->count; i > 0; i--) {
    if (strcmp(seen->of[i - 1].name, name) == 0) {
      return &seen->of[i - 1];
    }
  }
  return NULL;
}

static even_status add(even_chaos_checkpoints *seen, const char *name, uint64_t now) {
  int64_t steps = steps_of(name);
  even_chaos_checkpoint one = {.steps = steps, .seen_ns = now};
  if (steps < 0 || strlen(name) >= sizeof one.name || find(seen, name) != NULL) {
    return EVEN_OK;
  }
  if ((seen->count & (seen->count - 1)) == 0) { /* capacities are powers of two */
    EVEN_TRY(even_realloc((void **)&seen->of, seen->count == 0 ? 1 : 2 * seen->count, sizeof *seen->of));
  }
  (void)snprintf(one.name, sizeof one.name, "%s", name);
  seen->of[seen->count++] = one;
  return EVEN_OK;
}

void even_chaos_checkpoints_look(even_chaos_job *job) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_names names = {NULL, 0};
  even_status status = job->faults == 0 ? EVEN_OK : names_of(job, &folder, &names);
  uint64_t now = even_clock_ns(); /* all of these were there by then */
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    status = add(&job->checkpoints, names.items[i], now);
  }
  if (status != EVEN_OK) {
    even_error_clear(); /* what was not seen is not counted on */
  }
  even_names_free(&names);
  even_text_free(&folder);
}

void even_chaos_checkpoints_close(even_chaos_job *job) {
  even_free(job->checkpoints.of);
  job->checkpoints = (even_chaos_checkpoints){NULL, 0};
}

int64_t even_chaos_held_at(const even_chaos_job *job, uint64_t at_ns) {
  int64_t most = 0;
  for (size_t i = 0; i < job->checkpoints.count; i++) {
    const even_chaos_checkpoint *one = &job->checkpoints.of[i];
    most = !one->damaged && one->seen_ns <= at_ns && one->steps > most ? one->steps : most;
  }
  return most;
}

/* ---- damage ---- */

/* A file of the checkpoint that is not empty, chosen by the dice. */
static even_status choose_file(const char *checkpoint, uint64_t dice, even_text *out, uint64_t *bytes) {
  even_checkpoint_info info = {.step = -1};
  even_status status = even_checkpoint_inspect(checkpoint, &info);
  if (status == EVEN_OK && info.file_count == 0) {
    status = even_fail(EVEN_ERR_CORRUPT, "%s has no files", checkpoint);
  } else if (status == EVEN_OK) {
    const even_checkpoint_stored_file *file = &info.files[dice % info.file_count];
    *bytes = file->bytes;
    even_text_format(out, "%s/%s", checkpoint, file->name);
    status = even_text_status(out);
  }
  if (status == EVEN_OK && *bytes == 0) {
    status = even_fail(EVEN_ERR_INPUT, "%s is empty", even_text_string(out));
  }
  even_checkpoint_info_free(&info);
  return status;
}

/* Turns one bit, or takes the second half away. What is changed is a copy beside the checkpoint, which takes the file's
 * place: others share files that stayed the same, and are to stay whole. */
static even_status damage_file(const even_chaos_job *job, const char *path, uint64_t file_bytes, char *words,
                               size_t bytes) {
  const even_chaos_fault *fault = &job->plan[job->next];
  const char *name = even_path_name(path);
  even_file_change change = {.bytes = UINT64_MAX, .at = UINT64_MAX};
  even_text temporary = EVEN_TEXT_EMPTY;
  if (fault->kind == EVEN_CHAOS_TORN) {
    change.bytes = file_bytes / 2;
    (void)snprintf(words, bytes, "%.60s cut to %llu bytes", name, (unsigned long long)change.bytes);
  } else {
    unsigned bit = (unsigned)(fault->dice & 7u);
    change.at = file_bytes == 0 ? 0 : (fault->dice >> 8) % file_bytes;
    change.xor = (unsigned char)(1u << bit);
    (void)snprintf(words, bytes, "%.60s, byte %llu, bit %u", name, (unsigned long long)change.at, bit);
  }
  even_text_format(&temporary, "%s/chaos-damage", even_text_string(&job->folder));
  even_status status = even_text_status(&temporary);
  if (status == EVEN_OK) {
    status = even_file_put_changed(path, even_text_string(&temporary), &change);
  }
  even_text_free(&temporary);
  return status;
}

/* With fewer than two there is none to fall back to, and the whole training would only begin anew. */
static even_status newest_of_two(const even_chaos_job *job, char **out) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_names names = {NULL, 0};
  *out = NULL;
  even_status status = names_of(job, &folder, &names);
  size_t whole = 0;
  for (size_t i = 0; i < names.count; i++) {
    whole += is_whole(names.items[i]);
  }
  if (status == EVEN_OK && whole >= 2) {
    status = even_checkpoint_find_newest(even_text_string(&folder), false, out);
  }
  even_names_free(&names);
  even_text_free(&folder);
  return status;
}

static void mark_damaged(even_chaos_job *job, const char *name) {
  even_chaos_checkpoints_look(job); /* it may be newer than the last look */
  even_chaos_checkpoint *one = find(&job->checkpoints, name);
  if (one != NULL) {
    one->damaged = true;
  }
}

/* It may have been removed for a newer one meanwhile: then later. */
static void tell_not_damaged(even_chaos_job *job, bool chosen, even_status why) {
  char words[224];
  (void)snprintf(words, sizeof words, "the newest checkpoint could not be damaged: %.160s", even_error_last()->what);
  if (!chosen || why == EVEN_ERR_NOT_FOUND) {
    even_chaos_postpone(job, words);
  } else {
    even_chaos_tell_not(job, words);
  }
  even_error_clear();
}

even_status even_chaos_damage(even_chaos_job *job, const even_process_stat *rank) {
  const even_chaos_fault *fault = &job->plan[job->next];
  char *newest = NULL;
  even_text path = EVEN_TEXT_EMPTY;
  uint64_t bytes = 0;
  char words[128];
  char whole[192];
  if (job->host.full_until_ns != 0) {
    even_chaos_postpone(job, "the disk is full, and has no room for what is damaged");
    return EVEN_OK;
  }
  EVEN_TRY(newest_of_two(job, &newest));
  if (newest == NULL) {
    even_chaos_postpone(job, "there were no two checkpoints, of which one would be left");
    return EVEN_OK;
  }
  const char *name = even_path_name(newest);
  even_status status = choose_file(newest, fault->dice >> 40, &path, &bytes);
  bool chosen = status == EVEN_OK;
  if (chosen) {
    status = damage_file(job, even_text_string(&path), bytes, words, sizeof words);
  }
  if (status == EVEN_OK) {
    mark_damaged(job, name);
    (void)snprintf(whole, sizeof whole, "%.40s: %.100s; rank %d killed", name, words, job->victim);
    (void)even_chaos_kill_victim(job, rank);
    even_chaos_tell(job, whole);
  } else {
    tell_not_damaged(job, chosen, status);
  }
  even_text_free(&path);
  even_free(newest);
  return EVEN_OK;
}
