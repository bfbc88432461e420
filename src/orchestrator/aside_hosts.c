/* Cuts hosts' lists of devices down to the places that take part. */
#include "orchestrator/aside_hosts.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <string.h>

bool even_aside_hosts_any(const even_hosts *hosts) {
  for (size_t i = 0; hosts != NULL && i < hosts->count; i++) {
    if (hosts->agents[i].whole.count > 0) {
      return true;
    }
  }
  return false;
}

void even_aside_host_close(even_host_agent *agent) {
  even_device_list_free(&agent->whole);
  even_free(agent->used);
  agent->used = NULL;
}

/* Those of other hosts have no memory of their own here: who lists the ranks of all hosts has copies of them. */
static even_status copy_device(const even_device *from, even_device *to) {
  *to = *from;
  if (from->cpus != NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&to->cpus, from->cpu_count + 1));
    memcpy(to->cpus, from->cpus, from->cpu_count * sizeof *from->cpus);
  }
  return EVEN_OK;
}

even_status even_aside_copy(const even_device_list *from, const size_t *used, size_t count, even_device_list *out) {
  *out = (even_device_list){NULL, 0};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, count));
  for (; out->count < count; out->count++) {
    even_status status = copy_device(&from->items[used[out->count]], &out->items[out->count]);
    if (status != EVEN_OK) {
      even_device_list_free(out);
      return status;
    }
  }
  return EVEN_OK;
}

static bool any_aside(const even_host_agent *agent, const even_aside *aside, size_t count) {
  for (size_t place = 0; place < count; place++) {
    if (even_aside_has(aside, agent->name, place)) {
      return true;
    }
  }
  return false;
}

/* Keeps all that the host has for the job, from the first time on that a place of it is set aside. */
static even_status keep_whole(even_host_agent *agent, const even_device_list *now) {
  EVEN_TRY(EVEN_NEW_ARRAY(&agent->used, now->count));
  for (size_t i = 0; i < now->count; i++) {
    agent->used[i] = i;
  }
  return even_aside_copy(now, agent->used, now->count, &agent->whole);
}

static void choose(even_host_agent *agent, const even_aside *aside) {
  agent->used_count = 0;
  for (size_t place = 0; place < agent->whole.count; place++) {
    if (!even_aside_has(aside, agent->name, place)) {
      agent->used[agent->used_count++] = place;
    }
  }
}

/* As a place is set aside only where it is none's last, and enough are left. */
static bool enough_are_left(const even_hosts *hosts, const even_device_list *own, int64_t least,
                            const even_aside *aside) {
  size_t left = 0;
  for (size_t host = 0; host < even_hosts_count(hosts); host++) {
    const size_t count = host == 0 ? own->count : even_hosts_devices(hosts, host)->count;
    size_t here = 0;
    for (size_t place = 0; place < count; place++) {
      here += !even_aside_has(aside, even_hosts_name(hosts, host), place);
    }
    if (here == 0 && count > 0) {
      return false;
    }
    left += here;
  }
  return (int64_t)left >= least;
}

static void return_until(even_aside *aside, uint64_t now_ns) {
  while (even_aside_return(aside, now_ns) != NULL) {
  }
}

void even_aside_hosts_return(const even_hosts *hosts, const even_device_list *own, int64_t least, uint64_t now_ns,
                             even_aside *aside) {
  return_until(aside, now_ns);
  if (!enough_are_left(hosts, own, least, aside)) {
    return_until(aside, UINT64_MAX);
  }
}

/* *any: it has others from now on. */
static even_status cut(even_host_agent *agent, const even_aside *aside, const even_device_list *now, bool *any,
                       even_device_list *out) {
  *any = agent->whole.count > 0 || any_aside(agent, aside, now->count);
  if (!*any) {
    return EVEN_OK;
  }
  if (agent->whole.count == 0) {
    EVEN_TRY(keep_whole(agent, now));
  }
  choose(agent, aside);
  return even_aside_copy(&agent->whole, agent->used, agent->used_count, out);
}

even_status even_aside_host_cut(even_host_agent *agent, const even_aside *aside) {
  even_device_list left;
  bool any = false;
  EVEN_TRY(cut(agent, aside, &agent->devices, &any, &left));
  if (any) {
    even_device_list_free(&agent->devices);
    agent->devices = left;
    agent->count = left.count;
  }
  return EVEN_OK;
}

even_status even_aside_hosts_cut(even_hosts *hosts, const even_aside *aside, const even_device_list *own) {
  even_host_agent *here = &hosts->agents[0];
  even_device_list left;
  bool any = false;
  EVEN_TRY(cut(here, aside, own, &any, &left));
  if (any) { /* taken by who counts this host's (even_hosts_own_devices) */
    even_device_list_free(&here->next.devices);
    here->next = (even_host_next){.placed = true, .devices = left};
  }
  for (size_t i = 1; i < hosts->count; i++) {
    EVEN_TRY(even_aside_host_cut(&hosts->agents[i], aside));
  }
  return EVEN_OK;
}

even_status even_aside_host_cut_again(even_host_agent *agent, even_device_list *devices) {
  even_device_list left;
  if (devices->count != agent->whole.count) {
    return even_fail(EVEN_ERR_MISMATCH, "host %s had %zu devices before, and has %zu now", agent->name,
                     agent->whole.count, devices->count);
  }
  EVEN_TRY(even_aside_copy(devices, agent->used, agent->used_count, &left));
  even_device_list_free(&agent->whole);
  agent->whole = *devices;
  *devices = left;
  return EVEN_OK;
}
