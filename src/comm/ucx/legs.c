/* What the way from each other host takes. Of each large call one exchange is measured in which nobody waits for a rank
 * that is late: the first, where all have met just before it, or, where the parts come as a host has them, the first in
 * which sums go back, for who begins that has something of everybody. Each sends to each directly, so what one receives
 * late is late by its own way. When a send is done says little: sockets take much at once. */
#include "comm/ucx/group.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 64 };
static const uint64_t TELL_NS = 1000000000u;
/* What had come before it was asked for took less than can be told. */
static const uint64_t LEAST_NS = 1000u;

/* Between calls. */
even_status even_ucx_tell_legs(even_comm *comm, even_telemetry *telemetry) {
  even_ucx_group *group = even_ucx_of(comm);
  even_ucx_legs *legs = &group->legs;
  legs->telemetry = NULL;
  if (telemetry == NULL || group->ranks < 2 || group->ranks > MOST_RANKS) {
    return EVEN_OK;
  }
  if (legs->each == NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&legs->each, (size_t)group->ranks));
  }
  legs->telemetry = telemetry;
  return EVEN_OK;
}

void even_ucx_legs_begin(even_ucx_group *group) {
  group->legs.measures = group->legs.telemetry != NULL;
}

bool even_ucx_legs_start(even_ucx_group *group) {
  bool measured = group->legs.measures;
  if (measured) {
    group->legs.measures = false; /* of the call no more than this */
    group->legs.began_ns = even_clock_ns();
  }
  return measured;
}

static void add(even_ucx_group *group, const even_ucx_transfer *transfer, uint64_t ns) {
  even_ucx_leg *leg = &group->legs.each[transfer->peer];
  uint64_t took = ns < LEAST_NS ? LEAST_NS : ns;
  leg->costs[leg->transfers % EVEN_UCX_LEG_COSTS] = (double)took / (double)transfer->bytes;
  leg->transfers++;
  leg->bytes += transfer->bytes;
}

void even_ucx_legs_watch(even_ucx_group *group, even_ucx_transfer *transfer, bool measured) {
  transfer->watched = measured && transfer->request != NULL;
  if (measured && !transfer->watched) {
    add(group, transfer, 0); /* it had come already */
  }
}

void even_ucx_legs_settled(even_ucx_group *group, const even_ucx_transfer *transfer) {
  add(group, transfer, even_clock_ns() - group->legs.began_ns);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median: one rank that was not let on its core for a while makes no link slow. */
static double usual_cost(even_ucx_leg *leg) {
  size_t count = leg->transfers < EVEN_UCX_LEG_COSTS ? leg->transfers : EVEN_UCX_LEG_COSTS;
  qsort(leg->costs, count, sizeof leg->costs[0], ascending);
  return leg->costs[count / 2];
}

static void tell(even_ucx_group *group, uint64_t now_ns) {
  uint32_t own = group->peers[group->rank].mark;
  for (int peer = 0; peer < group->ranks; peer++) {
    even_ucx_leg *leg = &group->legs.each[peer];
    if (group->peers[peer].mark == own || leg->transfers == 0) {
      continue;
    }
    const even_leg_record record = {.own = own,
                                    .peer = group->peers[peer].mark,
                                    .at_ns = now_ns,
                                    .transfers = leg->transfers,
                                    .bytes = leg->bytes,
                                    .ns = (uint64_t)(usual_cost(leg) * (double)leg->bytes)};
    even_telemetry_leg(group->legs.telemetry, &record);
  }
  memset(group->legs.each, 0, (size_t)group->ranks * sizeof *group->legs.each);
}

void even_ucx_legs_end(even_ucx_group *group) {
  even_ucx_legs *legs = &group->legs;
  if (legs->telemetry == NULL || legs->began_ns - legs->told_ns < TELL_NS) {
    return;
  }
  legs->told_ns = legs->began_ns;
  tell(group, legs->began_ns);
}
