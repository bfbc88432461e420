/* Looks for checkpoints by their folders' names and manifests; what is in them is src/checkpoint's affair. */
#include "orchestrator/resume.h"

#include "base/fail.h"
#include "os/entries.h"
#include "os/path.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct search {
  const char *folder;
  even_text path; /* of the one looked at */
  bool any;
  uintmax_t newest;
  even_text *out;
} search;

static bool read_step(const char *name, uintmax_t *step) {
  static const char lead[] = "step-";
  char *end = NULL;
  if (strncmp(name, lead, sizeof lead - 1) != 0 || name[sizeof lead - 1] < '0' || name[sizeof lead - 1] > '9') {
    return false;
  }
  errno = 0;
  *step = strtoumax(name + sizeof lead - 1, &end, 10);
  return errno == 0 && *end == '\0';
}

static bool look(void *context, const char *name) {
  search *now = context;
  uintmax_t step = 0;
  if (!read_step(name, &step) || (now->any && step <= now->newest)) {
    return true;
  }
  even_text_clear(&now->path);
  even_text_format(&now->path, "%s/%s/manifest.json", now->folder, name);
  if (even_text_status(&now->path) != EVEN_OK || !even_file_readable(now->path.data)) {
    return even_text_status(&now->path) == EVEN_OK;
  }
  now->any = true;
  now->newest = step;
  even_text_clear(now->out);
  even_text_format(now->out, "%s/%s", now->folder, name);
  return true;
}

even_status even_checkpoint_newest(const char *folder, even_text *out) {
  search now = {.folder = folder, .path = EVEN_TEXT_EMPTY, .out = out};
  even_text_clear(out);
  if (!even_file_exists(folder)) {
    return EVEN_OK;
  }
  even_status status = even_folder_each(folder, look, &now);
  if (status == EVEN_OK) {
    status = even_text_status(&now.path);
  }
  even_text_free(&now.path);
  return status == EVEN_OK ? even_text_status(out) : status;
}

even_status even_checkpoint_check(const char *path) {
  even_text manifest = EVEN_TEXT_EMPTY;
  if (!even_file_exists(path)) {
    even_status status = even_fail(EVEN_ERR_NOT_FOUND, "checkpoint %s does not exist", path);
    (void)even_error_fix("`evenstep ckpt ls` lists the checkpoints of a run; --resume auto takes the newest");
    return status;
  }
  even_text_format(&manifest, "%s/manifest.json", path);
  even_status status = even_text_status(&manifest);
  if (status == EVEN_OK && !even_file_readable(manifest.data)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is no whole checkpoint: it has no manifest.json", path);
    (void)even_error_fix("name a folder like runs/NAME/checkpoints/step-100; `evenstep ckpt ls` lists those of a run");
  }
  even_text_free(&manifest);
  return status;
}
