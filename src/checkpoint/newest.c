/* Which checkpoint of a folder to go on from. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/reader.h"

#include <evenstep/checkpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
  char *path;
  char *created;
  int64_t step;
} candidate;

static int newest_first(const void *left, const void *right) {
  const candidate *a = left;
  const candidate *b = right;
  int order = strcmp(b->created, a->created);
  if (order != 0) {
    return order;
  }
  return a->step > b->step ? -1 : a->step < b->step;
}

static bool is_partial(const char *name) {
  size_t length = strlen(name);
  size_t suffix = strlen(EVEN_CHECKPOINT_PARTIAL);
  return length >= suffix && strcmp(name + length - suffix, EVEN_CHECKPOINT_PARTIAL) == 0;
}

/* The last error becomes a line of `damaged` (NULL: nobody asks). */
static even_status note_damaged(even_names *damaged) {
  char text[sizeof even_error_last()->what];
  if (damaged == NULL) {
    return EVEN_OK;
  }
  (void)snprintf(text, sizeof text, "%s", even_error_last()->what);
  EVEN_TRY(even_realloc((void **)&damaged->items, damaged->count + 1, sizeof *damaged->items));
  EVEN_TRY(even_duplicate(text, &damaged->items[damaged->count]));
  damaged->count++;
  return EVEN_OK;
}

/* A candidate for each folder whose manifest and sizes are right. */
static even_status collect(const char *folder, const even_names *names, candidate *candidates, size_t *count,
                           even_names *damaged) {
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  for (size_t i = 0; i < names->count && status == EVEN_OK; i++) {
    even_checkpoint_info info;
    if (is_partial(names->items[i])) {
      continue;
    }
    even_text_clear(&path);
    even_text_format(&path, "%s/%s", folder, names->items[i]);
    status = even_text_status(&path);
    if (status != EVEN_OK) {
      break;
    }
    even_status whole = even_checkpoint_inspect(even_text_string(&path), &info);
    if (whole == EVEN_OK) {
      candidate *next = &candidates[(*count)++];
      *next = (candidate){NULL, info.created, info.step};
      info.created = NULL;
      status = even_duplicate(even_text_string(&path), &next->path);
    } else if (whole == EVEN_ERR_MEMORY) {
      status = whole;
    } else if (whole == EVEN_ERR_CORRUPT) {
      status = note_damaged(damaged);
    }
    even_checkpoint_info_free(&info);
  }
  even_text_free(&path);
  return status;
}

static even_status find(const char *folder, bool thorough, even_names *damaged, char **path) {
  even_names names = {NULL, 0};
  candidate *candidates = NULL;
  size_t count = 0;
  *path = NULL;
  even_status status = even_folder_names(folder, &names);
  if (status == EVEN_ERR_NOT_FOUND) {
    even_names_free(&names);
    return EVEN_OK;
  }
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&candidates, names.count);
  }
  if (status == EVEN_OK) {
    status = collect(folder, &names, candidates, &count, damaged);
  }
  if (status == EVEN_OK && count > 1) {
    qsort(candidates, count, sizeof *candidates, newest_first);
  }
  for (size_t i = 0; i < count && status == EVEN_OK && *path == NULL; i++) {
    even_status whole = thorough ? even_checkpoint_verify(candidates[i].path, NULL) : EVEN_OK;
    if (whole == EVEN_OK) {
      *path = candidates[i].path;
      candidates[i].path = NULL;
    } else {
      status = whole == EVEN_ERR_CORRUPT ? note_damaged(damaged) : whole;
    }
  }
  for (size_t i = 0; i < count; i++) {
    even_free(candidates[i].path);
    even_free(candidates[i].created);
  }
  even_free(candidates);
  even_names_free(&names);
  return status;
}

even_status even_checkpoint_find_newest(const char *folder, bool thorough, char **path) {
  return find(folder, thorough, NULL, path);
}

even_status even_checkpoint_find_whole(const char *folder, even_names *damaged, char **path) {
  *damaged = (even_names){NULL, 0};
  return find(folder, true, damaged, path);
}
