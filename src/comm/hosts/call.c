/* The beginning and the end of a collective over several hosts, and who hears when a step of it fails. */
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
  if (even_hosts_leads(group)) {
    even_comm_set_timeout(group->between, seconds * 1.1 + 0.5);
  }
}

static void await_leader(even_hosts_group *group) {
  double seconds = (double)atomic_load_explicit(&group->timeout_ns, memory_order_relaxed) * 1e-9;
  even_comm_set_timeout(group->inside, seconds * 2.2 + 2);
}

even_status even_hosts_begin(even_hosts_group *group, const char *what) {
  if (atomic_flag_test_and_set_explicit(&group->busy, memory_order_acquire)) {
    (void)even_fail(EVEN_ERR_STATE, "two threads called %s of one group at the same time", what);
    return even_error_fix("let one thread at a time call into a group, or give each thread a group of its own");
  }
  group->doing = what;
  if (group->has_left) {
    return even_hosts_end(group, even_fail(EVEN_ERR_STATE, "rank %d has left the group", group->rank));
  }
  if (group->ended) {
    (void)even_fail(group->end.status, "the group is unusable since an earlier failure: %.480s", group->end.what);
    return even_hosts_end(group, even_error_fix("close the group and open a new one"));
  }
  set_limits(group);
  return EVEN_OK;
}

even_status even_hosts_end(even_hosts_group *group, even_status status) {
  if (status != EVEN_OK && !group->ended && !group->has_left) {
    group->ended = true;
    group->end = *even_error_last();
    /* Whoever is not in this call yet, or in a message, is to hear of it too. */
    even_comm_engine_of(group->inside)->end(group->inside, &group->end);
    if (even_hosts_leads(group)) {
      even_comm_engine_of(group->between)->end(group->between, &group->end);
    }
    if (group->everyone != NULL) {
      even_comm_engine_of(group->everyone)->end(group->everyone, &group->end);
    }
    (void)even_error_restore(&group->end);
  }
  atomic_flag_clear_explicit(&group->busy, memory_order_release);
  return status;
}

even_status even_hosts_inside(even_hosts_group *group, even_status status) {
  if (status == EVEN_OK) {
    return EVEN_OK;
  }
  int local = even_error_last()->rank;
  if (group->locals > 1 && status != EVEN_ERR_REVOKED) {
    (void)even_error_prefix("%s among the ranks of one host (local rank 0 is rank %d)", group->doing,
                            group->members[group->first[group->own_host]]);
  }
  if (local >= 0 && local < group->locals) {
    (void)even_error_place(group->members[group->first[group->own_host] + local], NULL);
  }
  return status;
}

even_status even_hosts_agree(even_hosts_group *group, even_status status) {
  verdict word = {.rank = -1};
  if (even_hosts_leads(group) && status != EVEN_OK) {
    const even_error *why = even_error_last();
    word.status = (int32_t)status;
    word.rank = why->rank;
    (void)snprintf(word.what, sizeof word.what, "%.*s", (int)sizeof word.what - 1, why->what);
    (void)snprintf(word.fix, sizeof word.fix, "%.*s", (int)sizeof word.fix - 1, why->fix);
  }
  if (group->locals > 1) {
    await_leader(group);
    even_status heard = even_hosts_inside(group, even_comm_broadcast(group->inside, &word, sizeof word, 0));
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
    EVEN_TRY(even_alloc(1, bytes, (void **)&group->scratch));
    group->scratch_bytes = bytes;
  }
  return EVEN_OK;
}
