/* Messages that do not fit where they are received, on every engine: the sender is told at its next call, with both
 * lines, or nothing where the message is received after all. */
#include "comm/called.h"
#include "comm/ranks.h"
#include "comm/steps.h"
#include "support/fault.h"

#include <errno.h>
#include <evenstep/flight.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LARGE ((size_t)3 << 20) /* more than goes while nobody receives it */
#define F32 EVEN_CALLED_DTYPE(EVEN_F32)
#define I32 EVEN_CALLED_DTYPE(EVEN_I32)

static const int HOST_OF[] = {0, 0, 1};

/* How the first rank comes to hear of it; the last one receives. */
typedef enum hearing {
  IN_A_SEND,
  IN_A_COLLECTIVE,
  WAITING_TO_RECEIVE,
  WAITING_TO_SEND,
  WAITING_IN_A_COLLECTIVE,
  AT_THE_END,
  NOT_AT_ALL,
  NOT_AFTERWARDS /* as before, but the receive that failed is awaited when the other has taken it */
} hearing;

typedef struct scene {
  hearing how;
  bool two; /* threads wait for the receive that fails */
  steps *step;
} scene;

static bool say_site(void *context, char *text, size_t bytes) {
  (void)snprintf(text, bytes, "%s", (const char *)context);
  return true;
}

static even_comm_request *begin(even_comm *comm, bool sends, uint32_t elements, void *data, size_t bytes, int peer,
                                uint64_t tag) {
  const even_comm_called called = {.elements = elements, .site = sends ? "there.py:7" : NULL};
  even_comm_request *request = NULL;
  even_comm_call_as(&called);
  even_status status = sends ? even_comm_send_begin(comm, data, bytes, peer, tag, &request)
                             : even_comm_receive_begin(comm, data, bytes, peer, tag, &request);
  even_comm_call_as(NULL);
  return status == EVEN_OK ? request : NULL;
}

static even_status end(even_comm_request *request) {
  even_status status = request == NULL ? even_error_last()->status : even_comm_request_wait(request, 0, NULL);
  even_comm_request_free(request);
  return status;
}

/* The words of the error, on both sides. */
static bool names_both(const even_comm *comm, size_t bytes) {
  char words[128];
  const char *what = even_error_last()->what;
  (void)snprintf(words, sizeof words, "sent %zu bytes of F32 with tag 5, but rank %d receives %zu of I32", bytes,
                 even_comm_ranks(comm) - 1, bytes);
  return strstr(what, words) != NULL && strstr(what, "; sent at there.py:7; received at here.py:9") != NULL;
}

/* ---- two threads that wait for one receive ---- */

typedef struct awaited {
  even_comm_request *request;
  atomic_bool asked; /* one of them has been asked where it is, */
  steps *over;       /* and goes on once the other's wait is over */
} awaited;

static bool say_site_late(void *context, char *text, size_t bytes) {
  awaited *of = context;
  if (!atomic_exchange(&of->asked, true)) {
    steps_await(of->over, 1);
  }
  return say_site((void *)(uintptr_t)"here.py:9", text, bytes);
}

/* How often the error says where it was received; -1: another error. */
static int await_it(awaited *of) {
  int said = 0;
  even_status status = even_comm_request_wait(of->request, 0, NULL);
  for (const char *at = even_error_last()->what; (at = strstr(at, "; received at ")) != NULL; at++) {
    said++;
  }
  steps_reach(of->over, 1);
  return status == EVEN_ERR_MISMATCH && even_error_last()->rank == 0 ? said : -1;
}

static void *await_beside(void *of) {
  return (void *)(intptr_t)await_it(of);
}

/* Who is asked says it in its own error, which the sender hears, and the other at most that. */
static int await_by_two(even_comm *comm, even_comm_request *request) {
  awaited of = {.request = request, .over = steps_make()};
  pthread_t thread;
  void *beside = NULL;
  RANKS_EXPECT(comm, request != NULL && of.over != NULL);
  even_comm_ask_site(comm, say_site_late, &of);
  while (!even_comm_request_done(request)) {
  }
  RANKS_EXPECT(comm, pthread_create(&thread, NULL, await_beside, &of) == 0);
  int here = await_it(&of);
  (void)pthread_join(thread, &beside);
  int there = (int)(intptr_t)beside;
  RANKS_EXPECT(comm, (here == 1 && there == 0) || (here == 0 && there == 1));
  even_comm_ask_site(comm, say_site, (void *)(uintptr_t)"here.py:9");
  even_comm_request_free(request);
  steps_free(of.over);
  return 0;
}

/* What was said is heard in the first one at the latest. */
static int meet_twice(even_comm *comm) {
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

/* The word of it may be on its way while all are in one. */
static even_status meet_until_told(even_comm *comm) {
  even_status status = EVEN_OK;
  while (status == EVEN_OK) {
    status = even_comm_barrier(comm);
  }
  return status;
}

static int hear(even_comm *comm, const scene *of, unsigned char *data) {
  int last = even_comm_ranks(comm) - 1;
  size_t bytes = of->how == WAITING_TO_SEND ? LARGE : 8;
  even_comm_request *sent = begin(comm, true, F32, data, bytes, last, 5);
  even_comm_request *other = NULL;
  even_status status = EVEN_OK;
  RANKS_EXPECT(comm, sent != NULL);
  if (of->how >= NOT_AT_ALL) {
    RANKS_EXPECT(comm, even_comm_request_wait(sent, 0, NULL) == EVEN_OK);
  }
  while (of->how == IN_A_SEND && !even_comm_request_done(sent)) {
  }
  steps_reach(of->step, 1);
  switch (of->how) {
    case IN_A_SEND: /* in one of these, as soon as the word of it has come */
      steps_await(of->step, 2);
      RANKS_EXPECT(comm, even_comm_request_wait(sent, 0, NULL) == EVEN_OK); /* it was over before */
      while (status == EVEN_OK) {
        status = end(begin(comm, true, F32, data, 1, last, 6));
      }
      break;
    case IN_A_COLLECTIVE:
      steps_await(of->step, 2);
      status = meet_until_told(comm);
      break;
    case WAITING_TO_RECEIVE:
      other = begin(comm, false, F32, data, 1, last, 7);
      RANKS_EXPECT(comm, other != NULL || even_error_last()->status == EVEN_ERR_MISMATCH);
      status = other == NULL ? EVEN_ERR_MISMATCH : even_comm_request_wait(other, 0, NULL);
      break;
    case WAITING_TO_SEND:
      status = even_comm_request_wait(sent, 0, NULL);
      break;
    case WAITING_IN_A_COLLECTIVE:
    case AT_THE_END:
      status = even_comm_barrier(comm);
      break;
    case NOT_AT_ALL:
    case NOT_AFTERWARDS:
      steps_await(of->step, 3);
      even_comm_request_free(sent);
      return meet_twice(comm);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && even_error_last()->rank == last && names_both(comm, bytes));
  steps_reach(of->step, 4);
  if (of->how == IN_A_SEND) { /* it is said once */
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  }
  even_comm_request_free(other);
  even_comm_request_free(sent);
  return 0;
}

static int refuse(even_comm *comm, const scene *of, unsigned char *data) {
  size_t bytes = of->how == WAITING_TO_SEND ? LARGE : 8;
  even_comm_ask_site(comm, say_site, (void *)(uintptr_t)"here.py:9");
  steps_await(of->step, 1);
  even_comm_request *failing = begin(comm, false, I32, data, bytes, 0, 5);
  if (of->how == NOT_AFTERWARDS) {
    RANKS_EXPECT(comm, end(begin(comm, false, F32, data, 8, 0, 5)) == EVEN_OK);
  }
  if (of->two) {
    RANKS_EXPECT(comm, await_by_two(comm, failing) == 0);
  } else {
    RANKS_EXPECT(comm, end(failing) == EVEN_ERR_MISMATCH);
    RANKS_EXPECT(comm, even_error_last()->rank == 0 && names_both(comm, bytes));
  }
  steps_reach(of->step, 2);
  switch (of->how) {
    case NOT_AT_ALL:
      RANKS_EXPECT(comm, end(begin(comm, false, F32, data, 8, EVEN_COMM_ANY_RANK, 5)) == EVEN_OK);
      RANKS_EXPECT(comm, memcmp(data, "1234567", 8) == 0);
      steps_reach(of->step, 3);
      return meet_twice(comm);
    case NOT_AFTERWARDS:
      steps_reach(of->step, 3);
      return meet_twice(comm);
    case IN_A_SEND:
      return even_comm_barrier(comm) != EVEN_OK;
    case IN_A_COLLECTIVE: /* the others, too, have the error */
      RANKS_EXPECT(comm, meet_until_told(comm) == EVEN_ERR_MISMATCH && names_both(comm, bytes));
      return 0;
    case AT_THE_END:
      return 0; /* it leaves, as a script that did not expect the error */
    default:
      steps_await(of->step, 4);
      return 0;
  }
}

enum { MOST_RANKS = 3 };

static unsigned char *under_way[MOST_RANKS]; /* what was sent when an error ended it, of each rank */

static int play(even_comm *comm, void *argument) {
  const scene *of = argument;
  unsigned char *data = calloc(1, LARGE);
  int own = even_comm_rank(comm);
  int wrong = 0;
  memcpy(data, "1234567", 8);
  if (own == 0) {
    wrong = hear(comm, of, data);
  } else if (own == even_comm_ranks(comm) - 1) {
    memset(data, 0, 8);
    wrong = refuse(comm, of, data);
  } else {
    bool passes = of->how == IN_A_SEND || of->how >= NOT_AT_ALL;
    even_status status = of->how == IN_A_COLLECTIVE ? meet_until_told(comm) : even_comm_barrier(comm);
    status = of->how >= NOT_AT_ALL && status == EVEN_OK ? even_comm_barrier(comm) : status;
    wrong = passes ? status != EVEN_OK : status == EVEN_OK;
  }
  if (wrong != 0) {
    steps_reach(of->step, 100); /* nobody waits for it */
  }
  if (of->how == WAITING_TO_SEND) {
    free(under_way[own]);  /* of a group that has ended */
    under_way[own] = data; /* over MPI, where ranks are processes, it is read until these end */
  } else {
    free(data);
  }
  return wrong;
}

static void play_scene(ranks_setup setup, hearing how, bool two) {
  scene of = {.how = how, .two = two, .step = steps_make()};
  setup.timeout_seconds = 200;
  setup.spin = -1;
  assert_non_null(of.step);
  int wrong = ranks_run(&setup, play, &of, NULL);
  if (wrong != 0) {
    print_error("hearing %d%s\n", (int)how, two ? ", two threads" : "");
  }
  assert_int_equal(wrong, 0);
  steps_free(of.step);
}

static void play_one(ranks_setup setup, hearing how) {
  play_scene(setup, how, false);
}

static void play_all(ranks_setup setup) {
  for (int how = 0; how <= NOT_AFTERWARDS; how++) {
    play_one(setup, (hearing)how);
  }
  play_scene(setup, IN_A_COLLECTIVE, true);
}

static void start_no_threads(int rank) {
  (void)rank;
  fault_os_from(FAULT_thread_create, 1, EAGAIN);
}

static void in_shared_memory(void **state) {
  (void)state;
  play_all((ranks_setup){.ranks = 2});
  play_all((ranks_setup){.ranks = 3, .threads = true});
  play_one((ranks_setup){.ranks = 2, .enter = start_no_threads}, WAITING_TO_SEND); /* nothing else is its last error */
}

static void over_mpi(void **state) {
  (void)state;
  play_all((ranks_setup){.ranks = 2, .engine = RANKS_NETWORK, .mpi = FAKE_MPI_NUMBERS});
}

static void over_ucx(void **state) {
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  play_all((ranks_setup){.ranks = 2, .engine = RANKS_NETWORK});
}

static void over_hosts(void **state) {
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  play_all((ranks_setup){.ranks = 3, .engine = RANKS_HOSTS, .host_of = HOST_OF});
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(in_shared_memory),
      cmocka_unit_test(over_mpi),
      cmocka_unit_test(over_ucx),
      cmocka_unit_test(over_hosts),
  };
  return cmocka_run_group_tests_name("comm_refusals", tests, NULL, NULL);
}
