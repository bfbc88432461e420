/* The beginning and the end of a collective over several hosts, and its limits. */
#include "comm/called.h"
#include "comm/hosts/group.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <stdio.h>
#include <string.h>

/* What a leader tells its host's ranks of its step between the hosts. */
typedef struct verdict {
  int32_t status;
  int32_t rank;
  char what[480];
  char fix[256];
} verdict;

/* The ranks of a host wait for its leader while that one waits for other hosts, and these wait while a host waits for
 * one of its ranks: whoever is nearer to the cause has to find it first, so that its limit is the shortest. */
static void set_limits(even_hosts_group *group) {
  double seconds = (double)atomic_load_explicit(&group->timeout_ns, memory_order_relaxed) * 1e-9;
  even_comm_set_timeout(group->inside, seconds);
  for (int lane = 0; lane < group->lanes; lane++) {
    if (group->lane[lane] != NULL) {
      even_comm_set_timeout(group->lane[lane], seconds * 1.1 + 0.5);
    }
  }
}

void even_hosts_await_others(even_hosts_group *group) {
  double seconds = (double)atomic_load_explicit(&group->timeout_ns, memory_order_relaxed) * 1e-9;
  even_comm_set_timeout(group->inside, seconds * 2.2 + 2);
}

static even_status check_open(even_hosts_group *group) {
  if (group->has_left) {
    return even_fail(EVEN_ERR_STATE, "rank %d has left the group", group->rank);
  }
  even_hosts_follow(group);
  if (group->ended && group->refuses) {
    (void)even_fail(group->end.status, "the group is unusable since an earlier failure: %.480s", group->end.what);
    return even_error_fix("close the group and open a new one");
  }
  return group->ended ? even_hosts_ended(group) : EVEN_OK;
}

even_status even_hosts_begin(even_hosts_group *group, even_call_kind kind, uint32_t dtype, uint32_t op, int root,
                             size_t count) {
  if (atomic_flag_test_and_set_explicit(&group->busy, memory_order_acquire)) {
    (void)even_fail(EVEN_ERR_STATE, "two threads called into one group at the same time");
    return even_error_fix("let one thread at a time call into a group, or give each thread a group of its own");
  }
  group->call = (even_comm_call){.kind = kind, .dtype = dtype, .op = op, .root = root, .count = count};
  even_called_take((const even_comm_base *)(const void *)group, &group->call);
  even_status status = check_open(group);
  if (status != EVEN_OK) {
    group->refuses = group->ended;
    atomic_flag_clear_explicit(&group->busy, memory_order_release);
    return status;
  }
  even_flight_begin(&group->flight, &group->call, ++group->call_count);
  set_limits(group);
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    even_called_pass_on(&group->call, part);
  }
  return EVEN_OK;
}

even_status even_hosts_end(even_hosts_group *group, even_status status) {
  if (status != EVEN_OK && !group->has_left) {
    status = even_hosts_failure(group);
    group->refuses = true;
  }
  even_flight_end(&group->flight, status);
  atomic_flag_clear_explicit(&group->busy, memory_order_release);
  return status;
}

even_status even_hosts_agree(even_hosts_group *group, even_status status) {
  verdict word = {.rank = -1};
  if (even_hosts_leads(group) && status != EVEN_OK) {
    even_error why = *even_error_last();
    if (even_comm_engine_of(group->between)->has_ended(group->between)) {
      even_comm_engine_of(group->between)->why(group->between, &why);
    }
    word.status = (int32_t)status;
    word.rank = why.rank;
    (void)snprintf(word.what, sizeof word.what, "%.*s", (int)sizeof word.what - 1, why.what);
    (void)snprintf(word.fix, sizeof word.fix, "%.*s", (int)sizeof word.fix - 1, why.fix);
  }
  if (group->locals > 1) {
    even_hosts_await_others(group);
    even_status heard = even_comm_broadcast(group->inside, &word, sizeof word, 0);
    /* What was heard here names the cause where the hosts' own end was only made to follow it. */
    if (heard != EVEN_OK && (status == EVEN_OK || status == EVEN_ERR_REVOKED)) {
      return heard;
    }
  }
  if (word.status == EVEN_OK) {
    return EVEN_OK;
  }
  (void)even_fail((even_status)word.status, "%s", word.what);
  (void)even_error_place(word.rank, NULL);
  return word.fix[0] == '\0' ? (even_status)word.status : even_error_fix("%s", word.fix);
}

even_status even_hosts_scratch(even_hosts_group *group, size_t bytes) {
  if (bytes > group->scratch_bytes) {
    even_free(group->scratch);
    group->scratch = NULL;
    group->scratch_bytes = 0;
    EVEN_TRY(even_realloc((void **)&group->scratch, bytes, 1)); /* and not even_alloc, which would touch all of it */
    group->scratch_bytes = bytes;
  }
  return EVEN_OK;
}
