/* Which checkpoint of a folder to go on from. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/reader.h"

#include <evenstep/checkpoint.h>
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

/* A candidate for each folder whose manifest and sizes are right. */
static even_status collect(const char *folder, const even_names *names, candidate *candidates, size_t *count) {
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
    }
    even_checkpoint_info_free(&info);
  }
  even_text_free(&path);
  return status;
}

even_status even_checkpoint_find_newest(const char *folder, bool thorough, char **path) {
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
    status = collect(folder, &names, candidates, &count);
  }
  if (status == EVEN_OK && count > 1) {
    qsort(candidates, count, sizeof *candidates, newest_first);
  }
  for (size_t i = 0; i < count && status == EVEN_OK && *path == NULL; i++) {
    even_status whole = thorough ? even_checkpoint_verify(candidates[i].path, NULL) : EVEN_OK;
    if (whole == EVEN_OK) {
      *path = candidates[i].path;
      candidates[i].path = NULL;
    } else if (whole != EVEN_ERR_CORRUPT) {
      status = whole;
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
