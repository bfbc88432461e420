/* Which way a large collective over several hosts goes: in turns, overlapped through the hosts' first ranks, or over
 * several lanes; by what each costs. All ranks know of the same trials; what one of them has decided is what rank 0
 * found. */
#include "comm/hosts/group.h"

#include "base/fail.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

static const char *const way_names[] = {"lanes", "overlap", "turns", "direct"};
#define TURNS 2 /* in way_names */

static const char *const collectives[EVEN_HOSTS_CALLS] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"};

/* What is cut by ranks, and broadcasts, have a choice from here on; begun in turns where they are small, for what goes
 * over the lanes goes by way of a thread. Small all-reduces have theirs between the hosts. */
#define CHOICE_BYTES ((size_t)64 << 10)

static size_t least_of(even_hosts_call call) {
  return call == EVEN_HOSTS_ALL_REDUCE ? EVEN_HOSTS_STREAM_BYTES : CHOICE_BYTES;
}

void even_hosts_start_ways(even_hosts_group *group) {
  int first = group->lanes > 1 ? 0 : 1;
  for (int call = 0; call < EVEN_HOSTS_CALLS; call++) {
    /* What is cut by ranks is cut by hosts, too, only where the ranks of a host are neighbours. */
    bool cut = call == EVEN_HOSTS_REDUCE_SCATTER || call == EVEN_HOSTS_ALL_GATHER;
    bool chooses = group->hosts > 1 && (group->in_order || !cut);
    int from = chooses ? first : TURNS;
    /* Between all ranks, as if each were a host of its own: of what forms no sums, whose bits this would change. */
    int direct = group->everyone != NULL && (call == EVEN_HOSTS_ALL_GATHER || call == EVEN_HOSTS_BROADCAST) ? 1 : 0;
    even_ways_start(&group->ways[call], collectives[call], &way_names[from], TURNS + 1 + direct - from);
    even_ways_set_range(&group->ways[call], least_of((even_hosts_call)call), (size_t)1 << 30);
    even_ways_begin_small(&group->ways[call], EVEN_HOSTS_STREAM_BYTES, TURNS - from);
  }
}

void even_hosts_end_ways(even_hosts_group *group) {
  for (int call = 0; call < EVEN_HOSTS_CALLS; call++) {
    even_ways_end(&group->ways[call]);
  }
}

/* Who comes out well knows that all have come, as going on without lost ranks needs (src/fault/agree.h): its host's
 * first rank has told it that the hosts' first ranks have met, to which each of these came out of its own host's
 * barrier, and so after all of that host. Between them the barrier is one word from each to each other
 * (even_ucx_call_meet): who has all words knows that all have begun the call. That others fail meanwhile, or this group
 * ends, takes none of it back. */
even_status even_hosts_meet(even_hosts_group *group) {
  EVEN_TRY(even_comm_barrier(group->inside));
  return even_hosts_agree(group, even_hosts_leads(group) ? even_comm_barrier(group->between) : EVEN_OK);
}

/* What rank 0, which leads the first host, has there. */
static even_status share(even_hosts_group *group, void *data, size_t bytes) {
  even_status status = even_hosts_leads(group) ? even_comm_broadcast(group->between, data, bytes, 0) : EVEN_OK;
  EVEN_TRY(even_hosts_agree(group, status));
  return group->locals > 1 ? even_comm_broadcast(group->inside, data, bytes, 0) : EVEN_OK;
}

static int lanes_of(const even_hosts_group *group, const char *way) {
  return strcmp(way, "direct") == 0  ? EVEN_HOSTS_DIRECT
         : strcmp(way, "turns") == 0 ? 0
         : strcmp(way, "lanes") == 0 ? group->lanes
                                     : 1;
}

even_status even_hosts_by_cost(even_hosts_group *group, even_hosts_call call, size_t bytes, even_hosts_run *run,
                               void *job) {
  even_ways *ways = &group->ways[call];
  if (bytes <= least_of(call)) {
    return run(group, job, 0);
  }
  int lanes = lanes_of(group, ways->names[even_ways_next(ways, bytes)]);
  bool measures = even_ways_measures(ways, bytes);
  if (measures) {
    EVEN_TRY(even_hosts_meet(group)); /* how late others are is no cost of the way */
  }
  even_ways_call_begins(ways, even_clock_ns());
  EVEN_TRY(run(group, job, lanes));
  if (measures && call != EVEN_HOSTS_ALL_REDUCE) {
    EVEN_TRY(even_hosts_meet(group)); /* who only gives is done before what it gave has come */
  }
  even_ways_call_ends(ways, bytes, even_clock_ns());
  even_ways_size *decided = even_ways_decided(ways, bytes);
  return decided == NULL ? EVEN_OK : share(group, decided, sizeof *decided);
}

/* ---- what is done inside a host ---- */

/* Whether `way` is one of it. By costs there, too: its own calls', of which none are kept. */
static bool take_inside(const even_hosts_group *group, const char *way) {
  const even_comm_engine *engine = even_comm_engine_of(group->inside);
  const even_comm_following by = {.engine = engine->name, .way = way};
  size_t lacking = 0;
  if (engine->follow == NULL || engine->follow(group->inside, &by, &lacking) == EVEN_OK) {
    return engine->follow != NULL && way != NULL;
  }
  even_error_clear(); /* it is none of it */
  return false;
}

bool even_hosts_ask_inside(even_hosts_group *group, const char *way) {
  bool known = way != NULL && strlen(way) < sizeof group->inner_way && take_inside(group, way);
  (void)snprintf(group->inner_way, sizeof group->inner_way, "%s", known ? way : "");
  return known;
}

void even_hosts_follow_inside(even_hosts_group *group) {
  const even_comm_engine *engine = even_comm_engine_of(group->inside);
  size_t bytes = 0;
  (void)take_inside(group, group->inner_way[0] == '\0' ? NULL : group->inner_way);
  for (int number = 0; engine->choice != NULL && engine->choice(group->inside, number, &bytes) != NULL; number++) {
    /* all of the host's ranks have what its first one has: they follow the same words */
  }
}
