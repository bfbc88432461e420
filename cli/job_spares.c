/* --spares: on which hosts processes wait to take a lost rank's place, and their devices. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/job_setup.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SPARES = 1000 };

static size_t hosts_of(const even_job_setup *setup) {
  return setup->hosts == NULL ? 1 : even_hosts_count(setup->hosts);
}

static even_status bad_spares(const char *text, const char *why) {
  (void)even_fail(EVEN_ERR_USAGE, "--spares %.200s: %s", text, why);
  return even_error_fix("give their number, or where they shall wait: --spares 2, --spares here:1,there:1");
}

/* 0 … MOST_SPARES from `at` to the end or a comma; *next is behind it. False: it is none. */
static bool read_number(const char *at, int *number, const char **next) {
  char *end = NULL;
  errno = 0;
  long value = strtol(at, &end, 10);
  *next = end;
  *number = (int)value;
  return errno == 0 && end != at && at[0] >= '0' && at[0] <= '9' && (*end == '\0' || *end == ',') &&
         value <= MOST_SPARES;
}

/* Not on a witness. */
static bool has_ranks(const even_job_setup *setup, size_t host) {
  return host == 0 || even_hosts_devices(setup->hosts, host)->count > 0;
}

/* One after the other on all hosts, from this one on. */
static void spread(const even_job_setup *setup, int number, int *on_host) {
  size_t host = 0;
  for (int left = number; left > 0; host = (host + 1) % hosts_of(setup)) {
    if (has_ranks(setup, host)) {
      on_host[host]++;
      left--;
    }
  }
}

static int find_host(const even_job_setup *setup, const char *name, size_t length) {
  for (size_t i = 0; setup->hosts != NULL && i < even_hosts_count(setup->hosts); i++) {
    const char *its = even_hosts_name(setup->hosts, i);
    if (strlen(its) == length && strncmp(its, name, length) == 0 && has_ranks(setup, i)) {
      return (int)i;
    }
  }
  return -1;
}

/* HOST:N,… Those of hosts that are not there any more (`left`) are left out. */
static even_status read_places(const char *text, const even_job_setup *setup, bool left, int *on_host) {
  const char *at = text;
  for (;;) {
    int number = 0;
    size_t length = strcspn(at, ":,");
    const char *next = at + length;
    if (*next != ':' || !read_number(next + 1, &number, &next)) {
      return bad_spares(text, "not a number, nor HOST:NUMBER");
    }
    int host = find_host(setup, at, length);
    if (host < 0 && !left) {
      return bad_spares(text, setup->hosts == NULL ? "there is one host" : "the job has no such host");
    }
    if (host >= 0) {
      on_host[host] += number;
    }
    if (*next == '\0') {
      return EVEN_OK;
    }
    at = next + 1;
  }
}

static even_status read_spares(const char *text, const even_job_setup *setup, bool left, int *on_host) {
  int number = 0;
  const char *next = text;
  if (read_number(text, &number, &next) && *next == '\0') {
    spread(setup, number, on_host);
    return EVEN_OK;
  }
  return read_places(text, setup, left, on_host);
}

static even_status keep(const int *on_host, const char *text, even_job_setup *setup) {
  size_t total = 0;
  for (size_t host = 0; host < hosts_of(setup); host++) {
    total += (size_t)on_host[host];
  }
  if (total > MOST_SPARES) {
    return bad_spares(text, "too many");
  }
  even_free(setup->spare_hosts);
  setup->spare_hosts = NULL;
  setup->spares = 0;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->spare_hosts, total + 1));
  for (size_t host = 0; host < hosts_of(setup); host++) {
    for (int i = 0; i < on_host[host]; i++) {
      setup->spare_hosts[setup->spares++] = (int)host;
    }
  }
  return EVEN_OK;
}

/* Ranks go on that were numbered under another leader. */
static bool is_held(const even_job_setup *setup) {
  return setup->hosts != NULL && even_hosts_held_places(setup->hosts) > 0;
}

/* They wait where they waited. */
static even_status keep_held(even_job_setup *setup) {
  size_t most = even_hosts_held_spares(setup->hosts);
  setup->spares = 0;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->spare_hosts, most + 1));
  for (int host = 0; setup->spares < most && host >= 0;) {
    host = even_hosts_held_spare(setup->hosts, setup->devices.count + setup->spares);
    if (host >= 0) {
      setup->spare_hosts[setup->spares++] = host;
    }
  }
  return EVEN_OK;
}

even_status even_job_read_spares(const even_job_options *options, bool left, even_job_setup *setup) {
  int *on_host = NULL;
  if (options->spares == NULL) {
    return EVEN_OK;
  }
  if (is_held(setup)) {
    return keep_held(setup);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&on_host, hosts_of(setup)));
  even_status status = read_spares(options->spares, setup, left, on_host);
  if (status == EVEN_OK) {
    status = keep(on_host, options->spares, setup);
  }
  even_free(on_host);
  return status;
}

/* Of this host: all CPUs that its ranks have, whichever place it will take. */
static even_status give_cpus(const even_device *own, size_t local, even_device *spare) {
  size_t cpus = 0;
  for (size_t i = 0; i < local; i++) {
    cpus += own[i].cpu_count;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&spare->cpus, cpus + 1));
  for (size_t i = 0; i < local; i++) {
    memcpy(spare->cpus + spare->cpu_count, own[i].cpus, own[i].cpu_count * sizeof *spare->cpus);
    spare->cpu_count += own[i].cpu_count;
  }
  return EVEN_OK;
}

/* Whether a rank of a host that had joined has it, of those that are kept. */
static bool is_taken(const even_job_setup *setup, size_t place) {
  bool own = place >= setup->first && place < setup->first + setup->local;
  return is_held(setup) && (own || strcmp(setup->names[place], "free") != 0);
}

static even_status add_device(even_job_setup *setup, size_t number) {
  even_device_list *devices = &setup->devices;
  size_t waiting = setup->spares - setup->kept;
  size_t place = devices->count++;
  even_device *spare = &devices->items[place];
  if (number >= waiting && is_taken(setup, place)) {
    setup->joined = number + 1 - waiting;
    return EVEN_OK;
  }
  size_t host = number < waiting ? (size_t)setup->spare_hosts[number] : 0;
  *spare = host == 0 ? devices->items[setup->first] : even_hosts_devices(setup->hosts, host)->items[0];
  (void)snprintf(spare->name, sizeof spare->name, "%s:%zu", number < waiting ? "spare" : "free",
                 number < waiting ? number : number - waiting);
  spare->cpus = NULL;
  spare->cpu_count = 0;
  bool here = number < waiting && host == 0;
  return here ? give_cpus(devices->items + setup->first, setup->local, spare) : EVEN_OK;
}

/* Those of spares on other hosts; where the names lie may have changed. */
static even_status add_labels(even_job_setup *setup, size_t ranks) {
  size_t count = setup->devices.count;
  if (setup->labels == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(even_realloc((void **)&setup->labels, count, sizeof *setup->labels));
  EVEN_TRY(even_realloc((void **)&setup->names, count, sizeof *setup->names));
  for (size_t i = 0; i < count; i++) {
    bool waits = i >= ranks && i - ranks < setup->spares - setup->kept;
    bool free = i >= ranks && !waits && !is_taken(setup, i);
    bool elsewhere = waits ? setup->spare_hosts[i - ranks] > 0 : !free && setup->labels[i] != NULL;
    if (waits && elsewhere) {
      (void)snprintf(setup->names[i], EVEN_HOSTS_NAME, "%s",
                     even_hosts_name(setup->hosts, (size_t)setup->spare_hosts[i - ranks]));
    }
    setup->labels[i] = elsewhere ? setup->names[i] : NULL;
  }
  return EVEN_OK;
}

even_status even_job_add_spares(even_job_setup *setup) {
  even_device_list *devices = &setup->devices;
  size_t ranks = devices->count;
  if (setup->spares == 0) {
    return EVEN_OK;
  }
  EVEN_TRY(even_realloc((void **)&devices->items, ranks + setup->spares, sizeof *devices->items));
  for (size_t k = 0; k < setup->spares; k++) {
    EVEN_TRY(add_device(setup, k));
  }
  return add_labels(setup, ranks);
}

void even_job_drop_spares(even_job_setup *setup) {
  for (size_t k = 0; k < setup->spares; k++) {
    size_t last = --setup->devices.count;
    if (last < setup->first || last >= setup->first + setup->local) { /* a host that joined may lead, from there */
      even_free(setup->devices.items[last].cpus);
    }
  }
  setup->spares = 0;
}
