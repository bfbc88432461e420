/* Reads gpu_profiles.json: the relative speeds that `evenstep profile` measured. */
#include "device/profile.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "os/file.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { FILE_LIMIT = 16 << 20 };

static even_status fix(void) {
  return even_error_fix("measure again with `evenstep profile`, or name another file with --profile");
}

/* What was measured of a device and is no speed (a file that somebody wrote or changed); null: it was not measured. */
static even_status speeds_check(const char *path, const char *name, const json_t *entry) {
  static const char *const speeds[] = {"matmul_fp32_gflops", "matmul_bf16_gflops", "memory_bandwidth_gb_per_second",
                                       "memory_read_gb_per_second"};
  for (size_t i = 0; i < sizeof speeds / sizeof speeds[0]; i++) {
    const json_t *speed = json_object_get(entry, speeds[i]);
    if (speed != NULL && !json_is_null(speed) && !(json_is_number(speed) && json_number_value(speed) >= 0)) {
      return even_fail(EVEN_ERR_INPUT, "%s: the %s of %s is no speed", path, speeds[i], name);
    }
  }
  return EVEN_OK;
}

static even_status entry_check(const char *path, size_t index, const json_t *entry) {
  const char *name = json_string_value(json_object_get(entry, "name"));
  const json_t *score = json_object_get(entry, "relative_score");
  if (name == NULL) {
    return even_fail(EVEN_ERR_INPUT, "%s: device %zu has no name", path, index);
  }
  if (score == NULL || json_is_null(score)) {
    return even_fail(EVEN_ERR_INPUT, "%s: device %s has no relative_score", path, name);
  }
  if (!json_is_number(score)) {
    return even_fail(EVEN_ERR_INPUT, "%s: the relative_score of %s is not a number", path, name);
  }
  if (!(json_number_value(score) > 0) || !isfinite(json_number_value(score))) {
    return even_fail(EVEN_ERR_INPUT, "%s: the relative_score of %s is %g; a speed is above 0", path, name,
                     json_number_value(score));
  }
  return speeds_check(path, name, entry);
}

static even_status document_check(const char *path, const json_t *root) {
  const char *format = json_string_value(json_object_get(root, "format"));
  const json_t *devices = json_object_get(root, "devices");
  if (format == NULL || strcmp(format, even_profile_format) != 0) {
    return even_fail(EVEN_ERR_INPUT, "%s is not a profile: its format is %s, not %s", path,
                     format != NULL ? format : "missing", even_profile_format);
  }
  if (!json_is_array(devices)) {
    return even_fail(EVEN_ERR_INPUT, "%s has no list of devices", path);
  }
  for (size_t i = 0; i < json_array_size(devices); i++) {
    EVEN_TRY(entry_check(path, i, json_array_get(devices, i)));
  }
  return EVEN_OK;
}

/* A file may come from another machine (a project's folder that was copied, a home that several hosts share), where the
 * same name is another processor. Not by the host's name: containers get a new one at each start. An entry without a
 * model was written by hand. */
static bool of_this_model(const json_t *entry, const even_device *device) {
  const char *model = json_string_value(json_object_get(entry, "model"));
  return model == NULL || strcmp(model, device->model) == 0;
}

/* What an entry says of a device, or of cores that are part of it. A score that was measured while other work took the
 * device's time, or on another model, says nothing of its speed: NaN. */
static double score_in(const json_t *entry, const even_device *device) {
  bool disturbed = json_is_true(json_object_get(entry, "disturbed"));
  return disturbed || !of_this_model(entry, device) ? NAN : json_number_value(json_object_get(entry, "relative_score"));
}

/* The score of the device by its name, NaN where the profile lacks it. */
static double score_of(const json_t *devices, const even_device *device) {
  for (size_t i = 0; i < json_array_size(devices); i++) {
    const json_t *entry = json_array_get(devices, i);
    if (strcmp(json_string_value(json_object_get(entry, "name")), device->name) == 0) {
      return score_in(entry, device);
    }
  }
  return NAN;
}

static bool uses(const even_device *device, const json_t *cpus) {
  for (size_t i = 0; i < json_array_size(cpus); i++) {
    json_int_t cpu = json_integer_value(json_array_get(cpus, i));
    size_t at = 0;
    while (at < device->cpu_count && device->cpus[at] != cpu) {
      at++;
    }
    if (at == device->cpu_count) {
      return false;
    }
  }
  return json_array_size(cpus) > 0;
}

/* The first entry of a single core, or of its threads, that has this CPU; NULL: none has. */
static const json_t *entry_of(const json_t *devices, const even_device *device, int32_t cpu) {
  for (size_t i = 0; i < json_array_size(devices); i++) {
    const json_t *entry = json_array_get(devices, i);
    const json_t *cpus = json_object_get(entry, "cpus");
    const char *name = json_string_value(json_object_get(entry, "name"));
    if (strncmp(name, "cpu:", 4) == 0 && strchr(name, '-') == NULL && uses(device, cpus)) {
      for (size_t k = 0; k < json_array_size(cpus); k++) {
        if (json_integer_value(json_array_get(cpus, k)) == cpu) {
          return entry;
        }
      }
    }
  }
  return NULL;
}

/* A set of cores that was not measured as such is as fast as its cores together, each counted once; NaN where one of
 * them is unknown. */
static double score_of_set(const json_t *devices, const even_device *device) {
  double sum = 0;
  for (size_t i = 0; i < device->cpu_count && device->kind == EVEN_DEVICE_CPU; i++) {
    const json_t *entry = entry_of(devices, device, device->cpus[i]);
    bool counted = false;
    if (entry == NULL) {
      return NAN;
    }
    for (size_t before = 0; before < i && !counted; before++) {
      counted = entry_of(devices, device, device->cpus[before]) == entry;
    }
    sum += counted ? 0 : score_in(entry, device);
  }
  return sum > 0 && isfinite(sum) ? sum : NAN;
}

static double score_by_any(const json_t *devices, const even_device *device) {
  double score = score_of(devices, device);
  return isnan(score) ? score_of_set(devices, device) : score;
}

even_status even_profile_read(const char *origin, const char *text, size_t bytes, const even_device_list *devices,
                              double *speeds) {
  json_t *root = NULL;
  EVEN_TRY(even_json_parse(origin, text, bytes, &root));
  even_status status = document_check(origin, root);
  for (size_t i = 0; i < devices->count && status == EVEN_OK; i++) {
    const json_t *list = json_object_get(root, "devices");
    speeds[i] = score_by_any(list, &devices->items[i]);
  }
  json_decref(root);
  return status;
}

static even_status concluded(even_status status, even_text *content) {
  even_text_free(content);
  return status == EVEN_OK || status == EVEN_ERR_MEMORY ? status : fix();
}

even_status even_profile_speeds(const char *path, const even_device_list *devices, double *speeds) {
  even_text content = EVEN_TEXT_EMPTY;
  even_status status = even_file_read(path, FILE_LIMIT, &content);
  if (status == EVEN_OK) {
    status = even_profile_read(path, even_text_string(&content), content.length, devices, speeds);
  }
  return concluded(status, &content);
}

/* What a score of 1 is, by the first entry that says what was measured (scores may be a user's, who changed some); 0:
 * none does. */
static double unit_of(const json_t *devices) {
  for (size_t i = 0; i < json_array_size(devices); i++) {
    const json_t *entry = json_array_get(devices, i);
    double products = json_number_value(json_object_get(entry, "matmul_fp32_gflops"));
    double memory = json_number_value(json_object_get(entry, "memory_bandwidth_gb_per_second"));
    double unit = sqrt(products * memory) / json_number_value(json_object_get(entry, "relative_score"));
    if (unit > 0 && isfinite(unit)) {
      return unit;
    }
  }
  return 0;
}

even_status even_profile_read_strengths(const char *origin, const char *text, size_t bytes, even_device_list *devices) {
  json_t *root = NULL;
  EVEN_TRY(even_json_parse(origin, text, bytes, &root));
  even_status status = document_check(origin, root);
  const json_t *list = json_object_get(root, "devices");
  const char *with = json_string_value(json_object_get(root, "measured_with"));
  double unit = status == EVEN_OK && with != NULL ? unit_of(list) : 0;
  for (size_t i = 0; i < devices->count && unit > 0; i++) {
    even_device *device = &devices->items[i];
    double strength = score_by_any(list, device) * unit;
    if (!(device->strength > 0) && strength > 0 && isfinite(strength)) {
      device->strength = strength;
      device->strength_in_c = strcmp(with, "C") == 0;
    }
  }
  json_decref(root);
  return status;
}

even_status even_profile_strengths(const char *path, even_device_list *devices) {
  even_text content = EVEN_TEXT_EMPTY;
  even_status status = even_file_read(path, FILE_LIMIT, &content);
  if (status == EVEN_OK) {
    status = even_profile_read_strengths(path, even_text_string(&content), content.length, devices);
  }
  return concluded(status, &content);
}
