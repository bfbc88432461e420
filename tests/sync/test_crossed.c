/* Gradients that ranks wait for while others wait in another group: found, also where the engine's thread cannot ask
 * who else may call. */
#include "comm/ranks.h"
#include "comm/waits.h"

#include <evenstep/flight.h>
#include <evenstep/sync.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Longer than it takes to find that ranks wait for one another. */
#define LONG_SECONDS 4
#define GROUPS 2

static const even_sync_parameter one_parameter[] = {{.count = 300, .dtype = EVEN_F32}};
static const even_sync_params params = {
    .size = sizeof params, .parameters = one_parameter, .parameter_count = 1, .bucket_bytes = 4096};

static int fds[GROUPS]; /* made before the ranks are */

/* As from Python: the engine's thread cannot ask. */
static _Thread_local bool asks;

static even_waits_others nobody_calls(void *context) {
  (void)context;
  return asks ? EVEN_WAITS_OTHERS_NONE : EVEN_WAITS_OTHERS_UNKNOWN;
}

static bool say_here(void *context, char *text, size_t bytes) {
  if (asks) {
    (void)snprintf(text, bytes, "%s", (const char *)context);
  }
  return asks;
}

typedef struct places {
  even_comm *groups[GROUPS];
  even_sync *sync;
  char line[16];
  float gradient[300];
} places;

static even_status open_places(even_comm *comm, bool can_ask, places *out) {
  int rank = even_comm_rank(comm);
  asks = can_ask;
  even_waits_ask_others(nobody_calls, NULL);
  (void)snprintf(out->line, sizeof out->line, "rank_%d.c:7", rank);
  for (int i = 0; i < GROUPS; i++) {
    even_comm_params group = {.size = sizeof group, .rank = rank, .ranks = 2, .timeout_seconds = 60, .spin = -1};
    even_status status = even_comm_open(&group, fds[i], &out->groups[i]);
    if (status != EVEN_OK) {
      return status;
    }
    even_comm_ask_site(out->groups[i], say_here, out->line);
  }
  even_comm_ask_site(comm, say_here, out->line);
  even_status status = even_comm_record(comm, NULL, "gradients");
  status = status == EVEN_OK ? even_sync_open(&params, comm, &out->sync) : status;
  return status == EVEN_OK ? even_comm_barrier(comm) : status;
}

static void close_places(places *of) {
  even_sync_close(of->sync);
  for (int i = 0; i < GROUPS; i++) {
    even_comm_close(of->groups[i]);
  }
}

static even_status hand_over(places *of) {
  even_status status = even_sync_begin(of->sync, 1.0, 1);
  return status == EVEN_OK ? even_sync_ready(of->sync, 0, of->gradient) : status;
}

static bool says(const char *words) {
  return strstr(even_error_last()->what, words) != NULL;
}

static int run_two(ranks_body *body) {
  ranks_setup two = {.ranks = 2, .timeout_seconds = 60, .spin = -1};
  even_comm_params group = {.size = sizeof group, .ranks = 2, .spin = -1};
  assert_int_equal(even_sync_arena_bytes(&params, &two.arena_bytes), EVEN_OK);
  for (int i = 0; i < GROUPS; i++) {
    assert_int_equal(even_comm_create_segment(&group, &fds[i]), EVEN_OK);
  }
  int wrong = ranks_run(&two, body, NULL, NULL);
  for (int i = 0; i < GROUPS; i++) {
    (void)close(fds[i]);
  }
  return wrong;
}

/* ---- what is found ---- */

static int finish_against_barrier(even_comm *comm, void *argument) {
  places at = {.sync = NULL};
  even_status status = EVEN_OK;
  (void)argument;
  RANKS_EXPECT(comm, open_places(comm, true, &at) == EVEN_OK);
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, hand_over(&at) == EVEN_OK);
    status = even_sync_finish(at.sync, NULL, NULL);
  } else {
    status = even_comm_barrier(at.groups[0]);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
  RANKS_EXPECT(comm,
               says("rank 0 is in all_reduce of 304 F32 elements with SUM of group gradients at rank_0.c:7 for "));
  RANKS_EXPECT(comm, says("rank 1 is in barrier of a group of 2 ranks at rank_1.c:7 for "));
  close_places(&at);
  return 0;
}

static void gradients_against_a_collective_are_a_mismatch(void **state) {
  (void)state;
  assert_int_equal(run_two(finish_against_barrier), 0);
}

/* Before the ranks vote on a round, which the engine has begun. */
static int vote_against_barrier(even_comm *comm, void *argument) {
  places at = {.sync = NULL};
  int rank = even_comm_rank(comm);
  (void)argument;
  RANKS_EXPECT(comm, open_places(comm, true, &at) == EVEN_OK);
  RANKS_EXPECT(comm, rank == 1 || hand_over(&at) == EVEN_OK);
  even_status status = even_comm_barrier(at.groups[rank]);
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
  RANKS_EXPECT(comm, says("rank 0 is in barrier of a group of 2 ranks at rank_0.c:7 for "));
  RANKS_EXPECT(comm, says("rank 1 is in barrier of a group of 2 ranks at rank_1.c:7 for "));
  close_places(&at);
  return 0;
}

static void a_vote_beside_gradients_against_a_collective_is_a_mismatch(void **state) {
  (void)state;
  assert_int_equal(run_two(vote_against_barrier), 0);
}

/* ---- what is none ---- */

/* Nobody can ask on rank 1. */
static int wait_unasked(even_comm *comm, void *argument) {
  places at = {.sync = NULL};
  (void)argument;
  RANKS_EXPECT(comm, open_places(comm, even_comm_rank(comm) == 0, &at) == EVEN_OK);
  if (even_comm_rank(comm) == 0) {
    even_comm_set_timeout(comm, LONG_SECONDS);
    RANKS_EXPECT(comm, hand_over(&at) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_finish(at.sync, NULL, NULL) == EVEN_ERR_TIMEOUT);
  }
  RANKS_EXPECT(comm, even_comm_barrier(at.groups[0]) == EVEN_OK);
  close_places(&at);
  return 0;
}

static void what_nobody_can_ask_is_not_known(void **state) {
  (void)state;
  assert_int_equal(run_two(wait_unasked), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gradients_against_a_collective_are_a_mismatch),
      cmocka_unit_test(a_vote_beside_gradients_against_a_collective_is_a_mismatch),
      cmocka_unit_test(what_nobody_can_ask_is_not_known),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
