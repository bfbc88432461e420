/* Draining a host: how many of its ranks each of the others gets, and which new hosts are started for them. */
#include "orchestrator/drain_plan.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/elastic.h"
#include "orchestrator/places.h"

#include <stdio.h>
#include <string.h>

enum { MOST_RANKS_A_HOST = 1024 };

size_t even_move_ranks_now(const even_job *job, const even_host_agent *agent) {
  return agent->index == 0 ? job->local : agent->count;
}

typedef struct target {
  const char *name;
  size_t ranks; /* 0: left open */
} target;

static even_status read_targets(const json_t *command, target *out, size_t *count) {
  const json_t *list = json_object_get(command, "to");
  *count = json_array_size(list);
  if (*count > EVEN_GUESTS_MOST) {
    return even_fail(EVEN_ERR_USAGE, "--to names more than %d hosts", EVEN_GUESTS_MOST);
  }
  for (size_t i = 0; i < *count; i++) {
    const json_t *item = json_array_get(list, i);
    json_int_t ranks = json_integer_value(json_object_get(item, "ranks"));
    out[i] = (target){.name = even_json_text(item, "host"), .ranks = (size_t)ranks};
    if (!even_hosts_is_name(out[i].name, strlen(out[i].name)) && strchr(out[i].name, '#') == NULL) {
      return even_fail(EVEN_ERR_USAGE, "--to: \"%.100s\" is not the name of a host", out[i].name);
    }
    if (ranks < 0 || ranks > MOST_RANKS_A_HOST) {
      return even_fail(EVEN_ERR_USAGE, "--to: host %.100s cannot take %lld ranks", out[i].name, (long long)ranks);
    }
    for (size_t k = 0; k < i; k++) {
      if (strcmp(out[k].name, out[i].name) == 0) {
        return even_fail(EVEN_ERR_USAGE, "--to names host %.100s twice", out[i].name);
      }
    }
  }
  return EVEN_OK;
}

static size_t places_of(const even_job *job, const even_host_agent *agent) {
  even_device_list own = {job->params->devices->items + job->first, job->local};
  return agent->index == 0 ? even_host_places(&own) : agent->places;
}

static const even_device *first_device(const even_job *job, const even_host_agent *agent) {
  if (agent->index == 0) {
    return job->local > 0 ? job->params->devices->items + job->first : NULL;
  }
  return agent->devices.count > 0 ? agent->devices.items : NULL;
}

/* Where one has GPUs and the other has none, a rank of the one is no rank of the other. */
static bool are_alike(const even_device *one, const even_device *other) {
  return one == NULL || other == NULL || one->kind == other->kind;
}

/* Hosts of the list as those who share know them; one that is about to go, or only votes, has no place. */
static void list_hosts(const even_job *job, const even_host_agent *from, even_places_host *out) {
  for (size_t i = 0; i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    out[i] = (even_places_host){.name = agent->name, .leaves = agent == from};
    if (agent == from) {
      out[i].ranks = even_move_ranks_now(job, agent);
    } else if (i == 0 || (even_elastic_stays(agent) && !agent->witness && !agent->lost)) {
      out[i].ranks = even_move_ranks_now(job, agent);
      out[i].places = are_alike(first_device(job, agent), first_device(job, from)) ? places_of(job, agent) : 0;
    }
  }
}

static even_status no_way(const even_job *job, const char *name) {
  if (strchr(name, '#') != NULL || job->hosts->params.shell == NULL) {
    (void)even_fail(EVEN_ERR_NOT_FOUND, "the job has no host %.100s, and reaches none by ssh", name);
    return even_error_fix("let it join first (evenstep run --max-ranks, evenstep join), or name one of the job's");
  }
  return EVEN_OK;
}

/* Marks those that are named, and adds those that are none of the job's: *count of them in all then. */
static even_status name_hosts(const even_job *job, const target *targets, size_t named, even_places_host *list,
                              size_t *count) {
  for (size_t k = 0; k < named; k++) {
    size_t at = 0;
    while (at < *count && strcmp(list[at].name, targets[k].name) != 0) {
      at++;
    }
    if (at == *count) {
      EVEN_TRY(no_way(job, targets[k].name));
      list[(*count)++] = (even_places_host){.name = targets[k].name};
    } else if (at > 0 && !list[at].leaves && (job->hosts->agents[at].lost || job->hosts->agents[at].leaves)) {
      return even_fail(EVEN_ERR_STATE, "host %s is about to leave the job itself", list[at].name);
    } else if (at > 0 && job->hosts->agents[at].witness) {
      return even_fail(EVEN_ERR_USAGE, "host %s only votes, and takes no ranks", list[at].name);
    }
    list[at].named = true;
    list[at].wish = targets[k].ranks;
  }
  return EVEN_OK;
}

/* With so few ranks the job could not go on. */
static even_status check_least(const even_job *job, const char *name, size_t left) {
  size_t least = job->hosts->params.least_ranks > 1 ? (size_t)job->hosts->params.least_ranks : 1;
  if (left >= least) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_STATE, "without host %s %zu rank%s would be left, and --min-ranks is %zu", name, left,
                  left == 1 ? "" : "s", least);
  return even_error_fix("name a host that takes its ranks (--to), or let another one join first: evenstep join");
}

static void tell_plan(even_job *job, const even_places_host *list, size_t count, size_t leave, size_t moved) {
  even_text to = EVEN_TEXT_EMPTY;
  even_elastic *elastic = job->hosts->elastic;
  char words[sizeof elastic->move.plan];
  for (size_t i = 0; i < count && to.length < 200; i++) {
    if (list[i].gets > 0) {
      even_text_format(&to, "%s%.60s (%zu)", to.length > 0 ? ", " : "", list[i].name, list[i].gets);
    }
  }
  if (moved == 0) {
    (void)snprintf(words, sizeof words,
                   "of host %.100s no rank moves: the others have no place left (--to HOST:N makes one)",
                   elastic->move.from);
  } else {
    (void)snprintf(words, sizeof words, "of host %.100s %zu of %zu rank%s move%s: to %.200s", elastic->move.from, moved,
                   leave, leave == 1 ? "" : "s", moved == 1 ? "s" : "", even_text_string(&to));
  }
  even_text_free(&to);
  even_job_notice(job, "%s", words);
  memcpy(elastic->move.plan, words, sizeof elastic->move.plan);
}

/* Of more ranks than a host has GPUs all would leave them (device.h). */
static even_status check_gpus(const even_job *job, const even_host_agent *agent, const even_places_host *host) {
  const even_device *device = first_device(job, agent);
  size_t gpus = places_of(job, agent);
  if (host->gets == 0 || device == NULL || device->kind != EVEN_DEVICE_CUDA || host->ranks + host->gets <= gpus) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_DEVICE, "host %s has %zu GPU%s, and would have %zu ranks", host->name, gpus,
                  gpus == 1 ? "" : "s", host->ranks + host->gets);
  return even_error_fix("give it fewer (--to HOST:N), or name another host");
}

/* What each is to have; new ones are started. */
static even_status take_plan(even_job *job, const even_places_host *list, size_t count) {
  even_hosts *hosts = job->hosts;
  for (size_t i = 0; i < hosts->count; i++) {
    EVEN_TRY(check_gpus(job, &hosts->agents[i], &list[i]));
  }
  for (size_t i = 0; i < hosts->count; i++) {
    hosts->agents[i].next.count = even_move_ranks_now(job, &hosts->agents[i]) + list[i].gets;
  }
  for (size_t i = hosts->count; i < count; i++) {
    if (list[i].gets == 0) {
      return even_fail(EVEN_ERR_USAGE, "no rank is left for host %s", list[i].name);
    }
    EVEN_TRY(even_guests_launch(hosts, list[i].name, list[i].gets));
  }
  return EVEN_OK;
}

even_status even_move_plan(even_job *job, even_host_agent *from, const json_t *command) {
  target targets[EVEN_GUESTS_MOST] = {{.name = ""}};
  even_places_host *list = NULL;
  size_t named = 0;
  size_t moved = 0;
  size_t count = job->hosts->count;
  bool stay = json_is_true(json_object_get(command, "stay"));
  EVEN_TRY(read_targets(command, targets, &named));
  EVEN_TRY(EVEN_NEW_ARRAY(&list, count + named));
  list_hosts(job, from, list);
  even_status status = name_hosts(job, targets, named, list, &count);
  if (status == EVEN_OK && from->index == 0 && count > job->hosts->count) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "host %s is none of the job's, and %s leads it", list[count - 1].name,
                    from->name);
    status = even_error_fix("name hosts of the job, or drain %s without --to, and then move ranks from the new leader",
                            from->name);
  }
  if (status == EVEN_OK && !stay) {
    status = even_places_share(list, count, &moved);
  }
  size_t leave = even_move_ranks_now(job, from);
  if (status == EVEN_OK) {
    status = check_least(job, from->name, even_elastic_ranks(job) + even_guests_ranks(job->hosts) - leave + moved);
  }
  if (status == EVEN_OK) {
    (void)snprintf(job->hosts->elastic->move.from, sizeof job->hosts->elastic->move.from, "%s", from->name);
    status = take_plan(job, list, count);
  }
  if (status == EVEN_OK && !stay) {
    tell_plan(job, list, count, leave, moved);
  }
  even_free(list);
  return status;
}
