/* Any tables, caps and timings, and any bytes for a saved balancer: an error or a split that holds; never a crash,
 * never a hang. */
#include <evenstep/balancer.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 6, MOST_POINTS = 5, MOST_STEPS = 200, MOST_SAVED = 1 << 16 };

typedef struct input {
  const uint8_t *data;
  size_t left;
} input;

static void take(input *in, void *out, size_t bytes) {
  size_t have = bytes < in->left ? bytes : in->left;
  memset(out, 0, bytes);
  if (have > 0) {
    memcpy(out, in->data, have);
    in->data += have;
    in->left -= have;
  }
}

static uint8_t take_byte(input *in) {
  uint8_t byte = 0;
  take(in, &byte, 1);
  return byte;
}

static int64_t take_count(input *in) {
  uint8_t kind = take_byte(in);
  int64_t value = 0;
  take(in, &value, kind % 4 == 0 ? sizeof value : 1 + kind % 3);
  return value;
}

static double take_seconds(input *in) {
  double value = 0.0;
  if (take_byte(in) % 4 == 0) {
    take(in, &value, sizeof value);
    return value;
  }
  uint16_t small = 0;
  take(in, &small, sizeof small);
  return (double)small / 1024.0;
}

static void holds(const int64_t *shares, const int64_t *caps, size_t ranks, int64_t batch) {
  int64_t left = batch;
  for (size_t r = 0; r < ranks; r++) {
    if (shares[r] < 0 || shares[r] > left || (caps != NULL && caps[r] >= 0 && shares[r] > caps[r])) {
      abort();
    }
    left -= shares[r];
  }
  if (left != 0) {
    abort();
  }
}

static void solve(input *in, size_t ranks, int64_t batch, const int64_t *caps) {
  int64_t samples[MOST_RANKS][MOST_POINTS];
  double seconds[MOST_RANKS][MOST_POINTS];
  even_rank_cost costs[MOST_RANKS];
  int64_t shares[MOST_RANKS];
  for (size_t r = 0; r < ranks; r++) {
    size_t points = take_byte(in) % (MOST_POINTS + 1);
    for (size_t i = 0; i < points; i++) {
      samples[r][i] = take_count(in);
      seconds[r][i] = take_seconds(in);
    }
    costs[r] = (even_rank_cost){.table = {samples[r], seconds[r], points}};
    if (take_byte(in) % 2 == 0) {
      costs[r].constant_seconds = take_seconds(in);
      costs[r].micro_batch = take_count(in);
      costs[r].bucket = take_count(in);
      costs[r].leaves_out = take_byte(in) % 2 == 0;
    }
  }
  double step = 0.0;
  if (even_balancer_solve_costs(costs, caps, ranks, batch, shares, &step) != EVEN_OK) {
    return;
  }
  holds(shares, caps, ranks, batch);
  for (size_t r = 0; r < ranks; r++) {
    if (even_rank_cost_at(&costs[r], shares[r]) > step) {
      abort();
    }
  }
}

static even_status propose(void *context, const even_policy_view *view, int64_t *shares) {
  (void)context;
  memcpy(shares, view->proposed, view->ranks * sizeof *shares);
  return EVEN_OK;
}

/* Goes on from what was saved of it, some numbers of which are other ones. */
static void restore(input *in, even_balancer *balancer) {
  static uint8_t bytes[MOST_SAVED];
  size_t size = even_balancer_save(balancer, bytes, sizeof bytes);
  if (size > sizeof bytes) {
    abort();
  }
  for (int other = take_byte(in) % 4; other > 0; other--) {
    uint16_t at = 0;
    take(in, &at, sizeof at);
    take(in, bytes + at % (size / 8) * 8, 8);
  }
  even_status status = even_balancer_restore(balancer, bytes, size - (take_byte(in) % 16 == 0 ? take_byte(in) : 0));
  if (status != EVEN_OK && status != EVEN_ERR_ARGUMENT && status != EVEN_ERR_CORRUPT &&
      status != EVEN_ERR_UNSUPPORTED) {
    abort();
  }
}

static void learn(input *in, size_t ranks, int64_t batch, const int64_t *caps) {
  double speeds[MOST_RANKS];
  int64_t shares[MOST_RANKS];
  even_step_timing timings[MOST_RANKS];
  int64_t own[MOST_RANKS];
  double exchange[MOST_RANKS] = {0};
  even_balancer *balancer = NULL;
  for (size_t r = 0; r < ranks; r++) {
    speeds[r] = take_seconds(in);
  }
  even_balancer_params params = {.size = sizeof params,
                                 .policy = (even_policy)(take_byte(in) % 6),
                                 .ranks = ranks,
                                 .batch = batch,
                                 .speeds = take_byte(in) % 2 == 0 ? speeds : NULL,
                                 .caps = caps};
  params.choose = params.policy == EVEN_POLICY_CALLBACK ? propose : NULL;
  if (even_balancer_open(&params, &balancer) != EVEN_OK) {
    return;
  }
  for (int step = 0; step < MOST_STEPS && in->left > 0; step++) {
    int64_t now = take_byte(in) % 8 == 0 ? take_count(in) : batch;
    if (even_balancer_shares(balancer, now, shares) == EVEN_OK) {
      holds(shares, caps, ranks, now);
    }
    for (size_t r = 0; r < ranks; r++) {
      timings[r].samples = take_byte(in) % 8 == 0 ? take_count(in) : shares[r];
      timings[r].busy_seconds = take_seconds(in);
    }
    if (take_byte(in) % 16 == 0) { /* refused, or in force from now on */
      int64_t others[MOST_RANKS];
      for (size_t r = 0; r < ranks; r++) {
        others[r] = take_count(in);
      }
      if (even_balancer_set_caps(balancer, others) == EVEN_OK) {
        memcpy(own, others, sizeof own);
        caps = own;
      }
    }
    if (take_byte(in) % 8 == 0) { /* refused, or in force from now on */
      int64_t sizes[MOST_RANKS];
      for (size_t r = 0; r < ranks; r++) {
        sizes[r] = take_count(in);
        exchange[r] = take_seconds(in);
      }
      even_status cut = even_balancer_set_micro_batches(balancer, sizes, exchange);
      if (cut != EVEN_OK && cut != EVEN_ERR_ARGUMENT) {
        abort();
      }
    }
    if (take_byte(in) % 8 == 0) {
      restore(in, balancer);
    }
    bool told = take_byte(in) % 4 == 0;
    for (size_t r = 0; told && r < ranks; r++) {
      exchange[r] = take_seconds(in);
    }
    double passes[MOST_RANKS] = {0.0};
    bool waits = take_byte(in) % 2 == 0;
    for (size_t r = 0; waits && r < ranks; r++) {
      passes[r] = take_seconds(in);
    }
    even_status status = even_balancer_observe_waits(balancer, timings, NULL, exchange, passes);
    if (status != EVEN_OK && status != EVEN_ERR_ARGUMENT) {
      abort();
    }
    if (even_balancer_predict(balancer, 0, 7) < 0.0) {
      abort();
    }
  }
  even_balancer_close(balancer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes); /* libFuzzer declares no prototype */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  input in = {data, bytes};
  size_t ranks = 1 + take_byte(&in) % MOST_RANKS;
  int64_t batch = take_count(&in);
  int64_t caps[MOST_RANKS];
  bool capped = take_byte(&in) % 2 == 0;
  for (size_t r = 0; capped && r < ranks; r++) {
    caps[r] = take_count(&in);
  }
  if (take_byte(&in) % 2 == 0) {
    solve(&in, ranks, batch, capped ? caps : NULL);
  } else {
    learn(&in, ranks, batch, capped ? caps : NULL);
  }
  return 0;
}
