/* How a group over several hosts ends: what ends one of its parts ends all, with the same words everywhere. */
#include "comm/hosts/group.h"

#include "base/fail.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* How long a failing call waits for what ranks of other hosts reached. */
#define REPORTS_NS ((uint64_t)60 * 1000000u)
#define PAUSE_NS ((uint64_t)1000000u)
/* Between looks of one who leaves; of several groups none can be slept on for all. */
#define LEAVING_PAUSE_NS ((uint64_t)200000u)

void even_hosts_tell(even_hosts_group *group, const even_error *why) {
  (void)pthread_mutex_lock(&group->ending);
  bool first = !group->ended;
  if (first) {
    group->end = *why;
    group->ended = true;
  }
  (void)pthread_mutex_unlock(&group->ending);
  even_comm *part = NULL;
  for (int at = 0; first && (part = even_hosts_part(group, &at)) != NULL; at++) {
    even_comm_engine_of(part)->end(part, why);
  }
}

static bool is_over(const even_hosts_group *group) {
  return even_comm_is_over((const even_comm *)(const void *)group);
}

/* Why one of the parts has ended; whether one has. */
static bool find_end(const even_hosts_group *group, even_error *why) {
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    const even_comm_engine *engine = even_comm_engine_of(part);
    if (engine->has_ended(part)) {
      engine->why(part, why);
      return true;
    }
  }
  return false;
}

void even_hosts_tell_failure(even_hosts_group *group) {
  even_error why = *even_error_last();
  (void)find_end(group, &why);
  even_hosts_tell(group, &why);
}

/* ---- a mismatch ---- */

/* A rank and what it has called as number `number` of the group. */
typedef struct made_call {
  int rank; /* -1: none */
  even_comm_call call;
} made_call;

/* The first rank that has called something else than `one` as number `number`, as far as is known. */
static made_call find_different(const even_hosts_group *group, const made_call *one, uint64_t number) {
  made_call other = {.rank = 0};
  for (; other.rank < group->ranks; other.rank++) {
    if (other.rank != one->rank && even_flight_call_of(&group->flight, other.rank, number, &other.call) &&
        even_call_differs(&one->call, &other.call)) {
      return other;
    }
  }
  return (made_call){.rank = -1};
}

/* The first rank that is known to have made call `number`. */
static made_call find_first(const even_hosts_group *group, uint64_t number) {
  made_call first = {.rank = 0};
  for (; first.rank < group->ranks; first.rank++) {
    if (even_flight_call_of(&group->flight, first.rank, number, &first.call)) {
      return first;
    }
  }
  return (made_call){.rank = -1};
}

static even_status name_both(const even_hosts_group *group, const made_call *one, const made_call *another,
                             uint64_t number) {
  char own[128];
  char other[128];
  char own_site[EVEN_FLIGHT_SITE_BYTES];
  char other_site[EVEN_FLIGHT_SITE_BYTES];
  even_call_describe(&one->call, own, sizeof own);
  even_call_describe(&another->call, other, sizeof other);
  even_flight_site_of(&group->flight, one->rank, number, own_site, sizeof own_site);
  even_flight_site_of(&group->flight, another->rank, number, other_site, sizeof other_site);
  (void)even_fail(EVEN_ERR_MISMATCH, "rank %d called %s%s, but rank %d called %s%s (call %llu of the group)", one->rank,
                  own, own_site, another->rank, other, other_site, (unsigned long long)number);
  (void)even_error_place(another->rank, NULL);
  return even_error_fix(EVEN_CALL_DIFFERS_FIX);
}

/* What keeps two ranks apart may be that they wait in different parts: the parts themselves see nothing of it. */
static void look_for_mismatch(even_hosts_group *group) {
  even_flight_call last;
  made_call own = {.rank = group->rank};
  if (even_flight_calls(&group->flight, group->rank, &last, 1) != 1 || last.state != EVEN_FLIGHT_BEGUN ||
      !even_flight_call_of(&group->flight, group->rank, last.number, &own.call)) {
    return;
  }
  made_call other = find_different(group, &own, last.number);
  if (other.rank >= 0) {
    (void)name_both(group, &own, &other, last.number);
    const even_error why = *even_error_last();
    even_hosts_tell(group, &why);
  }
}

void even_hosts_follow(even_hosts_group *group) {
  even_error why = {.status = EVEN_ERR_REVOKED, .rank = -1, .what = "the group was revoked"};
  if (!group->ended && (find_end(group, &why) || is_over(group))) {
    even_hosts_tell(group, &why);
  }
}

bool even_hosts_refused(even_comm *comm, bool waits) {
  even_comm *everyone = even_hosts_of(comm)->everyone;
  return everyone != NULL && even_comm_engine_of(everyone)->refused != NULL &&
         even_comm_engine_of(everyone)->refused(everyone, waits);
}

/* Who is in a collective, waiting: whoever was sent what does not fit may never come to it. */
static void end_for_refusal(even_hosts_group *group) {
  even_flight_call last;
  bool within = even_flight_calls(&group->flight, group->rank, &last, 1) == 1 && last.state == EVEN_FLIGHT_BEGUN;
  if (within && even_hosts_refused((even_comm *)(void *)group, true)) {
    const even_error why = *even_error_last();
    even_hosts_tell(group, &why);
  }
}

void even_hosts_look(void *context) {
  even_hosts_group *group = context;
  if (!group->has_left) {
    even_hosts_follow(group);
  }
  if (!group->has_left && !group->ended) {
    end_for_refusal(group);
    look_for_mismatch(group);
  }
}

/* ---- the failure of a call ---- */

static bool is_far(const even_hosts_group *group, int rank) {
  return rank != group->rank && !even_board_has(&group->board, rank);
}

static bool all_have_reported(const even_hosts_group *group, const even_error *why) {
  for (int rank = 0; rank < group->ranks; rank++) {
    if (is_far(group, rank) && !even_flight_is_last(&group->flight, rank) &&
        !(why->status == EVEN_ERR_PEER_LOST && why->rank == rank)) {
      return false;
    }
  }
  return true;
}

/* Names both sides of the mismatch that ended the group at call `number`, once they have said where they made it; false
 * where nothing but divisions differs. `own`: this rank's call; NULL: it has come too late to make it. */
static bool name_mismatch(const even_hosts_group *group, const even_error *why, const made_call *own, uint64_t number) {
  uint64_t began = even_clock_ns();
  for (;;) {
    bool all = all_have_reported(group, why);
    bool late = even_clock_ns() - began >= EVEN_FLIGHT_PATIENCE_NS;
    made_call one = own != NULL ? *own : find_first(group, number);
    made_call other = one.rank < 0 ? one : find_different(group, &one, number);
    bool said = other.rank >= 0 && even_flight_has_said(&group->flight, other.rank, number) &&
                (own != NULL || even_flight_has_said(&group->flight, one.rank, number));
    if (said || late || (other.rank < 0 && all)) {
      return other.rank >= 0 && name_both(group, &one, &other, number) != EVEN_OK;
    }
    even_clock_sleep_ns(PAUSE_NS);
  }
}

static void await_reports(const even_hosts_group *group, const even_error *why) {
  uint64_t began = even_clock_ns();
  while (!is_over(group) && !all_have_reported(group, why) && even_clock_ns() - began < REPORTS_NS) {
    even_clock_sleep_ns(PAUSE_NS);
  }
}

static void tell_reached(const even_hosts_group *group) {
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    if (even_comm_engine_of(part)->tell != NULL) {
      even_comm_engine_of(part)->tell(part);
    }
  }
}

even_status even_hosts_failure(even_hosts_group *group) {
  even_error why;
  char doing[128];
  char reached[EVEN_FLIGHT_REACHED];
  even_hosts_tell_failure(group);
  (void)pthread_mutex_lock(&group->ending);
  why = group->end;
  (void)pthread_mutex_unlock(&group->ending);
  if (even_hosts_refused((even_comm *)(void *)group, false)) {
    why = *even_error_last(); /* whoever refused a message of this rank may be gone for that */
  }
  even_flight_say(&group->flight);
  tell_reached(group);
  const made_call own = {.rank = group->rank, .call = group->call};
  if (why.status == EVEN_ERR_MISMATCH && name_mismatch(group, &why, &own, group->call_count)) {
    return EVEN_ERR_MISMATCH;
  }
  await_reports(group, &why);
  even_call_describe(&group->call, doing, sizeof doing);
  even_flight_reached(&group->flight, reached, sizeof reached);
  (void)even_fail(why.status, "%.480s; rank %d was in %s%s", why.what, group->rank, doing, reached);
  (void)even_error_place(why.rank, NULL);
  return why.fix[0] == '\0' ? why.status : even_error_fix("%s", why.fix);
}

even_status even_hosts_ended(const even_hosts_group *group) {
  bool named = group->end.status == EVEN_ERR_MISMATCH && name_mismatch(group, &group->end, NULL, group->call_count + 1);
  return named ? EVEN_ERR_MISMATCH : even_error_restore(&group->end);
}

/* ---- leaving ---- */

void even_hosts_leave_parts(even_hosts_group *group) {
  even_comm *staying[EVEN_COMM_LANES + 2];
  int count = 0;
  even_comm *part = NULL;
  for (int at = 0; (part = even_hosts_part(group, &at)) != NULL; at++) {
    if (even_comm_engine_of(part)->leave_begin == NULL) {
      even_comm_leave(part);
    } else if (even_comm_engine_of(part)->leave_begin(part)) {
      staying[count++] = part;
    }
  }
  uint64_t began = even_clock_ns();
  while (count > 0) {
    bool moved = false;
    int still = 0;
    for (int i = 0; i < count; i++) {
      if (even_comm_engine_of(staying[i])->leave_stays(staying[i], even_clock_ns() - began, &moved)) {
        staying[still++] = staying[i];
      }
    }
    count = still;
    if (count > 0 && !moved) {
      even_clock_sleep_ns(LEAVING_PAUSE_NS);
    }
  }
}
