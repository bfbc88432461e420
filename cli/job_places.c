/* Places that are kept for hosts that join while the others train: numbered behind the ranks and the spares, and of no
 * host until one takes them. */
#include "cli/job_setup.h"

#include <stdio.h>

void even_job_keep_places(const even_job_options *options, even_job_setup *setup) {
  size_t ranks = setup->devices.count;
  size_t most = (size_t)options->max_ranks;
  setup->joined = 0;
  size_t held = setup->hosts == NULL ? 0 : even_hosts_held_places(setup->hosts);
  setup->grows = setup->shrink && setup->hosts != NULL && most > 0 && (most > ranks || held > 0);
  setup->kept = !setup->grows ? 0 : held > 0 ? even_hosts_held_spares(setup->hosts) - setup->spares : most - ranks;
  setup->spares += setup->kept;
}

size_t even_job_ranks_known(const even_job_setup *setup) {
  return setup->devices.count - (setup->kept - setup->joined);
}

void even_job_take_places(even_job_setup *setup, const char *host, size_t first, const even_device_list *devices) {
  size_t known = setup->devices.count - setup->kept;
  for (size_t i = first; i < first + devices->count && i < setup->devices.count; i++) {
    setup->devices.items[i] = devices->items[i - first];
    setup->devices.items[i].cpus = NULL; /* its own */
    setup->devices.items[i].cpu_count = 0;
    if (setup->labels != NULL) {
      (void)snprintf(setup->names[i], EVEN_HOSTS_NAME, "%s", host);
      setup->labels[i] = setup->names[i];
    }
    size_t taken = i < known ? 0 : i + 1 - known;
    setup->joined = taken > setup->joined ? taken : setup->joined;
  }
}
