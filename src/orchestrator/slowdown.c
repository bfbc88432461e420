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
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    slow->joins[rank][0] = '\0';
    if (even_cgroup_remove(group->folder) == EVEN_OK) {
      even_cgroup_switch_off(group, "cpu");
      group->folder[0] = '\0';
    }
    (void)even_error_restore(&kept);
  }
  return status;
}

static const char do_otherwise[] = "run where control groups may be made (`evenstep doctor` says how)";

static bool share_a_cpu(const even_device *one, const even_device *other, int32_t *cpu) {
  for (size_t i = 0; i < one->cpu_count; i++) {
    for (size_t k = 0; k < other->cpu_count; k++) {
      if (one->cpus[i] == other->cpus[k]) {
        *cpu = one->cpus[i];
        return true;
      }
    }
  }
  return false;
}

/* A neighbour slows whoever runs on its CPU: the rank must stay there, and be the only one. */
static even_status check_alone(const even_slowdown *slow, const even_device_list *devices, bool pinned, size_t rank) {
  int32_t cpu = -1;
  if (!pinned) {
    (void)even_fail(
        EVEN_ERR_UNSUPPORTED,
        "--cpu-quota cannot slow rank %zu with --no-pin: busy neighbours slow a CPU, which it may leave, and "
        "no control group is permitted here (%s)",
        rank, slow->refused);
    return even_error_fix("leave out --no-pin, or %s", do_otherwise);
  }
  for (size_t other = 0; other < devices->count; other++) {
    if (other != rank && share_a_cpu(&devices->items[rank], &devices->items[other], &cpu)) {
      (void)even_fail(
          EVEN_ERR_UNSUPPORTED,
          "--cpu-quota cannot slow rank %zu: it shares CPU %d with rank %zu, busy neighbours would slow both, "
          "and no control group is permitted here (%s)",
          rank, cpu, other, slow->refused);
      return even_error_fix("give each rank CPUs of its own (fewer ranks, or --devices), or %s", do_otherwise);
    }
  }
  return EVEN_OK;
}

static even_status add_neighbours(even_slowdown *slow, const even_device *device, size_t rank, double fraction) {
  for (size_t i = 0; i < device->cpu_count; i++) {
    pid_t pids[EVEN_BUSY_MOST];
    size_t count = 0;
    EVEN_TRY(
        even_realloc((void **)&slow->neighbours, slow->neighbour_count + EVEN_BUSY_MOST, sizeof *slow->neighbours));
    even_status status = even_busy_start(device->cpus[i], fraction, pids, &count);
    for (size_t k = 0; k < count; k++) {
      slow->neighbours[slow->neighbour_count++] = (struct even_neighbour){.pid = pids[k], .rank = rank};
      status = status == EVEN_OK ? even_guardian_add_session(slow->guardian, pids[k]) : status;
    }
    EVEN_TRY(status);
  }
  return EVEN_OK;
}

even_status even_slowdown_open(const even_device_list *devices, const double *quota, bool pinned, const char *job,
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
    EVEN_TRY(check_alone(out, devices, pinned, i));
    EVEN_TRY(add_neighbours(out, device, i, quota[i]));
  }
  return EVEN_OK;
}

const char *even_slowdown_join(const even_slowdown *slow, size_t rank) {
  return rank < slow->ranks && slow->joins[rank][0] != '\0' ? slow->joins[rank] : NULL;
}

even_status even_slowdown_tell(const even_slowdown *slow) {
  for (size_t i = 0; i < slow->neighbour_count; i++) {
    EVEN_TRY(even_guardian_add_session(slow->guardian, slow->neighbours[i].pid));
  }
  for (size_t i = 0; slow->groups != NULL && i < slow->ranks; i++) {
    if (slow->groups[i].folder[0] != '\0') {
      EVEN_TRY(even_guardian_add_cgroup(slow->guardian, slow->groups[i].folder));
    }
  }
  return EVEN_OK;
}

bool even_slowdown_forget(even_slowdown *slow, pid_t pid, size_t *rank) {
  for (size_t i = 0; i < slow->neighbour_count; i++) {
    if (slow->neighbours[i].pid == pid) {
      *rank = slow->neighbours[i].rank;
      slow->neighbours[i] = slow->neighbours[--slow->neighbour_count];
      return true;
    }
  }
  return false;
}

void even_slowdown_close(even_slowdown *slow) {
  const even_error kept = *even_error_last(); /* of what ended the job, not of its cleaning up */
  for (size_t i = 0; i < slow->neighbour_count; i++) {
    (void)even_process_signal(slow->neighbours[i].pid, SIGKILL);
    even_process_wait(slow->neighbours[i].pid);
  }
  for (size_t i = 0; slow->groups != NULL && i < slow->ranks; i++) {
    if (slow->groups[i].folder[0] != '\0') {
      (void)!even_cgroup_remove(slow->groups[i].folder); /* the guardian tries once more */
    }
  }
  for (size_t i = 0; slow->groups != NULL && i < slow->ranks; i++) {
    even_cgroup_switch_off(&slow->groups[i], "cpu");
  }
  even_free(slow->neighbours);
  even_free(slow->groups);
  even_free(slow->joins);
  memset(slow, 0, sizeof *slow);
  (void)even_error_restore(&kept);
}
