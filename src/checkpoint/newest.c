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
  char *order;
  int64_t step;
} candidate;

static int newest_first(const void *left, const void *right) {
  const candidate *a = left;
  const candidate *b = right;
  int order = strcmp(b->order, a->order);
  if (order != 0) {
    return order;
  }
  return a->step > b->step ? -1 : a->step < b->step;
}

/* A folder's own, which only root may look into: it holds no checkpoint. */
static bool is_of_the_file_system(const char *name) {
  return strcmp(name, "lost+found") == 0;
}

/* What is searched for, and where it is told what was passed over. */
typedef struct search {
  even_checkpoint_accept accept; /* NULL: all */
  const void *context;
  bool thorough;
  even_names *damaged; /* NULL: nobody asks */
} search;

/* The last error becomes a line of `damaged`. */
static even_status note_damaged(even_names *damaged) {
  char text[sizeof even_error_last()->what];
  if (damaged == NULL) {
    return EVEN_OK;
  }
  (void)snprintf(text, sizeof text, "%s", even_error_last()->what);
  return even_names_add(damaged, text);
}

/* After a candidate could not be read. What is no checkpoint, or was removed meanwhile, says nothing; all else is
 * noted: a training that is there but cannot be read must not look as if there were none. */
static even_status pass_over(even_status why, even_names *damaged) {
  switch (why) {
    case EVEN_ERR_INPUT:
    case EVEN_ERR_NOT_FOUND:
      return EVEN_OK;
    case EVEN_ERR_MEMORY:
    case EVEN_ERR_INTERRUPTED:
      return why;
    default:
      return note_damaged(damaged);
  }
}

/* A candidate where the manifest and the sizes are right. */
static even_status look_at(const search *what, const char *path, candidate *candidates, size_t *count) {
  even_checkpoint_info info;
  even_status status = even_checkpoint_inspect(path, &info);
  bool wanted = info.state == NULL || what->accept == NULL || what->accept(what->context, &info);
  if (status == EVEN_OK && wanted) {
    candidate *next = &candidates[(*count)++];
    *next = (candidate){NULL, info.order, info.step};
    info.order = NULL;
    status = even_duplicate(path, &next->path);
  } else if (status != EVEN_OK) {
    status = pass_over(status, wanted ? what->damaged : NULL);
  }
  even_checkpoint_info_free(&info);
  return status;
}

static even_status collect(const search *what, const char *folder, const even_names *names, candidate *candidates,
                           size_t *count) {
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  for (size_t i = 0; i < names->count && status == EVEN_OK; i++) {
    if (even_ends_with(names->items[i], EVEN_CHECKPOINT_PARTIAL) || is_of_the_file_system(names->items[i])) {
      continue;
    }
    even_text_clear(&path);
    even_text_format(&path, "%s/%s", folder, names->items[i]);
    status = even_text_status(&path);
    if (status == EVEN_OK) {
      status = look_at(what, even_text_string(&path), candidates, count);
    }
  }
  even_text_free(&path);
  return status;
}

/* Adds those of one folder; one that is not there has none. */
static even_status collect_of(const search *what, const char *folder, candidate **candidates, size_t *count) {
  even_names names = {NULL, 0};
  even_status status = even_folder_names(folder, &names);
  if (status == EVEN_ERR_NOT_FOUND) {
    status = EVEN_OK;
  } else if (status == EVEN_OK) {
    status = even_realloc((void **)candidates, *count + names.count + 1, sizeof **candidates);
  }
  if (status == EVEN_OK) {
    status = collect(what, folder, &names, *candidates, count);
  }
  even_names_free(&names);
  return status;
}

static even_status find(const search *what, const char *const *folders, size_t folder_count, char **path) {
  candidate *candidates = NULL;
  size_t count = 0;
  even_status status = EVEN_OK;
  *path = NULL;
  for (size_t i = 0; status == EVEN_OK && i < folder_count; i++) {
    status = collect_of(what, folders[i], &candidates, &count);
  }
  if (status == EVEN_OK && count > 1) {
    qsort(candidates, count, sizeof *candidates, newest_first);
  }
  for (size_t i = 0; i < count && status == EVEN_OK && *path == NULL; i++) {
    even_status whole = what->thorough ? even_checkpoint_verify(candidates[i].path, NULL) : EVEN_OK;
    if (whole == EVEN_OK) {
      *path = candidates[i].path;
      candidates[i].path = NULL;
    } else {
      status = pass_over(whole, what->damaged);
    }
  }
  for (size_t i = 0; i < count; i++) {
    even_free(candidates[i].path);
    even_free(candidates[i].order);
  }
  even_free(candidates);
  return status;
}

even_status even_checkpoint_find_newest(const char *folder, bool thorough, char **path) {
  return find(&(search){.thorough = thorough}, &folder, 1, path);
}

even_status even_checkpoint_find_newest_of(const char *folder, even_checkpoint_accept accept, const void *context,
                                           char **path) {
  return find(&(search){.accept = accept, .context = context}, &folder, 1, path);
}

even_status even_checkpoint_find_whole_of(const char *const *folders, size_t count, even_checkpoint_accept accept,
                                          const void *context, even_names *damaged, char **path) {
  *damaged = (even_names){NULL, 0};
  return find(&(search){.accept = accept, .context = context, .thorough = true, .damaged = damaged}, folders, count,
              path);
}

even_status even_checkpoint_find_whole(const char *folder, even_checkpoint_accept accept, const void *context,
                                       even_names *damaged, char **path) {
  return even_checkpoint_find_whole_of(&folder, 1, accept, context, damaged, path);
}
