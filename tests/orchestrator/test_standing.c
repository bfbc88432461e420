/* Which ranks were stopped and stand still: what agents say to one another of it, without these. Rank 3 is a real
 * process of the other host. */
#include "orchestrator/standing.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "fault/standing.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/process_stat.h"

#include "board_sides.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { STOPPED = 3 };
#define MS ((uint64_t)1000000u)

static pid_t child;
static even_standing *seen_here, *seen_there; /* what the ranks of each host see */
static uint32_t mark;
static uint64_t clock_ns; /* what the agents are told */

static int begin(void **state) {
  char identity[256];
  even_host_identity(identity, sizeof identity);
  mark = even_host_mark(identity, sizeof identity);
  child = fork();
  if (child == 0) {
    for (;;) {
      (void)pause();
    }
  }
  if (child < 0 || set_up(state) != 0 || even_job_standing_open(&leader.job) != EVEN_OK ||
      even_job_standing_open(&other.job) != EVEN_OK) {
    return -1;
  }
  other.ranks[STOPPED].pid = child;
  clock_ns = even_clock_ns();
  return even_standing_open(even_job_standing_fd(&leader.job), &seen_here) == EVEN_OK &&
                 even_standing_open(even_job_standing_fd(&other.job), &seen_there) == EVEN_OK
             ? 0
             : -1;
}

static int end(void **state) {
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  even_standing_close(seen_here);
  even_standing_close(seen_there);
  even_job_standing_close(&leader.job);
  even_job_standing_close(&other.job);
  return tear_down(state);
}

static char state_of_child(void) {
  even_process_stat facts;
  return even_process_stat_read(child, &facts) == 0 ? facts.state : '?';
}

static void stop(void) {
  assert_int_equal(kill(child, SIGSTOP), 0);
  while (state_of_child() != 'T') {
  }
  even_job_rank_stands(&other.job, &other.ranks[STOPPED]);
  other.ranks[STOPPED].stopped_ns = clock_ns;
}

static void go_on(void) {
  assert_int_equal(kill(child, SIGCONT), 0);
  while (state_of_child() == 'T') {
  }
}

/* What one has to say so much later, to the other; whether it was anything. */
static bool pass(side *from, side *to, uint64_t later_ms) {
  even_text text = EVEN_TEXT_EMPTY;
  json_t *content = NULL;
  clock_ns += later_ms * MS;
  if (!even_job_standing_write(&from->job, clock_ns, &text)) {
    return false;
  }
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_int_equal(even_json_parse("a test", text.data, text.length, &content), EVEN_OK);
  assert_int_equal(even_job_standing_take(&to->job, to == &leader ? &leader.agents[1] : NULL, content), EVEN_OK);
  json_decref(content);
  even_text_free(&text);
  return true;
}

static uint64_t stood(const even_standing *seen) {
  return even_standing_ns(seen, mark, (uint32_t)child, even_clock_ns()) / MS;
}

static void all_hosts_hear_for_how_long_it_has_stood(void **state) {
  (void)state;
  assert_false(pass(&other, &leader, 20)); /* nobody stands */
  stop();
  assert_true(pass(&other, &leader, 20));
  assert_int_equal(stood(seen_here), 20);
  assert_false(pass(&other, &leader, 10)); /* too soon */
  assert_true(pass(&other, &leader, 130));
  assert_int_equal(stood(seen_here), 160);
  assert_true(pass(&leader, &other, 0));  /* and whatever other hosts there are */
  assert_false(pass(&leader, &other, 0)); /* once */
}

static void what_comes_back_changes_nothing_there(void **state) {
  (void)state;
  stop();
  assert_true(pass(&other, &leader, 20));
  assert_true(pass(&leader, &other, 0));
  assert_int_equal(stood(seen_there), 0); /* its own ranks see it in /proc */
  assert_false(pass(&other, &leader, 1));
  assert_true(pass(&other, &leader, 20));
  assert_int_equal(stood(seen_here), 41);
}

static void of_the_leaders_own_ranks_the_others_hear(void **state) {
  (void)state;
  leader.ranks[0].pid = child;
  assert_int_equal(kill(child, SIGSTOP), 0);
  while (state_of_child() != 'T') {
  }
  even_job_rank_stands(&leader.job, &leader.ranks[0]);
  leader.ranks[0].stopped_ns = clock_ns;
  assert_true(pass(&leader, &other, 150));
  assert_int_equal(stood(seen_there), 150);
}

static void who_goes_on_stands_no_more(void **state) {
  (void)state;
  stop();
  assert_true(pass(&other, &leader, 100));
  go_on(); /* and its agent has not heard of it yet: it looks */
  assert_true(pass(&other, &leader, 100));
  assert_int_equal(stood(seen_here), 0);
  assert_true(pass(&leader, &other, 0));
  assert_false(pass(&other, &leader, 100));
  stop(); /* again: its time begins anew */
  assert_true(pass(&other, &leader, 40));
  assert_int_equal(stood(seen_here), 40);
  go_on();
  other.ranks[STOPPED].stands = false; /* by the kernel's word */
  assert_true(pass(&other, &leader, 1));
  assert_int_equal(stood(seen_here), 0);
}

static void who_has_ended_stands_no_more(void **state) {
  (void)state;
  stop();
  assert_true(pass(&other, &leader, 100));
  other.ranks[STOPPED].alive = false;
  assert_true(pass(&other, &leader, 100));
  assert_int_equal(stood(seen_here), 0);
}

static void an_attempt_that_ends_says_so_of_nobody(void **state) {
  (void)state;
  stop();
  other.job.stage = EVEN_JOB_TERMINATED;
  assert_false(pass(&other, &leader, 500));
  other.job.stage = EVEN_JOB_RUNS;
  assert_true(pass(&other, &leader, 100));
  even_job_standing_begin(&leader.job);
  assert_int_equal(stood(seen_here), 0);
  assert_false(pass(&leader, &other, 0));
}

/* Who has stood for long is told of less often, and soon enough to count. */
static void it_is_said_again_and_again(void **state) {
  (void)state;
  stop();
  unsigned said = 0;
  for (int i = 0; i < 50; i++) { /* a second, at whose end it is long */
    said += pass(&other, &leader, 20) ? 1 : 0;
  }
  assert_int_equal(said, 49);
  for (int i = 0; i < 50; i++) {
    said += pass(&other, &leader, 20) ? 1 : 0;
  }
  assert_int_equal(said, 54);
  assert_int_equal(even_job_standing_look_ms(&other.job), 20);
}

static void when_to_look_again(void **state) {
  (void)state;
  assert_int_equal(even_job_standing_look_ms(&leader.job), 0);
  assert_int_equal(even_job_standing_look_ms(&other.job), 0);
  stop();
  assert_int_equal(even_job_standing_look_ms(&other.job), 20);
  assert_true(pass(&other, &leader, 100));
  assert_int_equal(even_job_standing_look_ms(&leader.job), 5); /* it has something to pass on */
  assert_true(pass(&leader, &other, 0));
  assert_int_equal(even_job_standing_look_ms(&leader.job), 0);
}

static even_status give_one(side *to, const char *words) {
  json_t *content = NULL;
  assert_int_equal(even_json_parse("a test", words, strlen(words), &content), EVEN_OK);
  even_status status = even_job_standing_take(&to->job, to == &leader ? &leader.agents[1] : NULL, content);
  json_decref(content);
  return status;
}

static void what_nobody_could_say_is_refused(void **state) {
  (void)state;
  assert_int_equal(give_one(&leader, "{\"ranks\":[]}"), EVEN_OK);
  assert_int_equal(give_one(&leader, "{\"ranks\":[{\"rank\":0,\"host\":1,\"process\":2,\"ms\":3}]}"), EVEN_ERR_INPUT);
  assert_int_equal(give_one(&leader, "{\"ranks\":[{\"rank\":4,\"host\":1,\"process\":2,\"ms\":3}]}"), EVEN_ERR_INPUT);
  assert_int_equal(give_one(&leader, "{\"ranks\":[{\"rank\":2,\"host\":1,\"process\":2}]}"), EVEN_ERR_INPUT);
  assert_int_equal(give_one(&leader, "{\"ranks\":[{\"rank\":2,\"host\":-1,\"process\":2,\"ms\":3}]}"), EVEN_ERR_INPUT);
  assert_int_equal(give_one(&leader, "{\"ranks\":[7]}"), EVEN_ERR_INPUT);
  assert_int_equal(give_one(&other, "{\"ranks\":[{\"rank\":0,\"host\":1,\"process\":2,\"ms\":3}]}"), EVEN_OK);
  even_job alone = {.most_groups = 1};
  assert_int_equal(even_job_standing_open(&alone), EVEN_OK);
  assert_null(alone.standing);
  assert_int_equal(even_job_standing_fd(&alone), -1);
  assert_int_equal(even_job_standing_look_ms(&alone), 0);
  even_job_standing_turn(&alone);
  even_job_standing_begin(&alone);
  assert_int_equal(even_job_standing_take(&alone, NULL, NULL), EVEN_ERR_INPUT);
  even_job_standing_close(&alone);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(all_hosts_hear_for_how_long_it_has_stood),
      TEST(what_comes_back_changes_nothing_there),
      TEST(of_the_leaders_own_ranks_the_others_hear),
      TEST(who_goes_on_stands_no_more),
      TEST(who_has_ended_stands_no_more),
      TEST(an_attempt_that_ends_says_so_of_nobody),
      TEST(it_is_said_again_and_again),
      TEST(when_to_look_again),
      TEST(what_nobody_could_say_is_refused),
  };
  return cmocka_run_group_tests_name("who stands on other hosts", tests, NULL, NULL);
}
