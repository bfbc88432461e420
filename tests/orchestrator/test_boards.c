/* The leader's board of a job of two hosts and that of the other one, without agents: what one writes, the other reads.
 */
#include "board_sides.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void what_ranks_say_elsewhere_decides_here(void **state) {
  const bool lost[RANKS] = {true, false, false, false};
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  (void)state;
  even_generation_say(leader.ranks_view, 1, "");
  even_generation_say(other.ranks_view, 2, "");
  even_generation_say(other.ranks_view, 3, "it is \"a stream\"");
  assert_false(even_generation_able(leader.job.generation, lost, &rank, why));
  assert_int_equal(rank, 2);
  assert_true(report());
  assert_false(report()); /* told once */
  assert_false(even_generation_able(leader.job.generation, lost, &rank, why));
  assert_int_equal(rank, 3);
  assert_string_equal(why, "it is \"a stream\"");
  even_generation_say(other.ranks_view, 3, "");
  assert_true(report());
  assert_true(even_generation_able(leader.job.generation, lost, &rank, why));
  even_boards_begin(&other.job); /* another attempt: all of it is news again */
  assert_true(report());
}

static void generations_come_one_by_one(void **state) {
  const bool first[RANKS] = {false, false, false, true};
  const bool second[RANKS] = {true, false, false, true};
  (void)state;
  assert_int_equal(carry(0), EVEN_OK); /* as it began */
  assert_int_equal(even_generation_lose(leader.job.generation, first), 1);
  assert_int_equal(even_generation_lose(leader.job.generation, second), 2);
  assert_int_equal(carry(2), EVEN_ERR_INPUT);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(carry(1), EVEN_OK); /* late: nothing */
  assert_int_equal(even_generation_number(other.ranks_view), 2);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(even_generation_has(other.ranks_view, rank, 1), !first[rank]);
    assert_int_equal(even_generation_has(other.ranks_view, rank, 2), !second[rank]);
  }
  even_generation_ask(leader.job.generation, EVEN_WISH_STAND);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(even_generation_wished(other.ranks_view), EVEN_WISH_STAND);
  even_generation_refuse(leader.job.generation);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(even_generation_refused(other.ranks_view));
}

static void members_meet_where_the_first_of_them_is(void **state) {
  const bool first[RANKS] = {false, false, false, true};
  const bool second[RANKS] = {true, true, false, true};
  char address[EVEN_GENERATION_ADDRESS];
  (void)state;
  assert_int_equal(even_generation_lose(leader.job.generation, first), 1);
  even_boards_turn(&leader.job);
  assert_int_not_equal(even_boards_look_ms(&leader.job), 0); /* rank 0 will say where, without a word */
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(even_boards_look_ms(&other.job), 0); /* that comes as a message */
  assert_int_equal(even_generation_port(other.ranks_view, 1, 0, address), 0);
  even_generation_meet(leader.ranks_view, 1, 4711);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(even_generation_port(other.ranks_view, 1, 0, address), 4711);
  assert_string_equal(address, "10.79.0.1");
  assert_int_equal(even_generation_port(leader.ranks_view, 1, 0, address), 4711);
  assert_string_equal(address, "");
  even_boards_turn(&leader.job);
  assert_int_equal(even_boards_look_ms(&leader.job), 0);

  assert_int_equal(even_generation_lose(leader.job.generation, second), 2); /* rank 2 leads them */
  leader.ranks[0].alive = leader.ranks[1].alive = false;
  assert_int_equal(carry(2), EVEN_OK);
  even_boards_turn(&other.job); /* nothing to be sent */
  assert_int_not_equal(even_boards_look_ms(&other.job), 0);
  even_generation_meet(other.ranks_view, 2, 4712);
  assert_true(report());
  assert_false(report());
  assert_int_equal(even_generation_port(leader.ranks_view, 2, 0, address), 4712);
  assert_string_equal(address, "10.79.0.2"); /* the other end of its connection */
  assert_int_equal(carry(2), EVEN_OK);       /* to a third host, say; where it is at home nothing changes */
  assert_int_equal(even_generation_port(other.ranks_view, 2, 0, address), 4712);
  assert_string_equal(address, "");
  assert_int_equal(give(true, "{\"ranks\":[],\"number\":1,\"port\":9}"), EVEN_OK); /* of one that is over */
  assert_int_equal(even_generation_port(leader.ranks_view, 2, 0, address), 4712);
}

static void odd_words_are_refused(void **state) {
  static const char *const to_leader[] = {"{\"ranks\":[{\"rank\":1,\"said\":true,\"why\":\"\"}]}",
                                          "{\"ranks\":[{\"said\":true}]}", "{\"ranks\":[{\"rank\":4}]}",
                                          "{\"ranks\":[{\"rank\":2,\"stands\":-1}]}",
                                          "{\"ranks\":[{\"rank\":2,\"early\":-1}]}"};
  static const char *const to_other[] = {
      "{\"number\":-1}",
      "{\"number\":0,\"wish\":7}",
      "{\"number\":2,\"members\":[0]}",
      "{\"number\":1,\"members\":[0,4]}",
      "{\"number\":1,\"members\":[\"all\"]}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof to_leader / sizeof to_leader[0]; i++) {
    assert_int_equal(give(true, to_leader[i]), EVEN_ERR_INPUT);
  }
  for (size_t i = 0; i < sizeof to_other / sizeof to_other[0]; i++) {
    assert_int_equal(give(false, to_other[i]), EVEN_ERR_INPUT);
    assert_int_equal(even_generation_number(other.ranks_view), 0);
  }
  close_side(&leader); /* a job whose ranks do not go on has no board */
  even_job alone = {.generation_fd = -1};
  json_t *content = json_object();
  assert_int_equal(even_boards_take(&alone, &leader.agents[1], content), EVEN_ERR_INPUT);
  assert_int_equal(even_boards_follow(&alone, content), EVEN_ERR_INPUT);
  even_boards_turn(&alone);
  assert_int_equal(even_boards_look_ms(&alone), 0);
  json_decref(content);
}

static void a_rank_elsewhere_is_lost_and_the_others_go_on(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  all_can_go_on();
  assert_true(report());
  kill_rank(3);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_false(even_generation_has(leader.ranks_view, 3, 1));
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 0, 1 and 2 go on without rank 3|");
}

static void ranks_elsewhere_have_time_to_say_that_they_can(void **state) {
  (void)state;
  all_can_go_on();
  kill_rank(0);
  kill_rank(1);
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 0); /* nothing is known of 2 and 3 */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_true(report());
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_true(even_job_lost(&leader.job, 0) && even_job_lost(&leader.job, 1));
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 2 and 3 go on without ranks 0 and 1|");
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
}

static void a_rank_here_that_has_met_the_others_has_time_too(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  even_generation_say(leader.ranks_view, 1, "");
  even_generation_say(other.ranks_view, 2, "");
  assert_true(report());
  leader.job.progress.ranks[0].joined = true;
  kill_rank(3);
  even_job_shrink_tick(&leader.job);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_int_equal(even_generation_number(leader.ranks_view), 0);
  even_generation_say(leader.ranks_view, 0, "");
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 0, 1 and 2 go on without rank 3|");
}

static void a_rank_here_that_has_not_met_them_has_none(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  even_generation_say(leader.ranks_view, 1, "");
  kill_rank(3);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "the others cannot go on without rank 3: rank 0: it is not training yet, "));
}

static void who_says_nothing_in_time_ends_the_attempt(void **state) {
  (void)state;
  even_generation_say(leader.ranks_view, 1, "");
  kill_rank(0);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  leader.job.undecided_ns = 1; /* long ago */
  even_job_shrink_tick(&leader.job);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_true(even_generation_refused(leader.ranks_view));
  assert_false(even_job_lost(&leader.job, 0));
  assert_non_null(strstr(leader.said.data, "the others cannot go on without rank 0: rank 2: it is not training yet, "));
}

static void what_a_rank_elsewhere_cannot_is_told_at_once(void **state) {
  (void)state;
  all_can_go_on();
  even_generation_say(other.ranks_view, 3, "its data set is a stream");
  assert_true(report());
  kill_rank(0);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "cannot go on without rank 0: rank 3: its data set is a stream|"));
}

static void all_wait_early(void) {
  even_generation_say_early(leader.ranks_view, 0, 1);
  even_generation_say_early(leader.ranks_view, 1, 1);
  even_generation_say_early(other.ranks_view, 2, 1);
  even_generation_say_early(other.ranks_view, 3, 1);
}

static void a_rank_elsewhere_is_lost_in_a_call_before_prepare(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  all_wait_early();
  assert_true(report());
  kill_rank(3);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 0, 1 and 2 go on without rank 3|");
}

static void one_that_was_in_no_call_before_prepare_is_waited_for_no_longer_than_its_words_take(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  all_wait_early();
  even_generation_say_early(other.ranks_view, 3, 0);
  assert_true(report());
  kill_rank(3);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_int_equal(even_generation_number(leader.ranks_view), 0);
  leader.job.undecided_ns = 1; /* long ago */
  even_job_shrink_tick(&leader.job);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "cannot go on without rank 3: rank 3: it was in the script's own code"));
}

static void one_that_was_in_an_earlier_call_may_have_come_to_the_next(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  all_wait_early();
  assert_true(report());
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say_early(rank < 2 ? leader.ranks_view : other.ranks_view, rank, 2);
  }
  kill_rank(3); /* before its agent's words have come */
  assert_int_equal(even_generation_number(leader.ranks_view), 0);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_true(report());
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
}

static void one_of_this_host_that_was_in_no_call_before_prepare_is_not_waited_for(void **state) {
  (void)state;
  leader.ranks[1].pid = 71;
  all_wait_early();
  even_generation_say_early(leader.ranks_view, 1, 0);
  leader.job.progress.ranks[1].joined = true;
  assert_true(report());
  kill_rank(1); /* what it has said is known */
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "cannot go on without rank 1: rank 1: it was in the script's own code"));
}

static void a_host_is_lost_at_once(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_false(even_generation_has(leader.ranks_view, 2, 1) || even_generation_has(leader.ranks_view, 3, 1));
  assert_string_equal(even_text_string(&leader.said),
                      "generation 1: ranks 0 and 1 go on without host there (ranks 2 and 3)|");
  assert_int_equal(leader.job.alive, 2);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
}

static void who_failed_while_others_were_heard_is_the_cause(void **state) {
  (void)state;
  leader.ranks[0].pid = 70;
  leader.ranks[1].pid = 71;
  leader.ranks[1].output.rank = 1;
  even_generation_say(leader.ranks_view, 1, "");
  kill_rank(0); /* nothing is known of ranks 2 and 3 */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  all_can_go_on();
  even_generation_say(other.ranks_view, 3, "its data set is a stream");
  assert_true(report());
  kill_rank(1);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "|rank 0 (process 70) has ended by SIGKILL"));
}

static even_status open_and_follow(void *context) {
  (void)context;
  even_status status = open_side(&other, false);
  if (status == EVEN_OK) {
    json_t *content = json_pack("{s:i,s:[i]}", "number", 1, "members", 2);
    status = even_boards_follow(&other.job, content);
    json_decref(content);
  }
  if (status == EVEN_OK && even_generation_number(other.ranks_view) != 1) {
    status = even_fail(EVEN_ERR_INPUT, "it did not follow");
  }
  close_side(&other);
  return status;
}

static void lack_of_memory_is_told(void **state) {
  (void)state;
  close_side(&other);
  assert_in_range(fault_each_allocation(open_and_follow, NULL), 4, 100);
}

int main(void) {
#define BOARD_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      BOARD_TEST(what_ranks_say_elsewhere_decides_here),
      BOARD_TEST(generations_come_one_by_one),
      BOARD_TEST(members_meet_where_the_first_of_them_is),
      BOARD_TEST(odd_words_are_refused),
      BOARD_TEST(a_rank_elsewhere_is_lost_and_the_others_go_on),
      BOARD_TEST(ranks_elsewhere_have_time_to_say_that_they_can),
      BOARD_TEST(a_rank_here_that_has_met_the_others_has_time_too),
      BOARD_TEST(a_rank_here_that_has_not_met_them_has_none),
      BOARD_TEST(who_says_nothing_in_time_ends_the_attempt),
      BOARD_TEST(what_a_rank_elsewhere_cannot_is_told_at_once),
      BOARD_TEST(a_rank_elsewhere_is_lost_in_a_call_before_prepare),
      BOARD_TEST(one_that_was_in_no_call_before_prepare_is_waited_for_no_longer_than_its_words_take),
      BOARD_TEST(one_that_was_in_an_earlier_call_may_have_come_to_the_next),
      BOARD_TEST(one_of_this_host_that_was_in_no_call_before_prepare_is_not_waited_for),
      BOARD_TEST(a_host_is_lost_at_once),
      BOARD_TEST(who_failed_while_others_were_heard_is_the_cause),
      BOARD_TEST(lack_of_memory_is_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
