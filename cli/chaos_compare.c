/* What the faults of `evenstep chaos` have changed: the models in the newest checkpoints of two runs. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/compare.h"
#include "checkpoint/reader.h"
#include "cli/chaos.h"
#include "os/path.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static even_status newest(const char *run, char **out) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text_format(&folder, "%s/checkpoints", run);
  even_status status = even_text_status(&folder);
  if (status == EVEN_OK) {
    status = even_checkpoint_find_newest(even_text_string(&folder), true, out);
  }
  if (status == EVEN_OK && *out == NULL) {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "%s has no whole checkpoint", even_text_string(&folder));
    status = even_error_fix("the script must use es.prepare, and end well: its last step is then in a checkpoint");
  }
  even_text_free(&folder);
  return status;
}

static void differ(even_chaos_verdict *out, double by, const char *where) {
  if (by > out->largest || out->where[0] == '\0') {
    out->largest = by > out->largest ? by : out->largest;
    (void)snprintf(out->where, sizeof out->where, "%s", where);
  }
}

static void take_tensor(void *context, const char *name, even_tensor_side a, even_tensor_side b,
                        const even_tensor_difference *how) {
  even_chaos_verdict *out = context;
  out->tensors += a.tensor != NULL && b.tensor != NULL;
  if (a.tensor == NULL || b.tensor == NULL || !how->same_type || !how->same_shape || how->not_finite > 0) {
    out->different++;
    differ(out, (double)INFINITY, name);
  } else if (how->different > 0) {
    out->different += how->different;
    differ(out, how->relative_norm, name);
  }
}

static even_status compare_file(const char *name, even_chaos_verdict *out) {
  even_text paths[2] = {EVEN_TEXT_EMPTY, EVEN_TEXT_EMPTY};
  even_status status = EVEN_OK;
  for (int i = 0; i < 2 && status == EVEN_OK; i++) {
    even_text_format(&paths[i], "%s/%s", out->paths[i], name);
    status = even_text_status(&paths[i]);
  }
  if (status == EVEN_OK) {
    const even_names a = {&paths[0].data, 1};
    const even_names b = {&paths[1].data, 1};
    status = even_safetensors_compare(&a, &b, take_tensor, out);
  }
  even_text_free(&paths[0]);
  even_text_free(&paths[1]);
  return status;
}

/* model.safetensors, model_1.safetensors, … */
static bool is_model(const char *name) {
  return strncmp(name, "model", 5) == 0 && even_safetensors_is_named(name);
}

static even_status compare_files(const even_checkpoint_info infos[2], even_chaos_verdict *out) {
  size_t models = 0;
  for (size_t i = 0; i < infos[0].file_count; i++) {
    const char *name = infos[0].files[i].name;
    if (is_model(name)) {
      models++;
      EVEN_TRY(compare_file(name, out));
    }
  }
  for (size_t i = 0; i < infos[1].file_count; i++) {
    models -= is_model(infos[1].files[i].name);
  }
  return models == 0 ? EVEN_OK
                     : even_fail(EVEN_ERR_INPUT, "%s and %s are not of the same models", out->paths[0], out->paths[1]);
}

/* Where a fault spoiled what would be compared, and no later one was written: the undisturbed job's checkpoint of the
 * step before, which is the disturbed one's newest. Nothing changes where there is none. */
static even_status step_back(const char *undisturbed, even_chaos_verdict *out, even_checkpoint_info *info) {
  even_checkpoint_info earlier = {.step = -1};
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/checkpoints/%s", undisturbed, even_path_name(out->paths[1]));
  even_status status = even_text_status(&path);
  if (status == EVEN_OK && even_checkpoint_inspect(even_text_string(&path), &earlier) != EVEN_OK) {
    even_error_clear();
  } else if (status == EVEN_OK && earlier.step == out->step[1]) {
    even_free(out->paths[0]);
    out->paths[0] = path.data;
    path = (even_text)EVEN_TEXT_EMPTY;
    out->step[0] = earlier.step;
    const even_checkpoint_info later = *info;
    *info = earlier;
    earlier = later;
  }
  even_checkpoint_info_free(&earlier);
  even_text_free(&path);
  return status;
}

even_status even_chaos_compare(const char *undisturbed, const char *disturbed,
                               bool (*is_spoiled)(const void *context, const char *name), const void *context,
                               even_chaos_verdict *out) {
  even_checkpoint_info infos[2] = {{.step = -1}, {.step = -1}};
  memset(out, 0, sizeof *out);
  even_status status = newest(undisturbed, &out->paths[0]);
  if (status == EVEN_OK) {
    status = newest(disturbed, &out->paths[1]);
  }
  for (int i = 0; i < 2 && status == EVEN_OK; i++) {
    status = even_checkpoint_inspect(out->paths[i], &infos[i]);
    out->step[i] = infos[i].step;
  }
  if (status == EVEN_OK && out->step[1] < out->step[0] && is_spoiled(context, even_path_name(out->paths[0]))) {
    status = step_back(undisturbed, out, &infos[0]);
  }
  if (status == EVEN_OK) {
    status = compare_files(infos, out);
  }
  even_checkpoint_info_free(&infos[0]);
  even_checkpoint_info_free(&infos[1]);
  return status;
}
