/* Steps in which ranks end: those that are left have what a step without a fault gives, to the last bit. */
#include "base/fail.h"
#include "comm/ranks.h"
#include "optim/optim_model.h"
#include "optim/states.h"
#include "os/calls.h"
#include "os/process.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 4, LONG = 60 };

static even_optim_params surviving(void) {
  even_optim_params params = model_all;
  params.survives = true;
  return params;
}

/* How far the second rank comes with a piece before it ends, in the third step. */
typedef enum end {
  BEFORE_THE_STEP,
  WITH_SQUARES,     /* of a piece, which it has taken and not added up: here there is a norm */
  WITH_A_PIECE,     /* that it has taken, and not kept */
  KEEPING,          /* what it keeps is half there */
  IN_THE_MIDDLE,    /* the piece is half changed */
  TAKEN_OVER,       /* the same, and the third rank takes it over, puts half of it back, and ends */
  TAKEN_OVER_TWICE, /* the third rank comes to change it again */
  AFTER_THE_PIECE,  /* it is done, and the others are not */
  STOPPED,          /* it has a piece, and stands until the others say that they wait for it */
  ENDS
} end;

/* Numbers that nobody would have. */
static void spoil(even_optim *optim, const even_optim_piece *piece, size_t share) {
  size_t left = EVEN_OPTIM_PIECE;
  size_t first = piece->first;
  for (size_t p = piece->parameter; p < PARAMETERS && left > 0; p++, first = 0) {
    const even_optim_place *place = &optim->places[p];
    size_t count = place->count - first < left ? place->count - first : left;
    size_t wide = even_optim_wide_bytes(place->dtype);
    left -= count;
    for (int k = 0; k < place->states && p != 2; k++) { /* the third has no gradient: nobody changes it */
      memset((char *)even_optim_at(optim, place->state[k]) + first * wide, 0x41, count * wide / share);
    }
    if (place->values != EVEN_OPTIM_NOWHERE && p != 2) {
      memset((char *)even_optim_at(optim, place->values) + first * wide, 0x41, count * wide / share);
    }
  }
}

/* What the step would keep of a piece, by hand. */
static void keep(even_optim *optim, const even_optim_round *round, size_t number, bool whole) {
  even_optim_kept *kept = even_optim_at(optim, optim->kept + (size_t)round->rank * optim->kept_stride);
  const even_optim_piece *piece = &optim->pieces[number];
  char *to = (char *)(kept + 1);
  size_t left = EVEN_OPTIM_PIECE;
  size_t first = piece->first;
  if (!whole) {
    memset(to, 0x41, EVEN_OPTIM_PIECE);
    return;
  }
  for (size_t p = piece->parameter; p < PARAMETERS && left > 0; p++, first = 0) {
    const even_optim_place *place = &optim->places[p];
    size_t count = place->count - first < left ? place->count - first : left;
    size_t bytes = count * even_optim_wide_bytes(place->dtype);
    left -= count;
    for (int k = 0; k < place->states + 1 && p != 2; k++) {
      bool is_state = k < place->states;
      if (is_state || even_optim_is_short(place->dtype)) {
        size_t from = is_state ? place->state[k] : place->values;
        memcpy(to, (char *)even_optim_at(optim, from) + first * even_optim_wide_bytes(place->dtype), bytes);
        to += bytes;
      }
    }
  }
  atomic_store(&kept->name, even_optim_round_name(round, number));
}

static _Noreturn void die(void) {
  for (;;) {
    (void)raise(SIGKILL);
  }
}

static bool is_next(even_optim *optim, size_t piece, int holder) {
  even_optim_round look = {.words = even_optim_at(optim, 0), .pieces = optim->piece_count, .number = 3};
  return even_optim_round_holder(&look, piece) == holder;
}

static void die_in_step(even_comm *comm, even_optim *optim, end how) {
  int own = even_comm_rank(comm);
  size_t piece = 0;
  even_optim_round round = {
      .words = even_optim_at(optim, 0), .pieces = optim->piece_count, .number = 3, .rank = own, .ranks = RANKS};
  if (how == BEFORE_THE_STEP) {
    die();
  }
  if (how == WITH_SQUARES) {
    round.words = even_optim_at(optim, optim->sums);
    *(double *)even_optim_at(optim, optim->squares) = 1e6;
  }
  even_optim_round_begin(&round);
  if (own == 1 && !even_optim_round_take(&round, &piece)) { /* so soon, lest the others have done it */
    return;
  }
  if (even_comm_barrier(comm) != EVEN_OK) { /* that which begins the step */
    return;
  }
  if (own == 2) { /* the other one's piece, once it has it; its own are left to the others */
    even_optim_round first = {.words = round.words, .pieces = round.pieces, .number = 3, .rank = 1, .ranks = RANKS};
    even_optim_round_begin(&first);
    size_t theirs = first.next;
    while (!is_next(optim, theirs, 1)) {
    }
    while (!even_process_has_ended((pid_t)optim->processes[1].number)) {
    }
    if (even_optim_round_take_over(&round, theirs, 1) && how == TAKEN_OVER_TWICE) {
      even_optim_kept *from = even_optim_at(optim, optim->kept + optim->kept_stride);
      even_optim_kept *to = even_optim_at(optim, optim->kept + 2 * optim->kept_stride);
      memcpy(to, from, optim->kept_stride);
      spoil(optim, &optim->pieces[theirs], 3);
    }
    die();
  }
  switch (how) {
    case KEEPING:
      keep(optim, &round, piece, false);
      break;
    case IN_THE_MIDDLE:
    case TAKEN_OVER:
    case TAKEN_OVER_TWICE:
      keep(optim, &round, piece, true);
      spoil(optim, &optim->pieces[piece], 2);
      break;
    case STOPPED:
      (void)raise(SIGSTOP);
      break;
    default:
      break;
  }
  die();
}

/* As the agent does it, once it has heard of it. */
static void end_the_second(void *context) {
  const even_optim *optim = context;
  (void)kill((pid_t)optim->processes[1].number, SIGKILL);
}

static int lose_ranks(even_comm *comm, void *argument) {
  const end *how = argument;
  int own = even_comm_rank(comm);
  even_optim_params params = surviving();
  even_optim *optim = NULL;
  model *mine = model_make();
  model *theirs = model_make();
  bool two = *how == TAKEN_OVER || *how == TAKEN_OVER_TWICE;
  mine->max_norm = theirs->max_norm = *how == WITH_SQUARES || *how == AFTER_THE_PIECE ? 100 : 0;
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK);
  mine->waits = *how == STOPPED ? end_the_second : NULL;
  mine->waits_context = optim;
  for (int step = 1; step <= STEPS; step++) {
    even_optim_report report;
    model_loop(theirs, step);
    if (step == 3 && (own == 1 || (own == 2 && two)) && *how != AFTER_THE_PIECE) {
      die_in_step(comm, optim, *how);
      return 1;
    }
    RANKS_EXPECT(comm, model_step(optim, mine, step, &report) == EVEN_OK);
    /* Others may be at the next step, and its states. */
    bool at_rest = step == 1 || step == STEPS;
    RANKS_EXPECT(comm, model_is_same(at_rest ? optim : NULL, mine, theirs));
    if (step == 3 && own == 1) {
      die();
    }
  }
  even_optim_close(optim);
  model_drop(mine);
  model_drop(theirs);
  return 0;
}

static void make_the_step_without_them(void **state) {
  (void)state;
  for (int i = 0; i < ENDS; i++) {
    end how = (end)i;
    int results[RANKS];
    bool two = how == TAKEN_OVER || how == TAKEN_OVER_TWICE;
    (void)ranks_run(&(ranks_setup){.ranks = RANKS, .timeout_seconds = 200}, lose_ranks, &how, results);
    for (int r = 0; r < RANKS; r++) {
      int expected = r == 1 || (r == 2 && two) ? RANKS_KILLED : 0;
      if (results[r] != expected) {
        fail_msg("end %d: rank %d gave %d", i, r, results[r]);
      }
    }
  }
}

static int (*real_open)(const char *path, int flags, mode_t mode);

/* A host of which 1 KiB is free. */
static int open_where_memory_is_short(const char *path, int flags, mode_t mode) {
  static const char facts[] = "MemTotal: 8 kB\nMemAvailable: 1 kB\n";
  if (strcmp(path, "/proc/meminfo") != 0) {
    return real_open(path, flags, mode);
  }
  int fd = memfd_create("facts", MFD_CLOEXEC);
  if (fd >= 0 && (write(fd, facts, sizeof facts - 1) < 0 || lseek(fd, 0, SEEK_SET) != 0)) {
    abort();
  }
  return fd;
}

/* The first rank makes a step to which the third one has not come, or has no memory for that, and ends: for the third
 * one nothing has changed. */
static int take_a_step_back(even_comm *comm, void *argument) {
  const bool *is_short = argument;
  int own = even_comm_rank(comm);
  even_optim_params params = surviving();
  even_optim *optim = NULL;
  model *mine = model_make();
  model *theirs = model_make();
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    if (step == 3 && own == 1) {
      die();
    }
    if (step == 3 && own == 2) {
      while (!even_process_has_ended((pid_t)optim->processes[0].number)) {
      }
      RANKS_EXPECT(comm, model_is_same(optim, mine, theirs));
    }
    model_loop(theirs, step);
    if (step == 3 && own == 0 && *is_short) {
      real_open = even_os.open;
      even_os.open = open_where_memory_is_short;
      char needs[96];
      even_optim_kept *late = even_optim_kept_of(optim, 2);
      size_t bytes = optim->memory.bytes;
      (void)atomic_fetch_or(&late->came, 1); /* it looks, and has copied 64 bytes */
      late->copied = 64;
      RANKS_EXPECT(comm, model_step(optim, mine, step, NULL) == EVEN_ERR_MEMORY);
      (void)snprintf(needs, sizeof needs, "copies of the optimizer's states needs %zu bytes", 2 * bytes - 64);
      RANKS_EXPECT(comm, strstr(even_error_last()->what, needs) != NULL);
      late->copied = bytes; /* all: only this rank's own is wanted */
      RANKS_EXPECT(comm, model_step(optim, mine, step, NULL) == EVEN_ERR_MEMORY);
      (void)atomic_fetch_and(&late->came, ~(uint64_t)1);
      late->copied = 0;
      (void)snprintf(needs, sizeof needs, "a copy of the optimizer's states needs %zu bytes", bytes);
      RANKS_EXPECT(comm, strstr(even_error_last()->what, needs) != NULL);
      RANKS_EXPECT(comm, strstr(even_error_last()->what, "1024 are free on host ") != NULL);
      RANKS_EXPECT(comm, strstr(even_error_last()->fix, "fewer ranks") != NULL && even_error_last()->rank == 0);
      die();
    }
    RANKS_EXPECT(comm, model_step(optim, mine, step, NULL) == EVEN_OK);
    if (step == 4 && own == 0) {
      RANKS_EXPECT(comm, model_is_same(optim, mine, theirs));
      die();
    }
  }
  RANKS_EXPECT(comm, model_is_same(optim, mine, theirs));
  even_optim_close(optim);
  model_drop(mine);
  model_drop(theirs);
  return 0;
}

static void change_nothing_before_all_have_come(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    int results[3];
    bool is_short = i == 1;
    (void)ranks_run(&(ranks_setup){.ranks = 3, .timeout_seconds = 200}, take_a_step_back, &is_short, results);
    assert_int_equal(results[0], RANKS_KILLED);
    assert_int_equal(results[1], RANKS_KILLED);
    assert_int_equal(results[2], 0);
  }
}

/* Ends this process after some time, wherever it is. */
static void die_after(long nanoseconds) {
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
  struct itimerspec when = {.it_value = {.tv_nsec = nanoseconds}};
  timer_t timer;
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || timer_settime(timer, 0, &when, NULL) != 0) {
    abort();
  }
}

/* What a loop has after all steps, without a norm and with one: made once, before the ranks are. */
static model *after_all[2];

static int lose_one_at_any_time(even_comm *comm, void *argument) {
  const unsigned *seed = argument;
  even_optim_params params = surviving();
  even_optim *optim = NULL;
  model *mine = model_make();
  const model *theirs = after_all[*seed % 2 == 0];
  mine->max_norm = theirs->max_norm;
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) != 0) {
    die_after(1 + (long)(*seed * 7919u + (unsigned)even_comm_rank(comm) * 104729u) % 60000 * 500);
  }
  for (int step = 1; step <= LONG; step++) {
    RANKS_EXPECT(comm, model_step(optim, mine, step, NULL) == EVEN_OK);
  }
  RANKS_EXPECT(comm, model_is_same(optim, mine, theirs));
  even_optim_close(optim);
  model_drop(mine);
  return 0;
}

/* Ranks end at times that have nothing to do with what they are at: of all but the first, which has the last word. */
static void survive_any_end(void **state) {
  (void)state;
  for (int with_norm = 0; with_norm < 2; with_norm++) {
    after_all[with_norm] = model_make();
    after_all[with_norm]->max_norm = with_norm ? 100 : 0;
    for (int step = 1; step <= LONG; step++) {
      model_loop(after_all[with_norm], step);
    }
  }
  for (unsigned seed = 1; seed <= 12; seed++) {
    int results[3];
    (void)ranks_run(&(ranks_setup){.ranks = 3, .timeout_seconds = 200}, lose_one_at_any_time, &seed, results);
    assert_int_equal(results[0], 0);
    assert_true((results[1] == RANKS_KILLED || results[1] == 0) && (results[2] == RANKS_KILLED || results[2] == 0));
  }
  model_drop(after_all[0]);
  model_drop(after_all[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(make_the_step_without_them),
      cmocka_unit_test(change_nothing_before_all_have_come),
      cmocka_unit_test(survive_any_end),
  };
  return cmocka_run_group_tests_name("optim_survivors", tests, NULL, NULL);
}
