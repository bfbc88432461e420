/* Makes ranks truly slower: a control group's CPU quota where the kernel lets us, else busy neighbours on the same
 * CPUs. */
#include "orchestrator/slowdown.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/busy.h"
#include "os/process.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static even_status make_group(even_slowdown *slow, size_t rank, const char *job, double cores) {
  even_cgroup parent;
  char name[64];
  (void)snprintf(name, sizeof name, "evenstep-%.12s-rank-%zu", job, rank);
  EVEN_TRY(even_cgroup_own("", "cpu", &parent));
  even_cgroup *group = &slow->groups[rank];
  EVEN_TRY(even_cgroup_make(&parent, "cpu", name, group));
  even_status status = even_guardian_add_cgroup(slow->guardian, group->folder);
  if (status == EVEN_OK) {
    status = even_cgroup_limit_cpu(group, cores);
  }
  (void)snprintf(slow->joins[rank], sizeof slow->joins[rank], "%s/cgroup.procs", group->folder);
  if (status != EVEN_OK && even_cgroup_remove(group->folder) == EVEN_OK) {
    group->folder[0] = '\0';
    slow->joins[rank][0] = '\0';
  }
  return status;
}

static even_status add_neighbours(even_slowdown *slow, const even_device *device, double fraction) {
  for (size_t i = 0; i < device->cpu_count; i++) {
    pid_t pids[EVEN_BUSY_MOST];
    size_t count = 0;
    EVEN_TRY(
        even_realloc((void **)&slow->neighbours, slow->neighbour_count + EVEN_BUSY_MOST, sizeof *slow->neighbours));
    even_status status = even_busy_start(device->cpus[i], fraction, pids, &count);
    memcpy(&slow->neighbours[slow->neighbour_count], pids, count * sizeof *pids);
    slow->neighbour_count += count;
    for (size_t k = 0; k < count && status == EVEN_OK; k++) {
      status = even_guardian_add_session(slow->guardian, pids[k]);
    }
    EVEN_TRY(status);
  }
  return EVEN_OK;
}

even_status even_slowdown_open(const even_device_list *devices, const double *quota, const char *job,
                               even_guardian *guardian, even_slowdown *out) {
  memset(out, 0, sizeof *out);
  out->guardian = guardian;
  out->ranks = quota == NULL ? 0 : devices->count;
  if (out->ranks == 0) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->groups, out->ranks));
  EVEN_TRY(even_alloc(out->ranks, sizeof *out->joins, (void **)&out->joins));
  for (size_t i = 0; i < out->ranks; i++) {
    const even_device *device = &devices->items[i];
    if (!isfinite(quota[i]) || quota[i] >= 1) {
      continue;
    }
    double cores = device->cores > 0 ? device->cores : (double)device->cpu_count;
    if (out->refused[0] == '\0' && make_group(out, i, job, quota[i] * cores) == EVEN_OK) {
      continue;
    }
    if (out->refused[0] == '\0') {
      (void)snprintf(out->refused, sizeof out->refused, "%s", even_error_last()->what);
      even_error_clear();
    }
    EVEN_TRY(add_neighbours(out, device, quota[i]));
  }
  return EVEN_OK;
}

const char *even_slowdown_join(const even_slowdown *slow, size_t rank) {
  return rank < slow->ranks && slow->joins[rank][0] != '\0' ? slow->joins[rank] : NULL;
}

void even_slowdown_close(even_slowdown *slow) {
  for (size_t i = 0; i < slow->neighbour_count; i++) {
    (void)even_process_signal(slow->neighbours[i], SIGKILL);
    even_process_wait(slow->neighbours[i]);
  }
  for (size_t i = 0; slow->groups != NULL && i < slow->ranks; i++) {
    if (slow->groups[i].folder[0] != '\0' && even_cgroup_remove(slow->groups[i].folder) != EVEN_OK) {
      even_error_clear(); /* the guardian tries once more */
    }
  }
  for (size_t i = 0; slow->groups != NULL && i < slow->ranks; i++) {
    even_cgroup_switch_off(&slow->groups[i], "cpu");
  }
  even_free(slow->neighbours);
  even_free(slow->groups);
  even_free(slow->joins);
  memset(slow, 0, sizeof *slow);
}
