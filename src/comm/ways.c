/* The choice among an engine's ways. Whoever else uses the links and cores changes what they cost, so each way is tried
 * again now and then against the one in use, in neighbouring calls. */
#include "comm/ways.h"

#include "base/fail.h"

#include <stdio.h>
#include <string.h>

_Static_assert(EVEN_WAYS_TRIAL == 6, "the middle one of three");

#define CALLS (EVEN_WAYS_TRIAL / 2u)
#define SHORTEST_PAUSE 32u
#define LONGEST_PAUSE 1024u
/* A way that costs so many times more is not tried again in this group, once it was tried here so often (what one trial
 * on a busy host found must not stand for good): each trial would cost more than it can win. */
#define HOPELESS 3.0
#define TRIED 2

const size_t even_ways_sizes[EVEN_WAYS_SIZES] = {12 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20};

static size_t class_of(size_t bytes) {
  size_t class = 0;
  while (bytes >= 4 && class < EVEN_WAYS_CLASSES - 1) {
    bytes /= 4;
    class ++;
  }
  return class;
}

/* The size that stands for the class: the middle one of its powers of two. */
static double size_of(size_t class) {
  return (double)((uint64_t)2 << (2 * class));
}

void even_ways_start(even_ways *ways, const char *collective, const char *const *names, int count) {
  memset(ways, 0, sizeof *ways);
  ways->collective = collective;
  ways->names = names;
  ways->count = count;
  ways->choice.forced = -1;
  even_ways_set_range(ways, even_ways_sizes[0], even_ways_sizes[EVEN_WAYS_SIZES - 1]);
}

void even_ways_set_range(even_ways *ways, size_t least, size_t most) {
  ways->least = least;
  ways->most = most;
}

void even_ways_begin_small(even_ways *ways, size_t bytes, int way) {
  ways->small = bytes;
  ways->before = way;
}

void even_ways_end(even_ways *ways) {
  even_comm_costs_close(ways->costs);
  ways->costs = NULL;
}

static even_comm_cost_key key_of(const even_ways *ways, size_t class, int way) {
  return (even_comm_cost_key){.collective = ways->collective,
                              .shape = ways->shape,
                              .engine = ways->engine,
                              .way = ways->names[way],
                              .bytes = (uint64_t)size_of(class)};
}

/* Takes over what the table knows of a size, if it knows all ways. */
static void recall(even_ways *ways, size_t class) {
  even_ways_size *size = &ways->choice.sizes[class];
  double seconds[EVEN_WAYS_MOST];
  int best = 0;
  for (int way = 0; way < ways->count; way++) {
    even_comm_cost_key key = key_of(ways, class, way);
    if (!even_comm_costs_find(ways->costs, &key, &seconds[way])) {
      return;
    }
    best = seconds[way] < seconds[best] ? way : best;
  }
  memcpy(size->seconds, seconds, sizeof seconds[0] * (size_t)ways->count);
  size->current = (uint8_t)best;
  size->pause = LONGEST_PAUSE;
  size->call = 2 * CALLS; /* a pause first: it is known */
  size->started = true;
}

void even_ways_follow(even_ways *ways, even_comm_costs *costs, const char *shape, const char *engine) {
  even_ways_end(ways);
  ways->costs = even_comm_costs_hold(costs);
  (void)snprintf(ways->shape, sizeof ways->shape, "%s", shape == NULL ? "" : shape);
  (void)snprintf(ways->engine, sizeof ways->engine, "%s", engine);
  memset(ways->choice.sizes, 0, sizeof ways->choice.sizes);
  for (size_t class = 0; class < EVEN_WAYS_CLASSES && costs != NULL; class ++) {
    recall(ways, class);
  }
}

int even_ways_named(const even_ways *ways, const char *name) {
  for (int way = 0; way < ways->count; way++) {
    if (strcmp(ways->names[way], name) == 0) {
      return way;
    }
  }
  return -1;
}

void even_ways_force(even_ways *ways, int way) {
  ways->choice.forced = way;
}

static bool in_trial(const even_ways_size *size) {
  return size->call < 2 * CALLS;
}
static bool tries_other(const even_ways_size *size) {
  return in_trial(size) && size->call >= CALLS;
}

static bool is_hopeless(const even_ways_size *size, int way) {
  double own = size->seconds[size->current];
  return size->tried[way] >= TRIED && own > 0 && size->seconds[way] > HOPELESS * own;
}

/* The way to try: the next one in turn that is not hopeless; the current one where there is none. */
static int next_other(const even_ways *ways, const even_ways_size *size) {
  for (int step = 1; step <= ways->count; step++) {
    int way = (size->other + step) % ways->count;
    if (way != size->current && !is_hopeless(size, way)) {
      return way;
    }
  }
  return size->current;
}

static void start_size(const even_ways *ways, size_t class, even_ways_size *size) {
  if (!size->started) {
    size->started = true;
    size->pause = SHORTEST_PAUSE;
    size->current = (uint8_t)(class < class_of(ways->small) ? ways->before : 0);
    size->other = size->current;
    size->other = (uint8_t)next_other(ways, size);
  }
}

int even_ways_next(const even_ways *ways, size_t bytes) {
  const size_t class = class_of(bytes);
  even_ways_size size = ways->choice.sizes[class];
  if (ways->choice.forced >= 0) {
    return ways->choice.forced;
  }
  start_size(ways, class, &size);
  return tries_other(&size) ? size.other : size.current;
}

void even_ways_call_begins(even_ways *ways, uint64_t now_ns) {
  ways->began = ways->count > 1 && ways->choice.forced < 0 ? now_ns : 0;
}

/* The middle one of three: one call that was held up, or was the first to touch its memory, says nothing. */
static uint64_t middle(const uint64_t *of) {
  uint64_t low = of[0] < of[1] ? of[0] : of[1];
  uint64_t high = of[0] < of[1] ? of[1] : of[0];
  return of[2] < low ? low : (of[2] > high ? high : of[2]);
}

/* `cost` is ns for 1024 bytes. */
static void learn(even_ways *ways, size_t class, int way, uint64_t cost) {
  double seconds = (double)cost * size_of(class) / 1024 * 1e-9;
  even_comm_cost_key key = key_of(ways, class, way);
  if (!(seconds > 0)) {
    return;
  }
  ways->choice.sizes[class].seconds[way] = seconds;
  ways->choice.sizes[class].tried[way]++;
  if (ways->costs != NULL && even_comm_costs_add(ways->costs, &key, seconds) != EVEN_OK) {
    even_error_clear(); /* no memory: it is lost to later jobs, and this one goes on */
  }
}

/* The other must be clearly better: a tenth. */
static void end_trial(even_ways *ways, size_t class) {
  even_ways_size *size = &ways->choice.sizes[class];
  uint64_t own = middle(size->cost[0]);
  uint64_t others = middle(size->cost[1]);
  bool better = others < own - own / 10;
  learn(ways, class, size->current, own);
  if (size->other != size->current) {
    learn(ways, class, size->other, others);
  }
  if (better) {
    uint8_t left = size->current;
    size->current = size->other;
    size->other = left;
    size->pause = SHORTEST_PAUSE;
  } else {
    size->pause = size->pause < LONGEST_PAUSE ? 2 * size->pause : LONGEST_PAUSE;
  }
}

void even_ways_call_ends(even_ways *ways, size_t bytes, uint64_t now_ns) {
  size_t class = class_of(bytes);
  even_ways_size *size = &ways->choice.sizes[class];
  if (ways->began == 0) {
    return;
  }
  start_size(ways, class, size);
  if (in_trial(size)) {
    uint64_t took = now_ns > ways->began ? now_ns - ways->began : 0;
    size->cost[tries_other(size)][size->call % CALLS] = (uint64_t)((double)took * 1024 / (double)bytes);
  }
  ways->began = 0;
  size->call++;
  if (size->call == 2 * CALLS) {
    end_trial(ways, class);
  } else if (size->call >= 2 * CALLS + size->pause) {
    size->call = 0;
    size->other = (uint8_t)next_other(ways, size);
  }
}

bool even_ways_measures(const even_ways *ways, size_t bytes) {
  return ways->count > 1 && ways->choice.forced < 0 && in_trial(&ways->choice.sizes[class_of(bytes)]);
}

even_ways_size *even_ways_decided(even_ways *ways, size_t bytes) {
  even_ways_size *size = &ways->choice.sizes[class_of(bytes)];
  return ways->count > 1 && ways->choice.forced < 0 && size->call == 2 * CALLS ? size : NULL;
}

bool even_ways_known(const even_ways *ways, size_t bytes) {
  const even_ways_size *size = &ways->choice.sizes[class_of(bytes)];
  bool known = true;
  for (int way = 0; way < ways->count; way++) {
    known = known && size->seconds[way] > 0;
  }
  return known || ways->choice.forced >= 0;
}

size_t even_ways_lacking(const even_ways *ways, size_t limit) {
  size_t largest = 0;
  bool lacks = false;
  for (size_t i = 0; i < EVEN_WAYS_SIZES && even_ways_sizes[i] <= limit; i++) {
    largest = even_ways_sizes[i];
    lacks = lacks || !even_ways_known(ways, largest);
  }
  return lacks ? largest : 0;
}

/* "16 KB whole (41 us; parts 66)" */
static size_t describe_size(const even_ways *ways, size_t class, char *text, size_t bytes) {
  const even_ways_size *size = &ways->choice.sizes[class];
  double kilobytes = size_of(class) / 1024;
  bool large = kilobytes >= 1024;
  int length = snprintf(text, bytes, " %g %s %s (%.3g us", large ? kilobytes / 1024 : kilobytes, large ? "MB" : "KB",
                        ways->names[size->current], size->seconds[size->current] * 1e6);
  for (int way = 0; way < ways->count && length >= 0 && (size_t)length < bytes; way++) {
    if (way != size->current && size->seconds[way] > 0) {
      length +=
          snprintf(text + length, bytes - (size_t)length, "; %s %.3g", ways->names[way], size->seconds[way] * 1e6);
    }
  }
  if (length >= 0 && (size_t)length < bytes) {
    length += snprintf(text + length, bytes - (size_t)length, "),");
  }
  return length < 0 ? 0 : (size_t)length;
}

void even_ways_describe(const even_ways *ways, char *text, size_t bytes) {
  size_t length = strlen(text);
  size_t begin = length;
  if (ways->choice.forced >= 0) {
    (void)snprintf(text + length, bytes - length, "; %s: %s, as asked for", ways->collective,
                   ways->names[ways->choice.forced]);
    return;
  }
  /* What a table says of other sizes is a guess beyond those that have ways. */
  const size_t last = class_of(ways->most);
  for (size_t class = class_of(ways->least); class <= last && length < bytes; class ++) {
    const even_ways_size *size = &ways->choice.sizes[class];
    if (!size->started || !(size->seconds[size->current] > 0)) {
      continue;
    }
    if (length == begin) {
      length += (size_t)snprintf(text + length, bytes - length, "; %s by cost:", ways->collective);
    }
    if (length < bytes) {
      length += describe_size(ways, class, text + length, bytes - length);
    }
  }
  if (length > begin && length < bytes) {
    text[length - 1] = '\0'; /* the last comma */
  }
}
