/* evenstep ckpt diff A B: what two checkpoints, or safetensors files, have that is not the same. */
#include "base/fail.h"
#include "base/utf8.h"
#include "checkpoint/compare.h"
#include "checkpoint/reader.h"
#include "cli/ckpt.h"
#include "cli/command.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* EXIT_DIFFERS: as diff(1). MOST_SETTINGS: printed as text; as JSON all are. */
enum { EXIT_DIFFERS = 1, MOST_SHOWN = 1024, MOST_VALUE = 60, MOST_SETTINGS = 40 };

static const even_usage usage = {
    .command = "ckpt diff",
    .synopsis = "evenstep ckpt diff [options] A B",
    .description =
        "Compares two checkpoints: tensors (names, shapes, types; where the shapes are the same, how many values "
        "differ,\n"
        "the largest |a-b|, the largest |a-b|/max(|a|,|b|), and the relative norm, that of a-b over that of a), and "
        "the\n"
        "settings in their manifests. A and B may also be .safetensors files: a file beside a checkpoint is compared\n"
        "with its model.safetensors. Checksums are not compared: `evenstep ckpt verify` does.",
    .epilogue =
        "exit code: 0 they are the same, 1 they differ, 3 one is not there or no checkpoint, 6 one is damaged,\n"
        "8 one has a newer format"};

typedef struct source {
  const char *path;
  bool is_file; /* a tensor file by itself */
  even_checkpoint_info info;
} source;

typedef struct diff {
  source a, b;
  bool as_json, tensors_only;
  double within; /* relative norm up to which values count as the same; < 0: every bit counts */
  even_json json;
  const char *file; /* in hand */
  bool file_named;
  size_t same;      /* tensors */
  size_t different; /* tensors, those of one side with them */
  size_t files;     /* that one side alone has */
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

static void tell_json(diff *on, const char *name, const json_t *a, const json_t *b, const even_tensor_difference *how) {
  even_json *json = &on->json;
  even_json_object(json, NULL);
  even_json_string(json, "file", on->file);
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

static void tell_text(diff *on, const char *name, const json_t *a, const json_t *b, const even_tensor_difference *how) {
  char shown[MOST_SHOWN];
  char left[256] = "";
  char right[256] = "";
  if (!on->file_named) {
    on->file_named = true;
    (void)printf("%s\n", clean(on->file, shown));
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

static void tell_tensor(diff *on, const char *name, const json_t *a, const json_t *b,
                        const even_tensor_difference *how) {
  on->different++;
  if (on->as_json) {
    tell_json(on, name, a, b, how);
  } else {
    tell_text(on, name, a, b, how);
  }
}

static bool alike(const diff *on, const even_tensor_difference *how) {
  if (!how->same_shape || !how->same_type) {
    return false;
  }
  return how->different == 0 || (on->within >= 0 && how->not_finite == 0 && how->relative_norm <= on->within);
}

static void take_tensor(void *context, const char *name, const json_t *a, const json_t *b,
                        const even_tensor_difference *how) {
  diff *on = context;
  if (a != NULL && b != NULL && alike(on, how)) {
    on->same++;
  } else {
    tell_tensor(on, name, a, b, how);
  }
}

static even_status path_of(const source *of, const char *name, even_text *out) {
  if (of->is_file) {
    even_text_add(out, of->path);
  } else {
    even_text_format(out, "%s/%s", of->path, name);
  }
  return even_text_status(out);
}

/* The file of that name, on both sides or on one: then each of its tensors is told. */
static even_status compare_file(diff *on, const char *name, bool in_a, bool in_b) {
  even_text a = EVEN_TEXT_EMPTY;
  even_text b = EVEN_TEXT_EMPTY;
  on->file = name;
  on->file_named = false;
  on->files += in_a != in_b;
  even_status status = path_of(&on->a, name, &a);
  if (status == EVEN_OK) {
    status = path_of(&on->b, name, &b);
  }
  if (status == EVEN_OK) {
    status = even_safetensors_compare(in_a ? even_text_string(&a) : NULL, in_b ? even_text_string(&b) : NULL,
                                      take_tensor, on);
  }
  even_text_free(&a);
  even_text_free(&b);
  return status;
}

static even_status compare_folders(diff *on) {
  for (size_t i = 0; i < on->a.info.file_count; i++) {
    const char *name = on->a.info.files[i].name;
    if (even_safetensors_is_named(name)) {
      EVEN_TRY(compare_file(on, name, true, has_file(&on->b, name)));
    }
  }
  for (size_t i = 0; i < on->b.info.file_count; i++) {
    const char *name = on->b.info.files[i].name;
    if (even_safetensors_is_named(name) && !has_file(&on->a, name)) {
      EVEN_TRY(compare_file(on, name, false, true));
    }
  }
  return EVEN_OK;
}

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

static even_status compare_all(diff *on) {
  bool single = on->a.is_file || on->b.is_file;
  even_json_object(&on->json, NULL);
  even_json_string(&on->json, "format", "evenstep-ckpt-diff-1");
  even_json_string(&on->json, "a", on->a.path);
  even_json_string(&on->json, "b", on->b.path);
  even_json_array(&on->json, "tensors");
  EVEN_TRY(single ? compare_file(on, "model.safetensors", true, true) : compare_folders(on));
  even_json_array_end(&on->json);
  even_json_array(&on->json, "settings");
  if (!single && !on->tensors_only) {
    EVEN_TRY(even_json_compare("", on->a.info.state, on->b.info.state, tell_setting, on));
  }
  even_json_array_end(&on->json);
  even_json_unsigned(&on->json, "same_tensors", on->same);
  even_json_unsigned(&on->json, "different_tensors", on->different);
  even_json_unsigned(&on->json, "different_settings", on->settings);
  even_json_bool(&on->json, "same", on->different + on->settings + on->files == 0);
  even_json_object_end(&on->json);
  return EVEN_OK;
}

static void conclude(const diff *on) {
  if (on->settings > MOST_SETTINGS) {
    (void)printf("  … and %zu more (--json has all)\n", on->settings - MOST_SETTINGS);
  }
  if (on->different + on->settings + on->files == 0) {
    (void)printf("the same: %zu tensors%s\n", on->same,
                 on->tensors_only || on->a.is_file || on->b.is_file ? "" : " and all settings");
  } else {
    (void)printf("%zu of %zu tensors and %zu settings differ\n", on->different, on->different + on->same, on->settings);
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
