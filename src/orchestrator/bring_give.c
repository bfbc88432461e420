/* Which checkpoints a host has for its leader, and sending one. */
#include "orchestrator/bring_give.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "orchestrator/host_memory.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FOLDERS = 8 };

struct even_bring_give {
  even_parcels *parcels;
  const even_bring_kept *kept;
  void (*tell)(void *context, even_text *text);
  void *context;
  uint64_t serial; /* of what was asked for last */
  bool sends;
  even_bring_files files; /* of what it sends */
};

/* One that is here. */
typedef struct had {
  char *folder;
  char *order;
  bool memory;
} had;

typedef struct had_list {
  had *items;
  size_t count;
} had_list;

/* ---- saying ---- */

static void begin_words(const even_bring_give *give, even_text *text, even_json *json) {
  *json = even_json_begin(text, 0);
  even_json_object(json, NULL);
  even_json_unsigned(json, "serial", give->serial);
}

static void say_error(even_bring_give *give, const even_error *error) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json;
  begin_words(give, &text, &json);
  even_json_integer(&json, "status", error->status);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  give->tell(give->context, &text);
}

/* ---- what is here ---- */

static bool is_wanted(const json_t *wish, const even_checkpoint_info *info) {
  const char *job = json_string_value(json_object_get(info->state, "job"));
  const char *lineage = json_string_value(json_object_get(info->state, "lineage"));
  const char *of_job = even_json_text(wish, "job");
  const char *of = even_json_text(wish, "lineage");
  const char *until = even_json_text(wish, "until");
  if (strcmp(info->order, even_json_text(wish, "after")) <= 0) {
    return false;
  }
  bool written = of_job[0] != '\0' && job != NULL && strcmp(job, of_job) == 0;
  bool descends = of[0] != '\0' && lineage != NULL && strcmp(lineage, of) == 0 &&
                  (until[0] == '\0' || strcmp(info->order, until) <= 0);
  return written || descends || json_is_true(json_object_get(wish, "any"));
}

/* The path is the list's then. */
static even_status add(had_list *list, even_text *path, even_checkpoint_info *info, bool memory) {
  EVEN_TRY(even_realloc((void **)&list->items, list->count + 1, sizeof *list->items));
  had *one = &list->items[list->count];
  *one = (had){.order = info->order, .memory = memory};
  EVEN_TRY(even_duplicate(path->data, &one->folder));
  info->order = NULL;
  list->count++;
  return EVEN_OK;
}

/* What is none, is not whole by its sizes, or is being removed is not had. */
static even_status look_at(const json_t *wish, even_text *path, bool memory, had_list *list) {
  even_checkpoint_info info;
  even_status status = even_checkpoint_inspect(path->data, &info);
  if (status == EVEN_OK && is_wanted(wish, &info)) {
    status = add(list, path, &info, memory);
  } else if (status != EVEN_OK && status != EVEN_ERR_MEMORY) {
    even_error_clear();
    status = EVEN_OK;
  }
  even_checkpoint_info_free(&info);
  return status;
}

static even_status look_in(const json_t *wish, const char *folder, bool memory, had_list *list) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = even_folder_names(folder, &names);
  if (status != EVEN_OK && status != EVEN_ERR_MEMORY) {
    even_error_clear(); /* nothing came there */
    status = EVEN_OK;
  }
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    if (even_ends_with(names.items[i], EVEN_CHECKPOINT_PARTIAL)) {
      continue;
    }
    even_text_clear(&path);
    even_text_format(&path, "%s/%s", folder, names.items[i]);
    status = even_text_status(&path);
    if (status == EVEN_OK) {
      status = look_at(wish, &path, memory, list);
    }
  }
  even_text_free(&path);
  even_names_free(&names);
  return status;
}

static even_status look_everywhere(const even_bring_give *give, const json_t *wish, had_list *list) {
  const json_t *folders = json_object_get(wish, "folders");
  for (size_t i = 0; i < json_array_size(folders) && i < MOST_FOLDERS; i++) {
    const char *folder = json_string_value(json_array_get(folders, i));
    if (folder == NULL || folder[0] != '/') {
      return even_fail(EVEN_ERR_INPUT, "the leader asks for checkpoints without saying where");
    }
    EVEN_TRY(look_in(wish, folder, false, list));
  }
  const even_host_memory *memory = give->kept->host;
  return memory == NULL ? EVEN_OK : look_in(wish, even_text_string(&memory->folder), true, list);
}

static int newest_first(const void *left, const void *right) {
  return strcmp(((const had *)right)->order, ((const had *)left)->order);
}

static void say_found(even_bring_give *give, const json_t *wish, const had_list *list) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json;
  begin_words(give, &text, &json);
  even_json_array(&json, "found");
  for (size_t i = 0; i < list->count && i < EVEN_BRING_BACK_MOST; i++) {
    const had *one = &list->items[i];
    char digits[EVEN_BRING_SUM_DIGITS + 1];
    char mark[EVEN_FILE_MARK];
    uint64_t sum = 0;
    if (!even_bring_sum_of(one->folder, &sum)) {
      continue;
    }
    even_bring_sum_write(sum, digits);
    even_json_object(&json, NULL);
    even_json_string(&json, "folder", one->folder);
    even_json_string(&json, "order", one->order);
    even_json_string(&json, "sum", digits);
    even_json_bool(&json, "memory", one->memory);
    even_bring_mark_of(one->folder, mark);
    even_json_string(&json, "mark", mark);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_bool(&json, "left", even_path_is_folder(even_json_text(wish, "copy")));
  even_json_object_end(&json);
  give->tell(give->context, &text);
}

static even_status find(even_bring_give *give, const json_t *wish) {
  had_list list = {.count = 0};
  even_status status = look_everywhere(give, wish, &list);
  if (status == EVEN_OK) {
    if (list.count > 1) {
      qsort(list.items, list.count, sizeof *list.items, newest_first);
    }
    say_found(give, wish, &list);
  }
  for (size_t i = 0; i < list.count; i++) {
    even_free(list.items[i].folder);
    even_free(list.items[i].order);
  }
  even_free(list.items);
  return status;
}

/* ---- sending ---- */

static void stop(even_bring_give *give) {
  even_bring_files_free(&give->files);
  give->sends = false;
}

/* The last error is why. */
static void fail(even_bring_give *give) {
  say_error(give, even_error_last());
  even_error_clear();
  stop(give);
}

static even_status send_next(even_bring_give *give);

/* The leader need not know of what it has refused itself, but it may have, and why, this way. */
static void sent(void *context, const even_parcel *parcel, const even_error *why) {
  even_bring_give *give = context;
  if (!give->sends || parcel->number / EVEN_BRING_FILES != give->serial) {
    return; /* of one that is not asked for any more */
  }
  if (why != NULL) {
    (void)even_error_restore(why);
    fail(give);
  } else if (send_next(give) != EVEN_OK) {
    fail(give);
  }
}

static even_status send_next(even_bring_give *give) {
  return even_bring_files_send_next(&give->files, give->parcels, 0, EVEN_BRING_BACK_PARCEL, give->serial, sent, give);
}

/* Its files are open from now on: what follows it here may push it out. */
static even_status begin_sending(even_bring_give *give, const char *folder, uint64_t sum) {
  give->sends = true;
  EVEN_TRY(even_bring_files_read(folder, true, &give->files));
  if (give->files.sum != sum) {
    return even_fail(EVEN_ERR_NOT_FOUND, "%s is another checkpoint by now", folder);
  }
  return send_next(give);
}

static void hear_had(even_bring_give *give, uint64_t serial, const json_t *files) {
  if (give->sends && serial == give->serial) {
    even_bring_files_spare(&give->files, files);
  }
}

even_status even_bring_give_hear(even_bring_give *give, const json_t *content) {
  const json_t *files = json_object_get(content, "had");
  const char *folder = json_string_value(json_object_get(content, "send"));
  json_int_t serial = json_integer_value(json_object_get(content, "serial"));
  uint64_t sum = 0;
  bool named = even_bring_sum_read(even_json_text(content, "sum"), &sum);
  if (serial < 1 || (folder != NULL && (folder[0] != '/' || !named))) {
    return even_fail(EVEN_ERR_INPUT, "the leader asks for a checkpoint back without saying which");
  }
  if (json_is_array(files)) {
    hear_had(give, (uint64_t)serial, files);
    return EVEN_OK;
  }
  stop(give);
  give->serial = (uint64_t)serial;
  even_status status = folder == NULL ? find(give, content) : begin_sending(give, folder, sum);
  if (status == EVEN_ERR_INPUT && folder == NULL) {
    return status;
  }
  if (status != EVEN_OK) {
    fail(give);
  }
  return EVEN_OK;
}

/* ---- opening and closing ---- */

even_status even_bring_give_open(even_parcels *parcels, const even_bring_kept *kept,
                                 void (*tell)(void *context, even_text *text), void *context, even_bring_give **out) {
  *out = NULL;
  EVEN_TRY(EVEN_NEW(out));
  **out = (even_bring_give){.parcels = parcels, .kept = kept, .tell = tell, .context = context};
  return EVEN_OK;
}

void even_bring_give_close(even_bring_give *give) {
  if (give == NULL) {
    return;
  }
  even_parcels_withdraw(give->parcels, EVEN_BRING_BACK_PARCEL);
  stop(give);
  even_free(give);
}
