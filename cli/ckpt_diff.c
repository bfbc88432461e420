/* evenstep ckpt diff A B: what two checkpoints, or safetensors files, have that is not the same. */
#include "base/fail.h"
#include "base/utf8.h"
#include "checkpoint/compare.h"
#include "checkpoint/reader.h"
#include "cli/ckpt.h"
#include "cli/command.h"
#include "os/descriptors.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* EXIT_DIFFERS: as diff(1). MOST_SETTINGS: printed as text; as JSON all are. */
#define MODEL_FILE "model.safetensors"
enum { EXIT_DIFFERS = 1, MOST_SHOWN = 1024, MOST_VALUE = 60, MOST_SETTINGS = 40, SPARE_DESCRIPTORS = 16 };

static const even_usage usage = {
    .command = "ckpt diff",
    .synopsis = "evenstep ckpt diff [options] A B",
    .description =
        "Compares two checkpoints: tensors (names, shapes, types; where the shapes are the same, how many values "
        "differ,\n"
        "the largest |a-b|, the largest |a-b|/max(|a|,|b|), and the relative norm, that of a-b over that of a), and "
        "the\n"
        "settings in their manifests. In which of its files a model's or an optimizer's tensor lies counts for "
        "nothing, and\n"
        "is said. A and B may also be .safetensors files: a file beside a checkpoint is compared\n"
        "with its model. Checksums are not compared: `evenstep ckpt verify` does.",
    .epilogue =
        "exit code: 0 they are the same, 1 they differ, 3 one is not there or no checkpoint, 6 one is damaged,\n"
        "8 one has a newer format"};

typedef struct source {
  const char *path;
  bool is_file; /* a tensor file by itself */
  even_checkpoint_info info;
} source;

/* A model or an optimizer, in however many files, or what one further file has: compared as one. */
typedef struct part {
  even_names names; /* of files, "" for a file by itself */
  even_names paths;
} part;

typedef struct diff {
  source a, b;
  bool as_json, tensors_only;
  double within; /* relative norm up to which values count as the same; < 0: every bit counts */
  even_json json;
  const part *part_a, *part_b; /* in hand */
  const char *named;           /* the file whose tensors are told, as text */
  bool moved;                  /* a tensor that both have lies in another file */
  size_t same;                 /* tensors */
  size_t different;            /* tensors, those of one side with them */
  size_t files;                /* that one side alone has */
  size_t settings;
} diff;

static even_status open_source(const char *path, source *out) {
  out->path = path;
  out->info = (even_checkpoint_info){.step = -1, .epoch = -1, .world_size = -1};
  out->is_file = even_path_exists(path) && !even_path_is_folder(path);
  return out->is_file ? EVEN_OK : even_checkpoint_inspect(path, &out->info);
}

static bool has_file(const source *of, const char *name) {
  for (size_t i = 0; i < of->info.file_count; i++) {
    if (strcmp(of->info.files[i].name, name) == 0) {
      return true;
    }
  }
  return false;
}

static const char *clean(const char *text, char *room) {
  return even_utf8_clean(text, room, MOST_SHOWN);
}

/* "F32 [3,4]" */
static void describe(const json_t *tensor, char *out, size_t room) {
  const json_t *shape = json_object_get(tensor, "shape");
  int at = snprintf(out, room, "%s [", json_string_value(json_object_get(tensor, "dtype")));
  for (size_t i = 0; i < json_array_size(shape) && at >= 0 && (size_t)at < room; i++) {
    at += snprintf(out + at, room - (size_t)at, "%s%" JSON_INTEGER_FORMAT, i == 0 ? "" : ",",
                   json_integer_value(json_array_get(shape, i)));
  }
  if (at >= 0 && (size_t)at < room) {
    (void)snprintf(out + at, room - (size_t)at, "]");
  }
}

static void add_side(even_json *json, const char *key, const json_t *tensor) {
  if (tensor == NULL) {
    even_json_null(json, key);
    return;
  }
  char *shape = json_dumps(json_object_get(tensor, "shape"), JSON_COMPACT);
  even_json_object(json, key);
  even_json_string(json, "dtype", json_string_value(json_object_get(tensor, "dtype")));
  even_json_raw(json, "shape", shape == NULL ? "null" : shape);
  even_json_object_end(json);
  free(shape);
}

static const char *file_of(const part *of, even_tensor_side side) {
  return of->names.items[side.file];
}

/* By the name that A has for it; where one side is a file by itself, which is compared with a model, by the other's. */
static const char *shown_file(const diff *on, even_tensor_side a, even_tensor_side b) {
  const char *left = a.tensor == NULL ? "" : file_of(on->part_a, a);
  const char *right = b.tensor == NULL ? "" : file_of(on->part_b, b);
  return left[0] != '\0' ? left : right[0] != '\0' ? right : MODEL_FILE;
}

static void tell_json(diff *on, const char *file, const char *name, const json_t *a, const json_t *b,
                      const even_tensor_difference *how) {
  even_json *json = &on->json;
  even_json_object(json, NULL);
  even_json_string(json, "file", file);
  even_json_string(json, "name", name);
  add_side(json, "a", a);
  add_side(json, "b", b);
  if (how->compared) {
    even_json_unsigned(json, "values", how->elements);
    even_json_unsigned(json, "different", how->different);
    even_json_unsigned(json, "not_finite", how->not_finite);
    even_json_number(json, "largest_difference", how->largest);
    even_json_number(json, "largest_relative_difference", how->largest_relative);
    even_json_number(json, "relative_norm", how->relative_norm);
  }
  even_json_object_end(json);
}

static void tell_values(const even_tensor_difference *how) {
  if (how->different == 0) {
    (void)printf("the values are the same\n");
    return;
  }
  (void)printf("%" PRIu64 " of %" PRIu64 " values differ", how->different, how->elements);
  if (how->not_finite > 0) {
    (void)printf(", %" PRIu64 " by a NaN or an infinity", how->not_finite);
  }
  if (how->different > how->not_finite) {
    (void)printf(", by at most %.3g (relative %.3g), relative norm %.3g", how->largest, how->largest_relative,
                 how->relative_norm);
  }
  (void)printf("\n");
}

static void tell_text(diff *on, const char *file, const char *name, const json_t *a, const json_t *b,
                      const even_tensor_difference *how) {
  char shown[MOST_SHOWN];
  char left[256] = "";
  char right[256] = "";
  if (on->named == NULL || strcmp(on->named, file) != 0) {
    on->named = file;
    (void)printf("%s\n", clean(file, shown));
  }
  (void)printf("  %s: ", clean(name, shown));
  describe(a, left, sizeof left);
  describe(b, right, sizeof right);
  if (a == NULL || b == NULL) {
    (void)printf("only in %s (%s)\n", a == NULL ? "B" : "A", a == NULL ? right : left);
  } else if (!how->same_shape || !how->same_type) {
    (void)printf("%s in A, %s in B%s", left, right, how->compared ? "; " : "\n");
    if (how->compared) {
      tell_values(how);
    }
  } else {
    tell_values(how);
  }
}

static void tell_tensor(diff *on, const char *name, even_tensor_side a, even_tensor_side b,
                        const even_tensor_difference *how) {
  const char *file = shown_file(on, a, b);
  on->different++;
  if (on->as_json) {
    tell_json(on, file, name, a.tensor, b.tensor, how);
  } else {
    tell_text(on, file, name, a.tensor, b.tensor, how);
  }
}

static bool alike(const diff *on, const even_tensor_difference *how) {
  if (!how->same_shape || !how->same_type) {
    return false;
  }
  return how->different == 0 || (on->within >= 0 && how->not_finite == 0 && how->relative_norm <= on->within);
}

static void take_tensor(void *context, const char *name, even_tensor_side a, even_tensor_side b,
                        const even_tensor_difference *how) {
  diff *on = context;
  if (a.tensor != NULL && b.tensor != NULL && !on->a.is_file && !on->b.is_file) {
    on->moved = on->moved || strcmp(file_of(on->part_a, a), file_of(on->part_b, b)) != 0;
  }
  if (a.tensor != NULL && b.tensor != NULL && alike(on, how)) {
    on->same++;
  } else {
    tell_tensor(on, name, a, b, how);
  }
}

/* ---- which files are compared with which ---- */

static const char *const kinds[] = {"models", "optimizers"};

static even_status add_file(const source *of, const char *name, part *out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, name[0] == '\0' ? "%s" : "%s/%s", of->path, name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_names_add(&out->names, name);
  }
  if (status == EVEN_OK) {
    status = even_names_add(&out->paths, path.data);
  }
  even_text_free(&path);
  return status;
}

static void free_part(part *of) {
  even_names_free(&of->names);
  even_names_free(&of->paths);
}

/* The files of what is saved as a model or an optimizer: "files", or where that is none or empty "file" (whoever parsed
 * the manifest has seen that they are its own). */
static const char *saved_file(const json_t *saved, size_t i) {
  const json_t *files = json_object_get(saved, "files");
  if (json_array_size(files) > 0) {
    return json_string_value(json_array_get(files, i));
  }
  return i == 0 ? json_string_value(json_object_get(saved, "file")) : NULL;
}

static bool lies_in(const json_t *saved, const char *file) {
  const char *one = NULL;
  for (size_t i = 0; (one = saved_file(saved, i)) != NULL; i++) {
    if (strcmp(one, file) == 0) {
      return true;
    }
  }
  return false;
}

/* Whether it is one of the files of what both sides have. */
static bool is_of_both(const source *of, const source *other, const char *file) {
  bool found = false;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const char *name = NULL;
    json_t *saved = NULL;
    json_object_foreach(json_object_get(of->info.state, kinds[i]), name, saved) {
      bool there = json_object_get(json_object_get(other->info.state, kinds[i]), name) != NULL;
      found = found || (there && lies_in(saved, file));
    }
  }
  return found;
}

static even_status add_saved(const source *of, const json_t *saved, part *out) {
  const char *file = NULL;
  for (size_t i = 0; (file = saved_file(saved, i)) != NULL; i++) {
    if (even_safetensors_is_named(file)) {
      EVEN_TRY(add_file(of, file, out));
    }
  }
  return EVEN_OK;
}

/* All of both sides are open at once. */
static even_status compare_parts(diff *on, const part *a, const part *b) {
  uint64_t before = 0;
  bool tight = false;
  even_status status = even_descriptors_raise(a->paths.count + b->paths.count, SPARE_DESCRIPTORS, &before, &tight);
  if (status != EVEN_OK) {
    (void)even_error_fix(
        "raise the hard limit (ulimit -Hn), or put their tensors into fewer files: `evenstep ckpt "
        "reshard`");
    return status;
  }
  on->part_a = a;
  on->part_b = b;
  on->named = NULL;
  return even_safetensors_compare(&a->paths, &b->paths, take_tensor, on);
}

/* Where the other side has it, too, all of its files at once: they may be cut otherwise there. */
static even_status compare_saved(diff *on, const json_t *a, const json_t *b) {
  part left = {{NULL, 0}, {NULL, 0}};
  part right = {{NULL, 0}, {NULL, 0}};
  even_status status = add_saved(&on->a, a, &left);
  if (status == EVEN_OK) {
    status = add_saved(&on->b, b, &right);
  }
  if (status == EVEN_OK) {
    status = compare_parts(on, &left, &right);
  }
  free_part(&left);
  free_part(&right);
  return status;
}

/* The file of that name, on both sides or on one. */
static even_status compare_file(diff *on, const char *name, bool in_a, bool in_b) {
  part left = {{NULL, 0}, {NULL, 0}};
  part right = {{NULL, 0}, {NULL, 0}};
  on->files += in_a != in_b;
  even_status status = in_a ? add_file(&on->a, name, &left) : EVEN_OK;
  if (status == EVEN_OK && in_b) {
    status = add_file(&on->b, name, &right);
  }
  if (status == EVEN_OK) {
    status = compare_parts(on, &left, &right);
  }
  free_part(&left);
  free_part(&right);
  return status;
}

/* Of what both sides have that of which this is A's first file: it stands for all of them. */
static even_status compare_saved_from(diff *on, const char *file) {
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const char *name = NULL;
    json_t *saved = NULL;
    json_object_foreach(json_object_get(on->a.info.state, kinds[i]), name, saved) {
      const json_t *there = json_object_get(json_object_get(on->b.info.state, kinds[i]), name);
      if (there != NULL && strcmp(saved_file(saved, 0), file) == 0) {
        EVEN_TRY(compare_saved(on, saved, there));
      }
    }
  }
  return EVEN_OK;
}

static even_status compare_folders(diff *on) {
  for (size_t i = 0; i < on->a.info.file_count; i++) {
    const char *name = on->a.info.files[i].name;
    EVEN_TRY(compare_saved_from(on, name));
    if (even_safetensors_is_named(name) && !is_of_both(&on->a, &on->b, name)) {
      EVEN_TRY(compare_file(on, name, true, has_file(&on->b, name) && !is_of_both(&on->b, &on->a, name)));
    }
  }
  for (size_t i = 0; i < on->b.info.file_count; i++) {
    const char *name = on->b.info.files[i].name;
    bool other = has_file(&on->a, name) && !is_of_both(&on->a, &on->b, name);
    if (even_safetensors_is_named(name) && !is_of_both(&on->b, &on->a, name) && !other) {
      EVEN_TRY(compare_file(on, name, false, true));
    }
  }
  return EVEN_OK;
}

/* A file by itself is compared with a checkpoint's model, or with another such file. */
static even_status add_model(const source *of, part *out) {
  if (of->is_file) {
    return add_file(of, "", out);
  }
  const json_t *saved = json_object_get(json_object_get(of->info.state, "models"), "model");
  return saved == NULL ? add_file(of, MODEL_FILE, out) : add_saved(of, saved, out);
}

static even_status compare_models(diff *on) {
  part left = {{NULL, 0}, {NULL, 0}};
  part right = {{NULL, 0}, {NULL, 0}};
  even_status status = add_model(&on->a, &left);
  if (status == EVEN_OK) {
    status = add_model(&on->b, &right);
  }
  if (status == EVEN_OK) {
    status = compare_parts(on, &left, &right);
  }
  free_part(&left);
  free_part(&right);
  return status;
}

/* ---- settings ---- */

static void dump_setting(even_json *json, const char *key, const json_t *value) {
  char *text = value == NULL ? NULL : json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
  if (text != NULL) {
    even_json_raw(json, key, text);
  }
  free(text);
}

static const char *brief(const json_t *value, char *out) {
  if (value == NULL) {
    return "(none)";
  }
  char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
  (void)even_utf8_clean(text == NULL ? "" : text, out, MOST_VALUE - 3);
  if (text != NULL && strlen(text) >= MOST_VALUE - 3) {
    (void)snprintf(out + strlen(out), sizeof "…", "…");
  }
  free(text);
  return out;
}

/* A setting that one side has not is left out of the JSON object: null is a value. */
static void tell_setting(void *context, const char *where, const json_t *a, const json_t *b) {
  diff *on = context;
  on->settings++;
  if (on->as_json) {
    even_json_object(&on->json, NULL);
    even_json_string(&on->json, "setting", where);
    dump_setting(&on->json, "a", a);
    dump_setting(&on->json, "b", b);
    even_json_object_end(&on->json);
    return;
  }
  char shown[MOST_SHOWN];
  char left[MOST_VALUE + 4];
  char right[MOST_VALUE + 4];
  if (on->settings == 1) {
    (void)printf("settings\n");
  }
  if (on->settings <= MOST_SETTINGS) {
    (void)printf("  %s: %s in A, %s in B\n", clean(where, shown), brief(a, left), brief(b, right));
  }
}

/* The state without what says in which files models and optimizers lie. */
static json_t *without_files(const json_t *state) {
  static const char *const members[] = {"file", "files", "index"};
  json_t *copy = json_deep_copy(state);
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const char *name = NULL;
    json_t *saved = NULL;
    json_object_foreach(json_object_get(copy, kinds[i]), name, saved) {
      for (size_t j = 0; j < sizeof members / sizeof *members; j++) {
        (void)json_object_del(saved, members[j]);
      }
    }
  }
  return copy;
}

static even_status compare_settings(diff *on) {
  if (!on->moved) {
    return even_json_compare("", on->a.info.state, on->b.info.state, tell_setting, on);
  }
  json_t *a = without_files(on->a.info.state);
  json_t *b = without_files(on->b.info.state);
  even_status status = a == NULL || b == NULL
                           ? even_fail(EVEN_ERR_MEMORY, "no memory for the settings of %s", on->a.path)
                           : even_json_compare("", a, b, tell_setting, on);
  json_decref(a);
  json_decref(b);
  return status;
}

static even_status compare_all(diff *on) {
  bool single = on->a.is_file || on->b.is_file;
  even_json_object(&on->json, NULL);
  even_json_string(&on->json, "format", "evenstep-ckpt-diff-1");
  even_json_string(&on->json, "a", on->a.path);
  even_json_string(&on->json, "b", on->b.path);
  even_json_array(&on->json, "tensors");
  EVEN_TRY(single ? compare_models(on) : compare_folders(on));
  even_json_array_end(&on->json);
  even_json_array(&on->json, "settings");
  if (!single && !on->tensors_only) {
    EVEN_TRY(compare_settings(on));
  }
  even_json_array_end(&on->json);
  even_json_unsigned(&on->json, "same_tensors", on->same);
  even_json_unsigned(&on->json, "different_tensors", on->different);
  even_json_unsigned(&on->json, "different_settings", on->settings);
  even_json_bool(&on->json, "same", on->different + on->settings + on->files == 0);
  even_json_bool(&on->json, "same_layout", !on->moved);
  even_json_object_end(&on->json);
  return EVEN_OK;
}

static void conclude(const diff *on) {
  if (on->settings > MOST_SETTINGS) {
    (void)printf("  … and %zu more (--json has all)\n", on->settings - MOST_SETTINGS);
  }
  if (on->different + on->settings + on->files == 0) {
    (void)printf("the same: %zu tensors%s%s\n", on->same,
                 on->tensors_only || on->a.is_file || on->b.is_file ? "" : " and all settings",
                 on->moved ? "; only the layout differs: some lie in files of other names" : "");
  } else {
    (void)printf("%zu of %zu tensors and %zu settings differ%s\n", on->different, on->different + on->same,
                 on->settings, on->moved ? "; some lie in files of other names" : "");
  }
}

static int run(diff *on, char **paths) {
  even_text text = EVEN_TEXT_EMPTY;
  on->json = even_json_begin(&text, 2);
  even_status status = open_source(paths[0], &on->a);
  if (status == EVEN_OK) {
    status = open_source(paths[1], &on->b);
  }
  if (status == EVEN_OK) {
    status = compare_all(on);
  }
  if (status == EVEN_OK && on->as_json) {
    status = even_text_status(&text);
  }
  int code = on->different + on->settings + on->files == 0 ? 0 : EXIT_DIFFERS;
  if (status != EVEN_OK) {
    code = even_cli_fail_of(status);
  } else if (on->as_json) {
    (void)printf("%s\n", even_text_string(&text));
  } else {
    conclude(on);
  }
  even_text_free(&text);
  even_checkpoint_info_free(&on->a.info);
  even_checkpoint_info_free(&on->b.info);
  return code;
}

int even_cli_ckpt_diff(int argc, char **argv) {
  diff on = {.within = -1};
  int operand = 0;
  int code = 0;
  const even_option options[] = {
      {0, "tensors", EVEN_OPTION_FLAG, &on.tensors_only, NULL, "compare the tensors alone, not the settings", 0, 0},
      {0, "within", EVEN_OPTION_NUMBER, &on.within, "R", "tensors whose relative norm is at most R are the same", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on.as_json, NULL, "print JSON", 0, 0},
  };
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 2,
                      "it compares two checkpoints: evenstep ckpt diff A B", &operand, &code)) {
    return code;
  }
  if (argc - operand != 2) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt diff: name two checkpoints");
    (void)even_error_fix("evenstep ckpt diff A B; `evenstep ckpt ls` lists them");
    return even_cli_fail();
  }
  return run(&on, argv + operand);
}
