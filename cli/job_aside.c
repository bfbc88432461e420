/* Cuts a job's devices down to those whose places take part. */
#include "cli/job_aside.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/estate.h"
#include "orchestrator/outlast.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

even_status even_job_check_aside(const even_job_options *options) {
  bool several = options->hosts != NULL;
  if (!options->set_aside) {
    return EVEN_OK;
  }
  if (options->max_ranks > 0) {
    (void)even_fail(EVEN_ERR_USAGE,
                    "--set-aside is of places that the job has from its beginning, not with --max-ranks");
    return even_error_fix("leave one of the two out");
  }
  if (several && options->cpu_quota != NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "--set-aside on several hosts knows nothing of --cpu-quota");
    return even_error_fix("leave one of the two out");
  }
  if (several && strcmp(options->recovery, "restart") != 0 && !options->keep_leader) {
    (void)even_fail(
        EVEN_ERR_USAGE,
        "--set-aside on several hosts, with --recovery %s, is not known to who goes on under another leader",
        options->recovery);
    return even_error_fix("give --no-replace-leader, too, or leave out --set-aside");
  }
  return EVEN_OK;
}

typedef struct even_job_part {
  even_device *items;
  double *quota;
  bool *shown;
  size_t count;
} even_job_part;

/* The devices' own memory stays with `all`. */
static even_status cut(const even_aside *aside, const even_job_devices *all, even_job_part *out) {
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, all->devices.count));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->shown, all->devices.count));
  if (all->quota != NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&out->quota, all->devices.count));
  }
  for (size_t i = 0; i < all->devices.count; i++) {
    if (even_aside_has(aside, "", i)) {
      continue;
    }
    out->items[out->count] = all->devices.items[i];
    out->shown[out->count] = all->shown[out->count]; /* of a rank's number, not of a place */
    if (all->quota != NULL) {
      out->quota[out->count] = all->quota[i];
    }
    out->count++;
  }
  return EVEN_OK;
}

static void drop(even_job_part *part) {
  even_free(part->items);
  even_free(part->quota);
  even_free(part->shown);
}

even_status even_job_setup_without(const even_job_options *options, const even_aside *aside, even_job_devices *all,
                                   even_job_setup *setup) {
  even_job_part part = {.count = 0};
  bool first = all->devices.items == NULL;
  if (first) {
    *all = (even_job_devices){.devices = setup->devices, .quota = setup->quota, .shown = setup->shown};
  }
  even_status status = cut(aside, all, &part);
  if (status != EVEN_OK) {
    drop(&part);
    return status;
  }
  if (!first) {
    drop(&(even_job_part){.items = setup->devices.items, .quota = setup->quota, .shown = setup->shown});
  }
  setup->devices = (even_device_list){.items = part.items, .count = part.count};
  setup->quota = part.quota;
  setup->shown = part.shown;
  setup->local = part.count - setup->spares;
  even_free(setup->speeds);
  setup->speeds = NULL;
  setup->devices.count = setup->local; /* spares have no speed */
  even_status read = even_job_read_speeds(options, false, setup);
  setup->devices.count = part.count;
  EVEN_TRY(read);
  return setup->speeds != NULL ? even_job_set_speeds(setup, setup->local)
                               : even_environment_set(&setup->environment, "EVENSTEP_SPEEDS", "");
}

even_status even_job_inherit_aside(const even_job_options *options, even_job_setup *setup) {
  even_device_list own;
  if (options->estate != NULL) {
    even_estate_aside(options->estate, &setup->aside);
  } else {
    even_legacy_aside(options->legacy, &setup->aside);
  }
  if (!even_outlast_due(options->legacy)) { /* else an attempt without them runs */
    even_aside_hosts_return(setup->hosts, &setup->devices, options->min_ranks, even_clock_ns(), &setup->aside);
  }
  setup->aside.changed = false; /* nothing has begun */
  EVEN_TRY(even_aside_hosts_cut(setup->hosts, &setup->aside, &setup->devices));
  if (even_hosts_own_devices(setup->hosts, &own)) {
    even_device_list_free(&setup->devices);
    setup->devices = own;
  }
  return EVEN_OK;
}

even_status even_job_keep_aside(const even_job_options *options, even_job_devices *all, even_job_setup *setup) {
  if (options->legacy == NULL || !options->set_aside || setup->hosts != NULL) {
    return EVEN_OK;
  }
  even_legacy_aside(options->legacy, &setup->aside);
  while (!even_outlast_due(options->legacy) && even_aside_return(&setup->aside, even_clock_ns()) != NULL) {
  }
  setup->aside.changed = false; /* nothing has begun */
  return even_aside_any(&setup->aside) ? even_job_setup_without(options, &setup->aside, all, setup) : EVEN_OK;
}

void even_job_tell_aside(const even_aside *aside, even_job_view *view) {
  const uint64_t now = even_clock_ns();
  for (size_t i = 0; i < aside->count && !view->quiet; i++) {
    const even_aside_place *one = &aside->items[i];
    char words[320];
    if (one->until_ns > now) {
      (void)snprintf(words, sizeof words, "place %zu (%s)%s%s stays set aside for another %.0f s", one->place,
                     one->device, one->host[0] == '\0' ? "" : " of host ", one->host,
                     (double)(one->until_ns - now) * 1e-9);
      even_job_view_notice(view, words);
    }
  }
}

void even_job_setup_whole(even_job_devices *all, even_job_setup *setup) {
  if (all->devices.items != NULL) {
    drop(&(even_job_part){.items = setup->devices.items, .quota = setup->quota, .shown = setup->shown});
    setup->devices = all->devices;
    setup->quota = all->quota;
    setup->shown = all->shown;
    *all = (even_job_devices){.quota = NULL};
  }
}
