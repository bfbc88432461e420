/* The integer optimum of max_r t_r(shares[r]): bisection on the step time until few samples are left between
 * what is too short and what is enough, then the greedy choice of the next cheapest sample, which is exact
 * because each t_r is monotone (Fox 1966, "Discrete optimization via marginal analysis"; Ibaraki and Katoh 1988). */
#include "balancer/solve.h"

#include "balancer/cost.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ranks * batch does not fit 64 bits in all legal cases */
__extension__ typedef __int128 wide;

enum { HEADROOM = 64, ROUNDS_BEFORE_LOOKING = 5, NEAR = 64 };

typedef struct even_solve_entry {
  union {
    double seconds;     /* of the next sample, in the greedy finish */
    uint64_t remainder; /* of the proportional share, in the rounding */
  } key;
  size_t rank;
} entry;

typedef struct bracket {
  double low_seconds; /* capacity(low_seconds) < batch <= capacity(high_seconds) */
  double high_seconds;
  wide low_samples;
  wide high_samples;
  int64_t *lower;
  int64_t *upper;
  int64_t *tried;
} bracket;

even_status even_solve_room_open(size_t ranks, even_solve_room *room) {
  memset(room, 0, sizeof *room);
  room->ranks = ranks;
  even_status status = EVEN_NEW_ARRAY(&room->lower, ranks);
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&room->upper, ranks) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&room->tried, ranks) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&room->most, ranks) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&room->entries, ranks) : status;
  if (status != EVEN_OK) {
    even_solve_room_close(room);
  }
  return status;
}

void even_solve_room_close(even_solve_room *room) {
  even_free(room->lower);
  even_free(room->upper);
  even_free(room->tried);
  even_free(room->most);
  even_free(room->entries);
  memset(room, 0, sizeof *room);
}

static double longer(double a, double b) {
  return a > b ? a : b;
}

/* What all ranks finish in `seconds`, each between least[r] and most[r]. */
static wide capacity(const even_rank_cost *costs, size_t ranks, double seconds, const int64_t *least,
                     const int64_t *most, int64_t *out) {
  wide sum = 0;
  for (size_t r = 0; r < ranks; r++) {
    out[r] = even_rank_cost_reach(&costs[r], seconds, least != NULL ? least[r] : 0, most[r]);
    sum += out[r];
  }
  return sum;
}

/* Non-negative doubles order as their bits do. */
static uint64_t bits_of(double value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static double of_bits(uint64_t bits) {
  double value = 0.0;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* A time strictly between the ends. Regula falsi finds it at once on straight lines; plain and bitwise halving in
 * turn bound the number of rounds on any table. */
static double next_time(const bracket *b, int64_t aim, int round) {
  double time = 0.0;
  if (round % 4 == 3) {
    time = of_bits(bits_of(b->low_seconds) + (bits_of(b->high_seconds) - bits_of(b->low_seconds)) / 2);
  } else if (round % 4 == 2) {
    time = b->low_seconds + (b->high_seconds - b->low_seconds) / 2.0;
  } else {
    double part = (double)((wide)aim - b->low_samples) / (double)(b->high_samples - b->low_samples);
    time = b->low_seconds + (b->high_seconds - b->low_seconds) * part;
  }
  if (!(time > b->low_seconds)) {
    time = of_bits(bits_of(b->low_seconds) + 1);
  }
  if (!(time < b->high_seconds)) {
    time = of_bits(bits_of(b->high_seconds) - 1);
  }
  return time;
}

static bool before(const entry *a, const entry *b) {
  return a->key.seconds < b->key.seconds || (a->key.seconds <= b->key.seconds && a->rank < b->rank);
}

static void sift_down(entry *heap, size_t count, size_t at) {
  for (;;) {
    size_t least = at;
    for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < count; child++) {
      least = before(&heap[child], &heap[least]) ? child : least;
    }
    if (least == at) {
      return;
    }
    entry swapped = heap[at];
    heap[at] = heap[least];
    heap[least] = swapped;
    at = least;
  }
}

/* With buckets all samples of one are done at the same time. */
static int64_t next_count(const even_rank_cost *cost, double seconds, int64_t count, int64_t most) {
  return cost->bucket > 1 ? even_rank_cost_reach(cost, seconds, count, most) : count;
}

/* The time at which the `missing` next samples beyond counts[] are done. There are that many within most[]. */
static double greedy(const even_rank_cost *costs, size_t ranks, int64_t missing, int64_t *counts, const int64_t *most,
                     entry *heap) {
  size_t size = 0;
  double seconds = 0.0;
  for (size_t r = 0; r < ranks; r++) {
    if (counts[r] < most[r]) {
      heap[size].key.seconds = even_rank_cost_at(&costs[r], counts[r] + 1);
      heap[size++].rank = r;
    }
  }
  for (size_t i = size / 2; i-- > 0;) {
    sift_down(heap, size, i);
  }
  while (missing > 0 && size > 0) {
    size_t r = heap[0].rank;
    int64_t before_it = counts[r];
    seconds = heap[0].key.seconds;
    counts[r] = next_count(&costs[r], seconds, counts[r] + 1, most[r]);
    missing -= counts[r] - before_it;
    if (counts[r] < most[r]) {
      heap[0].key.seconds = even_rank_cost_at(&costs[r], counts[r] + 1);
    } else {
      heap[0] = heap[--size];
    }
    sift_down(heap, size, 0);
  }
  return seconds;
}

static double first_guess(const even_rank_cost *costs, size_t ranks, int64_t batch) {
  int64_t even = (batch - 1) / (int64_t)ranks + 1;
  double rate = 0.0;
  for (size_t r = 0; r < ranks; r++) {
    rate += (double)even / even_rank_cost_at(&costs[r], even);
  }
  return (double)batch / rate;
}

/* Moves the end of the bracket to the last sample within it; whether there is none between its ends, so that the answer
 * is the end. Where many ranks jump at the same time, halving alone would take as many rounds as a double has bits. */
static bool snapped(const even_rank_cost *costs, size_t ranks, bracket *b) {
  double last = 0.0;
  double next = b->high_seconds;
  for (size_t r = 0; r < ranks; r++) {
    last = longer(last, even_rank_cost_at(&costs[r], b->upper[r]));
    if (b->lower[r] < b->upper[r]) {
      double seconds = even_rank_cost_at(&costs[r], b->lower[r] + 1);
      next = seconds < next ? seconds : next;
    }
  }
  b->high_seconds = last < b->high_seconds ? last : b->high_seconds;
  return next >= b->high_seconds;
}

/* Missing samples that are handed out one by one (bucket by bucket), which costs less than another round of halving. */
static wide few_samples(const even_rank_cost *costs, size_t ranks) {
  wide sum = 0;
  for (size_t r = 0; r < ranks; r++) {
    sum += costs[r].bucket > 1 ? costs[r].bucket : 1;
  }
  return sum / 2 + 32;
}

/* The least time in which all ranks together finish `batch`. */
static double least_time(const even_solve_room *room, const even_rank_cost *costs, int64_t batch) {
  size_t ranks = room->ranks;
  wide few = few_samples(costs, ranks);
  bracket b = {.lower = room->lower, .upper = room->upper, .tried = room->tried};
  for (size_t r = 0; r < ranks; r++) {
    b.low_seconds = longer(b.low_seconds, even_rank_cost_at(&costs[r], 0));
    b.high_seconds = longer(b.high_seconds, even_rank_cost_at(&costs[r], room->most[r]));
  }
  b.low_samples = capacity(costs, ranks, b.low_seconds, NULL, room->most, b.lower);
  if (b.low_samples >= batch) {
    return b.low_seconds; /* the dummy batch of a slow rank, or free samples, set the pace */
  }
  b.high_samples = 0;
  for (size_t r = 0; r < ranks; r++) {
    b.upper[r] = room->most[r];
    b.high_samples += b.upper[r];
  }
  int64_t aim = batch - (int64_t)(few / 2) > b.low_samples ? batch - (int64_t)(few / 2) : batch;
  double time = first_guess(costs, ranks, batch);
  for (int round = 0; batch - b.low_samples > few; round++) {
    if (bits_of(b.high_seconds) - bits_of(b.low_seconds) <= 1 ||
        (round >= ROUNDS_BEFORE_LOOKING && snapped(costs, ranks, &b))) {
      return b.high_seconds;
    }
    if (round > 0 || !(time > b.low_seconds && time < b.high_seconds)) {
      time = next_time(&b, aim > b.low_samples ? aim : batch, round);
    }
    wide samples = capacity(costs, ranks, time, b.lower, b.upper, b.tried);
    int64_t *kept = samples < batch ? b.lower : b.upper;
    if (samples < batch) {
      b.lower = b.tried;
      b.low_samples = samples;
      b.low_seconds = time;
    } else {
      b.upper = b.tried;
      b.high_samples = samples;
      b.high_seconds = time;
    }
    b.tried = kept;
  }
  return greedy(costs, ranks, (int64_t)(batch - b.low_samples), b.lower, b.upper, room->entries);
}

static int by_remainder(const void *left, const void *right) {
  const entry *a = left;
  const entry *b = right;
  if (a->key.remainder != b->key.remainder) {
    return a->key.remainder > b->key.remainder ? -1 : 1;
  }
  return a->rank < b->rank ? -1 : 1;
}

/* What a share should be a multiple of. Where micro-batches are no whole buckets, whole ones of these fill none. */
static int64_t bucket_of(const even_rank_cost *cost) {
  bool fit = cost->bucket > 1 && (cost->micro_batch == 0 || cost->micro_batch % cost->bucket == 0);
  return fit ? cost->bucket : 1;
}

/* Whole buckets in proportion to what each rank can finish, rounded down; what is missing then. */
static int64_t round_down(const even_solve_room *room, const even_rank_cost *costs, const int64_t *finished, wide sum,
                          int64_t batch, int64_t *shares) {
  entry *entries = room->entries;
  int64_t missing = batch;
  for (size_t r = 0; r < room->ranks; r++) {
    wide product = (wide)batch * finished[r];
    int64_t bucket = bucket_of(&costs[r]);
    int64_t quota = (int64_t)(product / sum);
    wide remainder = (product % sum + (wide)(quota % bucket) * sum) / bucket; /* part of a bucket, times sum */
    shares[r] = quota - quota % bucket;
    /* only its order matters: the upper bits where it does not fit */
    entries[r].key.remainder = sum > INT64_MAX ? (uint64_t)(remainder >> 63) : (uint64_t)remainder;
    entries[r].rank = r;
    missing -= shares[r];
  }
  return missing;
}

/* Gives whole buckets, or at last any number of samples, in the entries' order; what is missing then. */
static int64_t hand_out(const even_solve_room *room, const even_rank_cost *costs, const int64_t *finished, bool once,
                        bool whole, int64_t missing, int64_t *shares) {
  for (size_t i = 0; i < room->ranks && missing > 0; i++) {
    size_t r = room->entries[i].rank;
    int64_t bucket = bucket_of(&costs[r]);
    int64_t most = finished[r] - shares[r] < missing ? finished[r] - shares[r] : missing;
    most = whole ? most - most % bucket : most;
    most = once && most > bucket ? bucket : most;
    shares[r] += most;
    missing -= most;
  }
  return missing;
}

/* The last bucket that is broken into is filled up from the ranks without buckets, where they have so much: it takes
 * its rank as long either way. */
static void fill_up(const even_solve_room *room, const even_rank_cost *costs, const int64_t *finished,
                    int64_t *shares) {
  int64_t wanted = 0;
  size_t filled = room->ranks;
  wide others = 0;
  for (size_t r = 0; r < room->ranks; r++) {
    int64_t bucket = bucket_of(&costs[r]);
    int64_t over = shares[r] % bucket;
    if (over > 0 && finished[r] - shares[r] >= bucket - over) {
      filled = r;
      wanted = bucket - over;
    }
    others += bucket == 1 ? shares[r] : 0;
  }
  if (filled == room->ranks || others < wanted) {
    return;
  }
  for (size_t r = 0; r < room->ranks && wanted > 0; r++) {
    if (bucket_of(&costs[r]) == 1 && shares[r] > 0) {
      int64_t part = (int64_t)(((wide)wanted * shares[r] + others - 1) / others); /* rounded up: the last gives least */
      others -= shares[r];
      wanted -= part;
      shares[r] -= part;
      shares[filled] += part;
    }
  }
}

/* Shares in proportion to what each rank can finish, so that what is left over is headroom for all alike; rounded by
 * largest remainder, which moves least (Hamilton's method), to whole buckets as far as there are. */
static void proportional(const even_solve_room *room, const even_rank_cost *costs, const int64_t *finished, wide sum,
                         int64_t batch, int64_t *shares) {
  int64_t missing = round_down(room, costs, finished, sum, batch, shares);
  if (missing > 0) {
    qsort(room->entries, room->ranks, sizeof *room->entries, by_remainder);
    missing = hand_out(room, costs, finished, true, true, missing, shares);
    missing = hand_out(room, costs, finished, false, true, missing, shares);
    if (hand_out(room, costs, finished, false, false, missing, shares) != missing) {
      fill_up(room, costs, finished, shares);
    }
  }
}

/* Batches of equal size where a number of them near the least divides the batch. */
static even_status say_what_fits(int64_t most, int64_t batch) {
  if (most == 0) {
    return even_error_fix("give at least one rank a cap above 0");
  }
  int64_t least = (batch - 1) / most + 1;
  int64_t parts = least;
  for (int tries = 0; tries < NEAR && parts - least < least && batch % parts != 0; tries++) {
    parts++;
  }
  parts = batch % parts == 0 ? parts : least;
  return even_error_fix("use a global batch of at most %" PRId64 "; for the same gradient accumulate over %" PRId64
                        " batches of %s%" PRId64 " samples",
                        most, parts, batch % parts == 0 ? "" : "up to ", (batch - 1) / parts + 1);
}

even_status even_solve(const even_solve_room *room, const even_rank_cost *costs, const int64_t *caps, int64_t batch,
                       int64_t *shares, double *step_seconds) {
  wide most = 0;
  for (size_t r = 0; r < room->ranks; r++) {
    bool capped = caps != NULL && caps[r] >= 0 && caps[r] < batch;
    room->most[r] = capped ? caps[r] : batch;
    most += room->most[r];
  }
  if (most < batch) {
    (void)even_fail(EVEN_ERR_ARGUMENT,
                    "balancer: the caps of all ranks hold %" PRId64 " samples, %" PRId64
                    " fewer than the batch of %" PRId64,
                    (int64_t)most, (int64_t)(batch - most), batch);
    return say_what_fits((int64_t)most, batch);
  }
  double seconds = least_time(room, costs, batch);
  /* what a rank could do beyond the batch counts in its proportion; a flat table has no end, so there is a limit */
  for (size_t r = 0; r < room->ranks; r++) {
    bool capped = caps != NULL && caps[r] >= 0;
    room->most[r] = capped ? caps[r] : (batch < INT64_MAX / HEADROOM ? batch * HEADROOM : batch);
  }
  wide sum = capacity(costs, room->ranks, seconds, NULL, room->most, room->tried);
  if (sum == batch) {
    memcpy(shares, room->tried, room->ranks * sizeof *shares);
  } else {
    proportional(room, costs, room->tried, sum, batch, shares);
  }
  if (step_seconds != NULL) {
    *step_seconds = seconds;
  }
  return EVEN_OK;
}

even_status even_balancer_solve_costs(const even_rank_cost *costs, const int64_t *caps, size_t ranks, int64_t batch,
                                      int64_t *shares, double *step_seconds) {
  even_solve_room room;
  if (costs == NULL || shares == NULL || ranks == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: there are no ranks to balance");
  }
  if (batch < 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the batch has %" PRId64 " samples, at least 1 is needed", batch);
  }
  for (size_t r = 0; r < ranks; r++) {
    EVEN_TRY(even_rank_cost_check(&costs[r], r));
  }
  EVEN_TRY(even_solve_room_open(ranks, &room));
  even_status status = even_solve(&room, costs, caps, batch, shares, step_seconds);
  even_solve_room_close(&room);
  return status;
}

even_status even_balancer_solve(const even_time_table *tables, const int64_t *caps, size_t ranks, int64_t batch,
                                int64_t *shares, double *step_seconds) {
  even_rank_cost *costs = NULL;
  if (tables != NULL && ranks > 0) {
    EVEN_TRY(EVEN_NEW_ARRAY(&costs, ranks));
  }
  for (size_t r = 0; costs != NULL && r < ranks; r++) {
    costs[r].table = tables[r];
  }
  even_status status = even_balancer_solve_costs(costs, caps, ranks, batch, shares, step_seconds);
  even_free(costs);
  return status;
}
