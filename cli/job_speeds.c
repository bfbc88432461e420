/* How fast the devices of a job are before they are measured: by a profile, and by quotas. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/command.h"
#include "cli/job_setup.h"
#include "orchestrator/outlast.h"
#include "os/folder.h"

#include <evenstep/balancer.h>
#include <math.h>
#include <string.h>

/* -1: none. */
static int first_unknown(const double *speeds, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!isfinite(speeds[i])) {
      return (int)i;
    }
  }
  return -1;
}

/* The others begin with equal shares. */
static bool begins_from_speeds(const even_job_options *options) {
  even_policy policy;
  return even_policy_parse(options->policy, &policy) == EVEN_OK &&
         (policy == EVEN_POLICY_PROPORTIONAL || policy == EVEN_POLICY_HYBRID || policy == EVEN_POLICY_AUTO);
}

static bool one_model(const even_device_list *devices) {
  for (size_t i = 1; i < devices->count; i++) {
    if (devices->items[i].kind != devices->items[0].kind ||
        strcmp(devices->items[i].model, devices->items[0].model) != 0 ||
        devices->items[i].cpu_count != devices->items[0].cpu_count) {
      return false;
    }
  }
  return true;
}

const char *even_job_profile_path(const even_job_options *options) {
  return options->profile != NULL ? options->profile : "gpu_profiles.json";
}

/* *read: it could be. A job that has begun is not ended for a file that is spoilt, or gone, by now, or that another
 * leader's host never had. */
static even_status read_profile(const char *path, bool begins, even_job_setup *setup, bool *read) {
  even_status status = even_profile_speeds(path, &setup->devices, setup->speeds);
  *read = status == EVEN_OK;
  if (*read || begins) {
    return status;
  }
  even_cli_say(NULL, even_error_last()->what);
  even_error_clear();
  return EVEN_OK;
}

/* A rank whose device has no strength of the measure that the first one has; -1: none. */
static int first_weak(const even_device_list *devices) {
  for (size_t i = 0; i < devices->count; i++) {
    const even_device *device = &devices->items[i];
    if (!(device->strength > 0) || device->strength_in_c != devices->items[0].strength_in_c) {
      return (int)i;
    }
  }
  return -1;
}

static bool any_strength(const even_device_list *devices) {
  for (size_t i = 0; i < devices->count; i++) {
    if (devices->items[i].strength > 0) {
      return true;
    }
  }
  return false;
}

/* Of several hosts, each by its own profile: scores of two files are of different units. Speeds are the strengths
 * themselves: those of a host that joins later are of the same unit. `read`: this host's could be. A rank whose device
 * no profile tells of; -1: none. */
static int read_strengths(const char *path, bool read, even_job_setup *setup) {
  for (size_t i = 0; i < setup->devices.count; i++) {
    if (setup->labels[i] == NULL) {
      setup->devices.items[i].strength = 0; /* of the file before */
    }
  }
  if (read && even_profile_strengths(path, &setup->devices) != EVEN_OK) {
    even_error_clear(); /* it is gone now */
  }
  int weak = first_weak(&setup->devices);
  for (size_t i = 0; weak < 0 && i < setup->devices.count; i++) {
    setup->speeds[i] = setup->devices.items[i].strength;
  }
  return weak;
}

/* The prior: the profiles' score of each device, times its quota. Without a score of each the quotas alone say
 * something only where the devices are alike, so all are then left unknown unless every device is of one model. */
even_status even_job_read_speeds(const even_job_options *options, bool begins, even_job_setup *setup) {
  const char *path = even_job_profile_path(options);
  size_t count = setup->devices.count;
  bool read = false;
  int unknown = -1;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->speeds, count));
  if (options->profile != NULL || even_path_exists(path)) {
    EVEN_TRY(read_profile(path, begins, setup, &read));
    unknown = read ? first_unknown(setup->speeds, count) : -1;
  }
  bool known = read && unknown < 0;
  if (setup->labels != NULL) {
    int weak = read_strengths(path, read, setup);
    unknown = known || !(read || any_strength(&setup->devices)) ? -1 : weak;
    known = known || weak < 0;
  }
  setup->no_score = begins_from_speeds(options) ? unknown : -1;
  if (!known && setup->quota != NULL && one_model(&setup->devices)) {
    for (size_t i = 0; i < count; i++) {
      setup->speeds[i] = 1;
    }
    known = true;
  }
  for (size_t i = 0; known && i < count; i++) {
    if (setup->quota != NULL && isfinite(setup->quota[i])) {
      setup->speeds[i] *= setup->quota[i];
    }
  }
  if (!known) {
    even_free(setup->speeds);
    setup->speeds = NULL;
  }
  return EVEN_OK;
}

even_status even_job_set_speeds(even_job_setup *setup, size_t ranks) {
  even_text list = EVEN_TEXT_EMPTY;
  for (size_t i = 0; i < ranks; i++) {
    even_text_format(&list, "%s%.6g", i > 0 ? "," : "", setup->speeds[i]);
  }
  even_status status = even_text_status(&list);
  if (status == EVEN_OK) {
    status = even_environment_set(&setup->environment, "EVENSTEP_SPEEDS", list.data);
  }
  even_text_free(&list);
  return status;
}
