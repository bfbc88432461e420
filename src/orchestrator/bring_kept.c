/* Which checkpoints came to a host, also for an agent that is started there in a killed one's place: it removes what is
 * old, and lets nothing come twice. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "checkpoint/reader.h"
#include "orchestrator/bring.h"

#include <evenstep/checkpoint.h>
#include <string.h>

static void tell(even_bring_kept *kept) {
  if (kept->changed != NULL) {
    kept->changed(kept->context);
  }
}

static void set(even_text *text, const char *value) {
  even_text_clear(text);
  even_text_add(text, value);
}

void even_bring_kept_await(even_bring_kept *kept, bool memory, const char *place) {
  set(&kept->coming, place);
  kept->to_memory = memory;
  tell(kept);
}

void even_bring_kept_miss(even_bring_kept *kept) {
  if (kept->coming.length > 0) {
    even_text_clear(&kept->coming);
    tell(kept);
  }
}

/* The one before goes first: who is killed in between finds it gone, and the other one there. */
void even_bring_kept_follow(even_bring_kept *kept, bool memory, const char *place) {
  even_text *before = memory ? &kept->memory : &kept->disk;
  if (before->length > 0 && strcmp(before->data, place) != 0 && even_checkpoint_remove(before->data) != EVEN_OK) {
    even_error_clear(); /* somebody has removed it */
  }
  set(before, place);
  even_text_clear(&kept->coming);
  tell(kept);
}

static bool is(const even_text *text, const char *folder) {
  return text->length > 0 && strcmp(even_text_string(text), folder) == 0;
}

bool even_bring_kept_has(const even_bring_kept *kept, const char *folder) {
  return is(&kept->disk, folder) || is(&kept->memory, folder);
}

void even_bring_kept_write(const even_bring_kept *kept, even_json *json) {
  even_json_string(json, "disk", even_text_string(&kept->disk));
  even_json_string(json, "memory", even_text_string(&kept->memory));
  even_json_string(json, "coming", even_text_string(&kept->coming));
  even_json_bool(json, "to_memory", kept->to_memory);
}

static bool is_whole(const char *folder) {
  even_checkpoint_info info;
  bool whole = even_checkpoint_inspect(folder, &info) == EVEN_OK;
  if (whole) {
    even_checkpoint_info_free(&info);
  }
  even_error_clear();
  return whole;
}

even_status even_bring_kept_read(even_bring_kept *kept, const json_t *from) {
  const char *coming = even_json_text(from, "coming");
  bool to_memory = json_is_true(json_object_get(from, "to_memory"));
  set(&kept->disk, even_json_text(from, "disk"));
  set(&kept->memory, even_json_text(from, "memory"));
  EVEN_TRY(even_text_status(&kept->disk));
  EVEN_TRY(even_text_status(&kept->memory));
  if (coming[0] == '/' && is_whole(coming)) {
    even_bring_kept_follow(kept, to_memory, coming);
  }
  EVEN_TRY(even_text_status(&kept->disk));
  return even_text_status(&kept->memory);
}
