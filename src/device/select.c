/* Which devices the ranks of one job get: those that the user names, or an even cut of the host. */
#include "base/alloc.h"
#include "base/fail.h"
#include "device/driver.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 4096, MOST_NAMES_SHOWN = 16 };

/* What a selection works on: the host, and all devices that it has. */
typedef struct selection {
  even_device_context context;
  even_device_list all;
  unsigned char *chosen; /* room for one flag a core */
} selection;

static size_t count_of(const even_device_list *list, even_device_kind kind) {
  size_t count = 0;
  for (size_t i = 0; i < list->count; i++) {
    count += list->items[i].kind == kind;
  }
  return count;
}

/* "cpu:0, cpu:1, cuda:0": what the user could have named. */
static void names_of(const selection *on, char *out, size_t size) {
  const even_topology *topology = &on->context.topology;
  size_t gpus = count_of(&on->all, EVEN_DEVICE_CUDA);
  size_t used = 0;
  out[0] = '\0';
  if (topology->core_count > MOST_NAMES_SHOWN) {
    used = (size_t)snprintf(out, size, "cpu:0 to cpu:%zu", topology->core_count - 1);
  }
  for (size_t i = 0; i < on->all.count && used < size; i++) {
    const even_device *device = &on->all.items[i];
    bool node = strncmp(device->name, "numa:", 5) == 0;
    if ((device->kind == EVEN_DEVICE_CPU && !node && topology->core_count > MOST_NAMES_SHOWN) ||
        (node && topology->node_count < 2)) {
      continue;
    }
    used += (size_t)snprintf(out + used, size - used, "%s%s", used > 0 ? ", " : "", device->name);
  }
  if (gpus == 0 && used < size) {
    (void)snprintf(out + used, size - used, " (no NVIDIA GPU)");
  }
}

static even_status absent(const selection *on, const char *word) {
  char names[400];
  names_of(on, names, sizeof names);
  even_status status = even_fail(EVEN_ERR_DEVICE, "%s does not exist: this host has %s", word, names);
  (void)even_error_fix("name devices that exist; `evenstep devices` lists them");
  return status;
}

static even_status malformed(const char *word) {
  even_status status = even_fail(EVEN_ERR_ARGUMENT, "\"%s\" does not name a device", word);
  (void)even_error_fix(
      "write cpu:K, cpu:A-B, cpu, numa:K or cuda:K, with commas between; `evenstep devices` lists them");
  return status;
}

/* Reads a number at *at and moves behind it. */
static bool number(const char **at, size_t *out) {
  char *end = NULL;
  if (**at < '0' || **at > '9') {
    return false;
  }
  unsigned long value = strtoul(*at, &end, 10);
  *out = value;
  *at = end;
  return value < 1000000;
}

static even_status by_cores(selection *on, const char *name, size_t first, size_t last, even_device *out) {
  for (size_t i = 0; i < on->context.topology.core_count; i++) {
    on->chosen[i] = i >= first && i <= last;
  }
  return even_cpu_device(&on->context, name, on->chosen, out);
}

static even_status copy_of(const even_device *device, even_device *out) {
  *out = *device;
  out->cpus = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&out->cpus, device->cpu_count));
  memcpy(out->cpus, device->cpus, device->cpu_count * sizeof *out->cpus);
  return EVEN_OK;
}

static even_status by_name(selection *on, const char *word, even_device *out) {
  for (size_t i = 0; i < on->all.count; i++) {
    if (strcmp(on->all.items[i].name, word) == 0) {
      return copy_of(&on->all.items[i], out);
    }
  }
  return absent(on, word);
}

/* One word of the user's list. */
static even_status word_take(selection *on, const char *word, even_device *out) {
  size_t cores = on->context.topology.core_count;
  size_t first = 0;
  size_t last = 0;
  char name[32];
  const char *at = strchr(word, ':');
  if (strcmp(word, "cpu") == 0) {
    return by_cores(on, word, 0, cores - 1, out);
  }
  if (at == NULL ||
      (strncmp(word, "cpu:", 4) != 0 && strncmp(word, "numa:", 5) != 0 && strncmp(word, "cuda:", 5) != 0)) {
    return malformed(word);
  }
  at++;
  if (!number(&at, &first)) {
    return malformed(word);
  }
  if (*at == '\0') {
    (void)snprintf(name, sizeof name, "%.*s:%zu", (int)strcspn(word, ":"), word, first); /* "cpu:01" is cpu:1 */
    return by_name(on, name, out);
  }
  if (word[1] != 'p' || *at++ != '-' || !number(&at, &last) || *at != '\0' || last < first) {
    return malformed(word);
  }
  (void)snprintf(name, sizeof name, first == last ? "cpu:%zu" : "cpu:%zu-%zu", first, last);
  return last >= cores ? absent(on, name) : by_cores(on, name, first, last, out);
}

static bool same_device(const even_device *a, const even_device *b) {
  if (a->kind != b->kind || a->cuda_index != b->cuda_index ||
      (a->kind == EVEN_DEVICE_CPU && a->cpu_count != b->cpu_count)) {
    return false;
  }
  return a->kind != EVEN_DEVICE_CPU || memcmp(a->cpus, b->cpus, a->cpu_count * sizeof *a->cpus) == 0;
}

/* Adds `device`, unless the list has it already. */
static even_status add_new(even_device_list *out, even_device *device) {
  for (size_t i = 0; i < out->count; i++) {
    if (!same_device(&out->items[i], device)) {
      continue;
    }
    even_status status =
        strcmp(out->items[i].name, device->name) == 0
            ? even_fail(EVEN_ERR_ARGUMENT, "device %s is named twice", device->name)
            : even_fail(EVEN_ERR_ARGUMENT, "%s and %s are the same device", out->items[i].name, device->name);
    (void)even_error_fix("name each device once; -n N makes several ranks share the cores");
    even_device_free(device);
    return status;
  }
  return even_device_list_add(out, device);
}

static even_status by_spec(selection *on, const char *spec, int ranks, even_device_list *out) {
  char word[64];
  even_device device;
  for (const char *at = spec;; at++) {
    size_t length = strcspn(at, ",");
    (void)snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : sizeof word - 1), at);
    device = (even_device){0};
    even_status status = word_take(on, word, &device);
    if (status != EVEN_OK) {
      even_device_free(&device);
      return status;
    }
    EVEN_TRY(add_new(out, &device));
    at += length;
    if (*at == '\0') {
      break;
    }
  }
  if (ranks != 0 && (size_t)ranks != out->count) {
    even_status status = even_fail(EVEN_ERR_ARGUMENT, "%d ranks are wanted on %zu named devices", ranks, out->count);
    (void)even_error_fix("name one device for each rank, or leave out -n (or --devices)");
    return status;
  }
  return EVEN_OK;
}

/* Cuts the cores into `ranks` neighbouring sets whose sizes differ by one at most; more ranks than cores share them. */
static even_status by_count(selection *on, size_t ranks, even_device_list *out) {
  size_t cores = on->context.topology.core_count;
  for (size_t rank = 0; rank < ranks; rank++) {
    even_device device = {0};
    char name[32];
    size_t first = rank * cores / ranks;
    size_t end = (rank + 1) * cores / ranks;
    size_t last = end > first ? end - 1 : first;
    (void)snprintf(name, sizeof name, first == last ? "cpu:%zu" : "cpu:%zu-%zu", first, last);
    even_status status = by_cores(on, ranks == 1 ? "cpu" : name, first, last, &device);
    if (status != EVEN_OK) {
      even_device_free(&device);
      return status;
    }
    EVEN_TRY(even_device_list_add(out, &device));
  }
  return EVEN_OK;
}

/* The first `count` devices whose name begins with `prefix`. */
static even_status first_of(selection *on, const char *prefix, size_t count, even_device_list *out) {
  for (size_t i = 0; i < on->all.count && out->count < count; i++) {
    if (strncmp(on->all.items[i].name, prefix, strlen(prefix)) == 0) {
      even_device device = {0};
      EVEN_TRY(copy_of(&on->all.items[i], &device));
      EVEN_TRY(even_device_list_add(out, &device));
    }
  }
  return EVEN_OK;
}

static even_status devices_choose(selection *on, const char *spec, int ranks, even_device_list *out) {
  size_t gpus = count_of(&on->all, EVEN_DEVICE_CUDA);
  if (spec != NULL) {
    return by_spec(on, spec, ranks, out);
  }
  if (ranks > 0) {
    return gpus >= (size_t)ranks ? first_of(on, "cuda:", (size_t)ranks, out) : by_count(on, (size_t)ranks, out);
  }
  return gpus > 0 ? first_of(on, "cuda:", gpus, out) : first_of(on, "numa:", on->context.topology.node_count, out);
}

/* Leaves the ranks on GPUs those of the near CPUs that no rank on a CPU owns, as long as one is left. */
static void keep_apart(even_device_list *list, const unsigned char *owned) {
  for (size_t i = 0; i < list->count; i++) {
    even_device *device = &list->items[i];
    size_t kept = 0;
    if (device->kind == EVEN_DEVICE_CPU) {
      continue;
    }
    for (size_t j = 0; j < device->cpu_count; j++) {
      kept += owned[device->cpus[j]] == 0;
    }
    if (kept == 0) {
      continue;
    }
    kept = 0;
    for (size_t j = 0; j < device->cpu_count; j++) {
      if (owned[device->cpus[j]] == 0) {
        device->cpus[kept++] = device->cpus[j];
      }
    }
    device->cpu_count = kept;
  }
}

static size_t cpu_numbers(const even_topology *topology) {
  int32_t most = 0;
  for (size_t i = 0; i < topology->cpu_count; i++) {
    most = topology->cpus[i] > most ? topology->cpus[i] : most;
  }
  return (size_t)most + 1;
}

/* Divides what the devices share among them: a core between its ranks, then the quota between all. */
static void divide(const selection *on, even_device_list *list, const double *users) {
  const even_topology *topology = &on->context.topology;
  double sum = 0;
  for (size_t i = 0; i < list->count; i++) {
    even_device *device = &list->items[i];
    device->cores = 0;
    for (size_t core = 0; core < topology->core_count; core++) {
      int32_t cpu = topology->cpus[topology->cores[core].first];
      for (size_t j = 0; j < device->cpu_count; j++) {
        device->cores += device->cpus[j] == cpu ? 1 / users[cpu] : 0;
      }
    }
    sum += device->cores;
  }
  for (size_t i = 0; i < list->count && sum > on->context.limits.cpu_cores; i++) {
    list->items[i].cores *= on->context.limits.cpu_cores / sum;
  }
}

static even_status cores_share(const selection *on, even_device_list *list) {
  size_t numbers = cpu_numbers(&on->context.topology);
  unsigned char *owned = NULL;
  double *users = NULL;
  even_status status = EVEN_NEW_ARRAY(&owned, numbers);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&users, numbers);
  }
  if (status == EVEN_OK) {
    for (size_t i = 0; i < list->count; i++) {
      for (size_t j = 0; j < list->items[i].cpu_count && list->items[i].kind == EVEN_DEVICE_CPU; j++) {
        owned[list->items[i].cpus[j]] = 1;
      }
    }
    keep_apart(list, owned);
    for (size_t i = 0; i < list->count; i++) {
      for (size_t j = 0; j < list->items[i].cpu_count; j++) {
        users[list->items[i].cpus[j]] += 1;
      }
    }
    divide(on, list, users);
  }
  even_free(owned);
  even_free(users);
  return status;
}

static even_status select_on(selection *on, const char *spec, int ranks, even_device_list *out) {
  EVEN_TRY(EVEN_NEW_ARRAY(&on->chosen, on->context.topology.core_count));
  EVEN_TRY(even_device_append_all(&on->context, &on->all));
  EVEN_TRY(devices_choose(on, spec, ranks, out));
  return cores_share(on, out);
}

even_status even_device_select_from(const even_device_source *source, const char *spec, int ranks,
                                    even_device_list *out) {
  selection on = {0};
  *out = (even_device_list){0};
  if (ranks < 0 || ranks > MOST_RANKS) {
    even_status wrong = even_fail(EVEN_ERR_ARGUMENT, "%d ranks are not possible", ranks);
    (void)even_error_fix("ask for 1 to %d ranks", MOST_RANKS);
    return wrong;
  }
  even_status status = even_device_context_read(source, &on.context);
  if (status == EVEN_OK) {
    status = select_on(&on, spec, ranks, out);
  }
  even_device_context_free(&on.context);
  even_device_list_free(&on.all);
  even_free(on.chosen);
  if (status != EVEN_OK) {
    even_device_list_free(out);
  }
  return status;
}

even_status even_device_select(const char *spec, int ranks, even_device_list *out) {
  return even_device_select_from(&even_device_source_host, spec, ranks, out);
}
