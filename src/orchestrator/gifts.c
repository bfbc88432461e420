/* Who gives the state of training to which hosts, its parcels, and where they come to. */
#include "orchestrator/gifts.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/shared_memory.h"
#include "os/thread.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* So long a memory that cannot be opened is tried again: its owner may have ended, which makes another generation. */
static const uint64_t OPENING_NS = 5000000000u;
/* So long a rank that shall give is looked at often. */
static const uint64_t GIVING_NS = 60000000000u;

/* To one host. */
typedef struct gift_way {
  bool wanted;
  bool offered;
  bool failed; /* why: */
  bool told;
  char why[EVEN_GENERATION_WORDS];
} gift_way;

struct even_gifts {
  even_job *job;
  uint32_t number; /* the generation that the rest is of */
  uint64_t since_ns;
  int giver;    /* -1: nobody gives to another host */
  gift_way *to; /* each host */
  bool over;    /* all newcomers of those hosts have taken it */
  unsigned changes;
  int fd; /* what came to this host; -1: nothing */
};

/* ---- parcels ---- */

static even_parcels *parcels_of(const even_job *job) {
  return job->hosts != NULL ? job->hosts->parcels : job->parcels;
}

/* Of which attempt, and of which generation in it. */
static uint64_t number_of(const even_gifts *gifts) {
  return (uint64_t)gifts->job->attempt << 32 | gifts->number;
}

static void let_go(even_gifts *gifts) {
  even_pipe_close(gifts->fd);
  gifts->fd = -1;
}

static bool wants_it_here(const even_gifts *gifts, const even_parcel *parcel) {
  const even_job *job = gifts->job;
  return parcel->number == number_of(gifts) && gifts->number == even_generation_number(job->generation) &&
         gifts->giver >= 0 && gifts->to[job->number].wanted && gifts->fd < 0;
}

static even_status on_offered(void *context, const even_parcel *parcel, int *fd) {
  const even_gifts *gifts = context;
  (void)fd; /* a memory file */
  return wants_it_here(gifts, parcel)
             ? EVEN_OK
             : even_fail(EVEN_ERR_STATE, "nobody waits here for the state of training of generation %u any more",
                         (unsigned)(parcel->number & UINT32_MAX));
}

static even_status on_arrived(void *context, const even_parcel *parcel, int fd) {
  even_gifts *gifts = context;
  if (!wants_it_here(gifts, parcel)) {
    even_pipe_close(fd);
    return even_fail(EVEN_ERR_STATE, "it comes too late");
  }
  gifts->fd = fd;
  even_generation_bring(gifts->job->generation, gifts->number, (uint32_t)even_own_process(), fd);
  return EVEN_OK;
}

static void fail_here(even_gifts *gifts, const char *why) {
  if (gifts->fd < 0) {
    even_generation_fail_bringing(gifts->job->generation, gifts->number, why);
  }
}

static void on_failed(void *context, const even_parcel *parcel, const even_error *why) {
  even_gifts *gifts = context;
  if (wants_it_here(gifts, parcel)) {
    fail_here(gifts, why->what);
  }
}

/* Of this host's own way to another one. */
static void fail_way(even_gifts *gifts, size_t host, const char *why) {
  gift_way *way = &gifts->to[host];
  if (!way->failed) {
    way->failed = true;
    (void)snprintf(way->why, sizeof way->why, "%.190s", why);
    gifts->changes++;
    if ((int)host == gifts->job->number) {
      fail_here(gifts, way->why);
    }
    if (gifts->job->follower == NULL) {
      const even_host_agent *agents = gifts->job->hosts->agents;
      even_job_notice(gifts->job, "host %s does not get the state of the training that rank %d on host %s gives: %s",
                      agents[host].name, gifts->giver,
                      agents[even_job_host_number(gifts->job, (size_t)gifts->giver)].name, way->why);
    }
  }
}

/* It came there, or the host there knows why not: but it may have been refused before anybody looked at it. */
static void on_done(void *context, const even_parcel *parcel, const even_error *why) {
  even_gifts *gifts = context;
  if (why != NULL && parcel->number == number_of(gifts) &&
      gifts->number == even_generation_number(gifts->job->generation)) {
    fail_way(gifts, (size_t)parcel->to, why->what);
  }
}

/* ---- opening ---- */

even_status even_gifts_open(even_job *job) {
  if (job->most_groups < 2 || !even_job_takes_in(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&job->gifts));
  *job->gifts = (even_gifts){.job = job, .giver = -1, .fd = -1};
  return EVEN_NEW_ARRAY(&job->gifts->to, (size_t)job->most_groups);
}

void even_gifts_close(even_job *job) {
  if (job->gifts != NULL) {
    even_parcels_withdraw(parcels_of(job), EVEN_GIFT_PARCEL);
    let_go(job->gifts);
    even_free(job->gifts->to);
    even_free(job->gifts);
  }
  job->gifts = NULL;
}

static void begin_anew(even_gifts *gifts, uint32_t number) {
  let_go(gifts);
  memset(gifts->to, 0, (size_t)gifts->job->most_groups * sizeof *gifts->to);
  gifts->number = number;
  gifts->since_ns = even_clock_ns();
  gifts->giver = -1;
  gifts->over = false;
}

even_status even_gifts_begin(even_job *job) {
  if (job->gifts == NULL) {
    return EVEN_OK;
  }
  const even_parcel_calls calls = {
      .context = job->gifts, .offered = on_offered, .arrived = on_arrived, .failed = on_failed};
  begin_anew(job->gifts, 0);
  even_parcels *parcels = parcels_of(job);
  return parcels == NULL ? EVEN_OK : even_parcels_expect(parcels, EVEN_GIFT_PARCEL, &calls);
}

/* ---- the leader's plan ---- */

/* Of a host: whether a member there waits for the state, and none has it. */
static bool needs_it(even_job *job, size_t host) {
  bool newcomer = false;
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_host_number(job, i) != host || !job->ranks[i].alive || even_job_is_outside(job, i)) {
      continue;
    }
    if (even_job_has_state(job, i)) {
      return false;
    }
    newcomer = true;
  }
  return newcomer;
}

/* One of this host, from where the way to others is shortest. -1: nobody has it. */
static int choose_giver(even_job *job) {
  int giver = -1;
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_has_state(job, i)) {
      bool here = even_job_host_number(job, i) == 0;
      giver = here || giver < 0 ? (int)i : giver;
      if (here) {
        break;
      }
    }
  }
  return giver;
}

void even_gifts_plan(even_job *job) {
  even_gifts *gifts = job->gifts;
  bool any = false;
  if (gifts == NULL) {
    return;
  }
  begin_anew(gifts, even_generation_number(job->generation) + 1);
  for (size_t host = 0; host < (size_t)job->most_groups; host++) {
    gifts->to[host].wanted = needs_it(job, host);
    any = any || gifts->to[host].wanted;
  }
  gifts->giver = any ? choose_giver(job) : -1;
  if (gifts->giver >= 0 && !job->ranks[gifts->giver].elsewhere) {
    even_generation_ask_away(job->generation, gifts->giver, gifts->number);
  }
}

/* ---- messages ---- */

unsigned even_gifts_changes(const even_job *job) {
  return job->gifts == NULL ? 0 : job->gifts->changes;
}

static void write_failures(const even_gifts *gifts, even_json *json) {
  even_json_array(json, "ungiven");
  for (int host = 0; host < gifts->job->most_groups; host++) {
    if (gifts->to[host].failed) {
      even_json_object(json, NULL);
      even_json_integer(json, "host", host);
      even_json_string(json, "why", gifts->to[host].why);
      even_json_object_end(json);
    }
  }
  even_json_array_end(json);
}

void even_gifts_write(const even_job *job, uint32_t number, even_json *json) {
  const even_gifts *gifts = job->gifts;
  if (gifts == NULL || gifts->giver < 0 || gifts->number != number) {
    return;
  }
  even_json_integer(json, "giver", gifts->giver);
  even_json_array(json, "gives_to");
  for (int host = 0; host < job->most_groups; host++) {
    if (gifts->to[host].wanted) {
      even_json_integer(json, NULL, host);
    }
  }
  even_json_array_end(json);
  even_json_bool(json, "gift_over", gifts->over);
  write_failures(gifts, json);
}

static even_status read_host(const even_job *job, const json_t *value, size_t *host) {
  json_int_t number = json_integer_value(value);
  if (!json_is_integer(value) || number < 0 || number >= job->most_groups) {
    return even_fail(EVEN_ERR_INPUT, "the state of training for a host that the job has not");
  }
  *host = (size_t)number;
  return EVEN_OK;
}

static even_status read_plan(even_gifts *gifts, const json_t *content) {
  const json_t *giver = json_object_get(content, "giver");
  json_int_t rank = json_integer_value(giver);
  size_t at = 0;
  json_t *one = NULL;
  if (giver == NULL) {
    return EVEN_OK;
  }
  if (!json_is_integer(giver) || rank < 0 || rank >= (json_int_t)gifts->job->count) {
    return even_fail(EVEN_ERR_INPUT, "the state of training of a rank that the job has not");
  }
  json_array_foreach(json_object_get(content, "gives_to"), at, one) {
    size_t host = 0;
    EVEN_TRY(read_host(gifts->job, one, &host));
    gifts->to[host].wanted = true;
  }
  gifts->giver = (int)rank;
  if (!gifts->job->ranks[rank].elsewhere) {
    even_generation_ask_away(gifts->job->generation, (int)rank, gifts->number);
  }
  return EVEN_OK;
}

even_status even_gifts_read(even_job *job, uint32_t number, const json_t *content) {
  even_gifts *gifts = job->gifts;
  size_t at = 0;
  json_t *one = NULL;
  if (gifts == NULL || number < gifts->number) {
    return EVEN_OK;
  }
  if (number > gifts->number) {
    begin_anew(gifts, number);
    EVEN_TRY(read_plan(gifts, content));
  }
  gifts->over = gifts->over || json_is_true(json_object_get(content, "gift_over"));
  json_array_foreach(json_object_get(content, "ungiven"), at, one) {
    size_t host = 0;
    EVEN_TRY(read_host(job, json_object_get(one, "host"), &host));
    if ((int)host == job->number) {
      fail_here(gifts, even_json_text(one, "why"));
    }
  }
  return EVEN_OK;
}

bool even_gifts_any_failed(const even_job *job) {
  const even_gifts *gifts = job->gifts;
  for (int host = 0; gifts != NULL && host < job->most_groups; host++) {
    if (gifts->to[host].failed && !gifts->to[host].told) {
      return true;
    }
  }
  return false;
}

void even_gifts_report(even_job *job, even_json *json) {
  even_gifts *gifts = job->gifts;
  if (!even_gifts_any_failed(job)) {
    return;
  }
  even_json_integer(json, "gift", gifts->number);
  write_failures(gifts, json);
  for (int host = 0; host < job->most_groups; host++) {
    gifts->to[host].told = gifts->to[host].failed;
  }
}

even_status even_gifts_take_report(even_job *job, const even_host_agent *agent, const json_t *content) {
  even_gifts *gifts = job->gifts;
  const json_t *number = json_object_get(content, "gift");
  size_t at = 0;
  json_t *one = NULL;
  if (gifts == NULL || !json_is_integer(number) || json_integer_value(number) != (json_int_t)gifts->number ||
      gifts->giver < 0 || even_job_host_number(job, (size_t)gifts->giver) != agent->index) {
    return EVEN_OK; /* of one that is over */
  }
  json_array_foreach(json_object_get(content, "ungiven"), at, one) {
    size_t host = 0;
    EVEN_TRY(read_host(job, json_object_get(one, "host"), &host));
    fail_way(gifts, host, even_json_text(one, "why"));
  }
  return EVEN_OK;
}

/* ---- on its way ---- */

static bool gives_here(const even_gifts *gifts) {
  return gifts->giver >= 0 && !gifts->job->ranks[gifts->giver].elsewhere;
}

/* Whether there is a host to which nothing was offered yet. */
static bool is_due(const even_gifts *gifts) {
  for (int host = 0; host < gifts->job->most_groups; host++) {
    const gift_way *way = &gifts->to[host];
    if (way->wanted && !way->offered && !way->failed) {
      return true;
    }
  }
  return false;
}

bool even_gifts_await(const even_job *job) {
  const even_gifts *gifts = job->gifts;
  return gifts != NULL && gives_here(gifts) && job->ranks[gifts->giver].alive && is_due(gifts) &&
         even_clock_ns() - gifts->since_ns < GIVING_NS;
}

/* A descriptor of its own for each parcel. */
static even_status offer(even_gifts *gifts, size_t host, uint32_t process, int fd) {
  even_shared_memory memory;
  EVEN_TRY(even_shared_memory_open_peer((pid_t)process, fd, &memory));
  uint64_t bytes = memory.bytes;
  int own = memory.fd;
  memory.fd = -1;
  even_shared_memory_close(&memory);
  gifts->to[host].offered = true;
  return even_parcels_offer(parcels_of(gifts->job), (int)host, EVEN_GIFT_PARCEL, number_of(gifts), own, bytes, on_done,
                            gifts);
}

/* The rank that shall give it has said why it cannot. */
static void fail_ungiven(even_gifts *gifts) {
  char why[EVEN_GENERATION_WORDS];
  bool known = even_generation_ungiven(gifts->job->generation, gifts->number, why);
  for (size_t host = 0; known && host < (size_t)gifts->job->most_groups; host++) {
    if (gifts->to[host].wanted && !gifts->to[host].offered) {
      fail_way(gifts, host, why);
    }
  }
}

static void send_all(even_gifts *gifts) {
  uint32_t process = 0;
  int fd = -1;
  const even_job *job = gifts->job;
  if (!gives_here(gifts) || !is_due(gifts)) {
    return;
  }
  if (!even_generation_gift(job->generation, gifts->giver, gifts->number, &process, &fd)) {
    fail_ungiven(gifts);
    return;
  }
  for (size_t host = 0; host < (size_t)job->most_groups; host++) {
    gift_way *way = &gifts->to[host];
    if (!way->wanted || way->offered || way->failed || offer(gifts, host, process, fd) == EVEN_OK) {
      continue;
    }
    if (way->offered || even_clock_ns() - gifts->since_ns > OPENING_NS) {
      fail_way(gifts, host, even_error_last()->what);
    }
    even_error_clear();
  }
}

/* One that made a step since has it, of whichever generation. */
static bool took(const even_gifts *gifts, size_t rank) {
  return even_generation_took(gifts->job->generation, (int)rank, gifts->number) ||
         gifts->job->progress.ranks[rank].stepped;
}

/* Whether the newcomers to whom it went, those of this host or all, have taken it. */
static bool all_took(even_gifts *gifts, bool here_alone) {
  even_job *job = gifts->job;
  even_progress_read(&job->progress);
  for (size_t i = 0; i < job->count; i++) {
    bool counts = here_alone ? !job->ranks[i].elsewhere : gifts->to[even_job_host_number(job, i)].wanted;
    if (counts && job->ranks[i].alive && even_generation_has(job->generation, (int)i, gifts->number) &&
        !took(gifts, i)) {
      return false;
    }
  }
  return true;
}

void even_gifts_turn(even_job *job) {
  even_gifts *gifts = job->gifts;
  if (gifts == NULL || job->generation == NULL) {
    return;
  }
  if (gifts->number != even_generation_number(job->generation)) {
    begin_anew(gifts, even_generation_number(job->generation));
  }
  if (gifts->giver < 0) {
    return;
  }
  send_all(gifts);
  if (gifts->fd >= 0 && all_took(gifts, true)) {
    let_go(gifts);
  }
  if (job->follower == NULL && !gifts->over && all_took(gifts, false)) {
    gifts->over = true;
    gifts->changes++;
  }
}

bool even_gifts_travel(const even_job *job) {
  const even_gifts *gifts = job->gifts;
  return gifts != NULL && gifts->giver >= 0 && !gifts->over && gifts->number == even_generation_number(job->generation);
}

bool even_gifts_hold_up(const even_job *job) {
  const even_gifts *gifts = job->gifts;
  return even_gifts_travel(job) &&
         !(gives_here(gifts) && is_due(gifts) && even_clock_ns() - gifts->since_ns >= GIVING_NS);
}

/* The generation in which a member joined; 0: it was there from the start, or is as old as anybody knows. */
static uint32_t joined_in(const even_job *job, int rank) {
  uint32_t newest = even_generation_number(job->generation);
  uint32_t number = newest;
  while (number > 0 && newest - number < EVEN_GENERATIONS_KEPT - 1 &&
         even_generation_has(job->generation, rank, number - 1)) {
    number--;
  }
  return newest - number < EVEN_GENERATIONS_KEPT - 1 ? number : 0;
}

bool even_gifts_any_lacks(const even_job *job) {
  for (size_t i = 0; job->generation != NULL && i < job->count; i++) {
    uint32_t joined = even_job_is_here(job, i) ? joined_in(job, (int)i) : 0;
    if (job->ranks[i].alive && joined > 0 &&
        even_generation_has(job->generation, (int)i, even_generation_number(job->generation)) &&
        !even_generation_took(job->generation, (int)i, joined)) {
      return true;
    }
  }
  return false;
}
