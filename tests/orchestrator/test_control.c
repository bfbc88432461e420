/* Commands that are typed beside a job: a thread types them, the test's loop is the agent's. */
#include "orchestrator/control.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "os/local_socket.h"
#include "os/pipe.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { TURN_MS = 20, MOST_TURNS = 6000 };

typedef struct desk {
  char folder[32];
  even_loop loop;
  even_control control;
  int taken;
  even_status answer;  /* to the next command; EVEN_OK: told later */
  const char *line;    /* that is typed */
  even_status outcome; /* of it */
  char heard[256];     /* the lines that came */
  char what[128];
  char fix[64];
  pthread_t thread;
  bool ended;
  pthread_mutex_t lock;
} desk;

static even_status take(void *context, const json_t *command, char subject[EVEN_CONTROL_SUBJECT]) {
  desk *at = context;
  at->taken++;
  (void)snprintf(subject, EVEN_CONTROL_SUBJECT, "%s", even_json_text(command, "host"));
  if (at->answer != EVEN_OK) {
    (void)even_fail(at->answer, "not that one");
    return even_error_fix("another one");
  }
  return EVEN_OK;
}

static void hear(void *context, const char *words) {
  desk *at = context;
  (void)snprintf(at->heard + strlen(at->heard), sizeof at->heard - strlen(at->heard), "%s|", words);
}

static void *type(void *context) {
  desk *at = context;
  at->outcome = even_control_ask(at->folder, at->line, hear, at);
  (void)snprintf(at->what, sizeof at->what, "%.120s", at->outcome == EVEN_OK ? "" : even_error_last()->what);
  (void)snprintf(at->fix, sizeof at->fix, "%.60s", at->outcome == EVEN_OK ? "" : even_error_last()->fix);
  (void)pthread_mutex_lock(&at->lock);
  at->ended = true;
  (void)pthread_mutex_unlock(&at->lock);
  return NULL;
}

static bool has_ended(desk *at) {
  (void)pthread_mutex_lock(&at->lock);
  bool ended = at->ended;
  (void)pthread_mutex_unlock(&at->lock);
  return ended;
}

static int open_desk(void **state) {
  desk *at = calloc(1, sizeof *at);
  assert_non_null(at);
  (void)snprintf(at->folder, sizeof at->folder, "/tmp/even-control-XXXXXX");
  assert_non_null(mkdtemp(at->folder));
  (void)pthread_mutex_init(&at->lock, NULL);
  assert_int_equal(even_loop_open(&at->loop), EVEN_OK);
  assert_int_equal(even_control_open(&at->control, &at->loop, at->folder, take, at), EVEN_OK);
  *state = at;
  return 0;
}

static int close_desk(void **state) {
  desk *at = *state;
  fault_reset();
  even_control_close(&at->control, "");
  even_loop_close(&at->loop);
  (void)rmdir(at->folder);
  (void)pthread_mutex_destroy(&at->lock);
  free(at);
  return 0;
}

static void turn(desk *at) {
  assert_int_equal(even_loop_turn(&at->loop, TURN_MS), EVEN_OK);
}

static void begin(desk *at, const char *line) {
  at->line = line;
  at->taken = 0;
  at->ended = false;
  at->heard[0] = '\0';
  assert_int_equal(pthread_create(&at->thread, NULL, type, at), 0);
}

static void turn_until_taken(desk *at) {
  for (int turns = 0; turns < MOST_TURNS && at->taken == 0; turns++) {
    turn(at);
  }
  assert_int_equal(at->taken, 1);
}

static void finish(desk *at) {
  for (int turns = 0; turns < MOST_TURNS && !has_ended(at); turns++) {
    turn(at);
  }
  assert_int_equal(pthread_join(at->thread, NULL), 0);
}

static void what_becomes_of_it_is_told_later(void **state) {
  desk *at = *state;
  begin(at, "{\"command\":\"drain\",\"host\":\"b\"}");
  turn_until_taken(at);
  even_control_say(&at->control, "c", "of another host");
  even_control_say(&at->control, "b", "saving");
  even_control_end(&at->control, "c", EVEN_OK, "not yours", "");
  even_control_end(&at->control, "b", EVEN_OK, "b is free", "");
  finish(at);
  assert_int_equal(at->outcome, EVEN_OK);
  assert_string_equal(at->heard, "saving|b is free|");
}

static void a_refusal_comes_with_its_reason(void **state) {
  desk *at = *state;
  at->answer = EVEN_ERR_STATE;
  begin(at, "{\"host\":\"b\"}");
  finish(at);
  assert_int_equal(at->outcome, EVEN_ERR_STATE);
  assert_string_equal(at->what, "not that one");
  assert_string_equal(at->fix, "another one");
}

static void who_waits_hears_of_the_end(void **state) {
  desk *at = *state;
  begin(at, "{\"host\":\"b\"}");
  turn_until_taken(at);
  even_control_close(&at->control, "the job has ended");
  finish(at);
  assert_int_equal(at->outcome, EVEN_ERR_PEER_LOST);
  assert_string_equal(at->what, "the job has ended");
  begin(at, "{\"host\":\"b\"}");
  finish(at);
  assert_int_equal(at->outcome, EVEN_ERR_NOT_FOUND);
}

/* Noise, no JSON, too much of it, nothing: each ends its own connection, and nothing else. */
static void odd_words_are_refused(void **state) {
  static char long_line[3 * EVEN_CONTROL_MOST_LINE];
  const char *const lines[] = {"", "drain b", "[", "{\"command\":", "\x01\x02\xff", long_line};
  desk *at = *state;
  memset(long_line, 'x', sizeof long_line - 1);
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    begin(at, lines[i]);
    finish(at);
    assert_int_not_equal(at->outcome, EVEN_OK);
    assert_int_equal(at->taken, 0);
  }
  begin(at, "{\"host\":\"b\"}");
  turn_until_taken(at);
  even_control_end(&at->control, "b", EVEN_OK, "", "");
  finish(at);
  assert_int_equal(at->outcome, EVEN_OK);
}

/* One more than there are places is turned away; when one has gone, the next is heard. */
static void so_many_at_once_are_turned_away(void **state) {
  desk *at = *state;
  int before = open_descriptors();
  int others[EVEN_CONTROL_CLIENTS];
  for (int i = 0; i < EVEN_CONTROL_CLIENTS; i++) {
    assert_int_equal(even_local_socket_connect(at->folder, EVEN_CONTROL_NAME, &others[i]), EVEN_OK);
    turn(at);
  }
  begin(at, "{\"host\":\"b\"}");
  finish(at);
  assert_int_equal(at->outcome, EVEN_ERR_PEER_LOST);
  for (int i = 0; i < EVEN_CONTROL_CLIENTS; i++) {
    even_pipe_close(others[i]);
  }
  for (int turns = 0; turns < MOST_TURNS && open_descriptors() > before; turns++) {
    turn(at);
  }
  at->answer = EVEN_ERR_STATE;
  begin(at, "{\"host\":\"b\"}");
  finish(at);
  assert_int_equal(at->outcome, EVEN_ERR_STATE);
}

static even_status open_once(void *context) {
  desk *at = context;
  even_control control = {.loop = NULL};
  even_status status = even_control_open(&control, &at->loop, at->folder, take, at);
  even_control_close(&control, "");
  return status;
}

static void each_fault_of_the_opening_leaves_nothing(void **state) {
  desk *at = *state;
  even_control_close(&at->control, "");
  int before = open_descriptors();
  assert_in_range(fault_each_allocation(open_once, at), 1, 10);
  assert_in_range(fault_each_os(open_once, at, EIO), 4, 30);
  assert_int_equal(open_descriptors(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_becomes_of_it_is_told_later, open_desk, close_desk),
      cmocka_unit_test_setup_teardown(a_refusal_comes_with_its_reason, open_desk, close_desk),
      cmocka_unit_test_setup_teardown(who_waits_hears_of_the_end, open_desk, close_desk),
      cmocka_unit_test_setup_teardown(odd_words_are_refused, open_desk, close_desk),
      cmocka_unit_test_setup_teardown(so_many_at_once_are_turned_away, open_desk, close_desk),
      cmocka_unit_test_setup_teardown(each_fault_of_the_opening_leaves_nothing, open_desk, close_desk),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
