/* Places of lost ranks that others take, between the leader's board and that of the other host: who joins, and where
 * the state of the training comes from. */
#include "board_sides.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/follower_words.h"
#include "orchestrator/gifts.h"
#include "orchestrator/outlast.h"
#include "os/calls.h"
#include "support/fault.h"

#include "support/clock_ahead.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* From the loss of rank 3, there, to the generation that it is in again. */
static void who_takes_a_place_elsewhere_joins_those_that_stand(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  assert_true(even_outlast_hosts_have_state(&leader.job));
  kill_rank(3);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_int_equal(carry(1), EVEN_OK);
  even_job_replace_tick(&leader.job);                       /* asks that host for a process */
  assert_false(even_outlast_hosts_have_state(&leader.job)); /* of which the next agent would not know */
  assert_true(leader.ranks[3].alive && leader.ranks[3].elsewhere && even_job_is_outside(&leader.job, 3));
  assert_int_equal(leader.job.alive, RANKS);
  assert_int_equal(leader.job.ended, 0);
  even_generation_vacate(other.job.generation, 3); /* which that one's agent does, and starts it */
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_NOTHING);
  even_generation_say(other.ranks_view, 3, "");
  even_generation_offer(other.ranks_view, 3);
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_STAND);
  assert_int_equal(carry(1), EVEN_OK);
  even_boards_turn(&other.job);
  assert_int_not_equal(even_boards_look_ms(&other.job), 0); /* rank 2 will stand without a word */
  even_generation_stand(leader.ranks_view, 0, 1);
  even_generation_stand(leader.ranks_view, 1, 1);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  even_generation_stand(other.ranks_view, 2, 1);
  assert_true(report());
  assert_int_equal(even_boards_look_ms(&other.job), 0);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 2);
  assert_true(even_generation_has(leader.ranks_view, 3, 2));
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_NOTHING);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 3, 2));
  assert_non_null(strstr(leader.said.data, "generation 2: rank 3 joins ranks 0, 1 and 2|"));
  assert_false(even_outlast_hosts_have_state(&other.job)); /* it has not taken it yet */
  even_generation_take(other.ranks_view, 3, 2);
  assert_true(even_outlast_hosts_have_state(&other.job));
  assert_true(even_outlast_hosts_have_state(&leader.job));
}

static even_status tell_all(void *context) {
  (void)context;
  return even_boards_catch_up(&leader.job, &leader.agents[1], 0);
}

/* Another agent goes on with the ranks of the other host, and says which generation they know. */
static void who_comes_anew_is_told_what_it_has_not_heard(void **state) {
  const bool lost[][RANKS] = {{[1] = true}, {[1] = true, [3] = true}};
  even_text words = EVEN_TEXT_EMPTY;
  json_t *runs = NULL;
  (void)state;
  assert_int_equal(even_generation_lose(leader.job.generation, lost[0]), 1);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(even_generation_lose(leader.job.generation, lost[1]), 2);
  even_follower_words_attempt(&other.job, 0, 0, "", &words);
  assert_int_equal(even_json_parse("a test", words.data, words.length, &runs), EVEN_OK);
  assert_int_equal(even_boards_newest_of(runs), 1);
  assert_int_equal(even_boards_catch_up(&leader.job, &leader.agents[1], even_boards_newest_of(runs)), EVEN_OK);
  assert_in_range(fault_each_allocation(tell_all, NULL), 2, 100);
  assert_int_equal(even_boards_catch_up(&leader.job, &leader.agents[1], 3), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "host there knows of generation 3, and the others are at 2"));
  for (int i = 0; i < EVEN_GENERATIONS_KEPT; i++) {
    (void)even_generation_grow(leader.job.generation, NULL);
  }
  assert_int_equal(even_boards_catch_up(&leader.job, &leader.agents[1], 2), EVEN_ERR_PEER_LOST); /* not kept any more */
  assert_int_equal(even_boards_catch_up(&leader.job, &leader.agents[1], 3), EVEN_OK);
  json_decref(runs);
  even_text_free(&words);
}

/* Before anybody looked: to the other host's agent nothing has changed. */
static void who_takes_a_place_is_heard_where_it_says_the_same(void **state) {
  even_generation_words words;
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_boards_vacate(&leader.job, 3);
  even_boards_vacate(&other.job, 3);
  even_generation_say(other.ranks_view, 3, "");
  assert_true(report());
  even_generation_hear(leader.job.generation, 3, &words);
  assert_true(words.said);
  assert_false(report());
  even_boards_vacate(&leader.job, 3);
  assert_int_equal(give(true, "{\"ranks\":[{\"rank\":3,\"said\":true,\"why\":\"\",\"offers\":true}]}"), EVEN_OK);
  even_generation_offer(other.ranks_view, 3); /* what the one before had said came late */
  even_boards_vacate(&other.job, 3);
  assert_true(report());
  assert_false(even_generation_offers(leader.job.generation, 3));
}

/* The other host's ranks are lost, and others offer themselves in their places: up to the generation that has these. */
static void fill_the_other_host(void) {
  all_can_go_on();
  assert_true(report());
  kill_rank(2);
  kill_rank(3);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  even_job_replace_tick(&leader.job);
  for (int rank = HERE; rank < RANKS; rank++) {
    assert_true(leader.ranks[rank].alive && even_job_is_outside(&leader.job, (size_t)rank));
    even_boards_vacate(&other.job, (size_t)rank);
    even_generation_say(other.ranks_view, rank, "");
    even_generation_offer(other.ranks_view, rank);
  }
  assert_true(report());
  even_generation_stand(leader.ranks_view, 0, 2);
  even_generation_stand(leader.ranks_view, 1, 2);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 3);
}

static void where_nobody_is_left_the_state_comes_from_another_host(void **state) {
  (void)state;
  fill_the_other_host();
  assert_true(even_generation_gives_away(leader.ranks_view, 0, 3));
  assert_false(even_generation_gives_away(leader.ranks_view, 1, 3));
  assert_true(even_gifts_travel(&leader.job) && even_gifts_await(&leader.job));
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_travel(&other.job));
  assert_false(even_gifts_await(&other.job));
  kill_rank(0); /* who gives: another one does, in another generation */
  assert_int_equal(even_generation_number(leader.ranks_view), 4);
  assert_true(even_generation_gives_away(leader.ranks_view, 1, 4));
  assert_int_equal(carry(4), EVEN_OK);
  even_generation_take(other.ranks_view, 2, 4);
  assert_true(report());
  even_boards_turn(&leader.job);
  assert_true(even_gifts_travel(&leader.job)); /* rank 3 has not */
  even_generation_take(other.ranks_view, 3, 4);
  assert_true(report());
  even_boards_turn(&leader.job);
  assert_false(even_gifts_travel(&leader.job));
  assert_int_equal(carry(4), EVEN_OK);
  assert_false(even_gifts_travel(&other.job));
}

static void who_came_and_has_the_state_gives_it_to_others(void **state) {
  const bool nobody[RANKS] = {false, false, false, false};
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  even_generation_stand(other.ranks_view, 2, 3); /* it has made a step since */
  assert_true(report());
  assert_true(even_job_has_state(&leader.job, 2));
  assert_false(even_job_has_state(&leader.job, 3));
  even_gifts_plan(&leader.job);
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 4);
  assert_false(even_gifts_travel(&leader.job)); /* rank 3 gets it from rank 2 */
}

static void why_the_state_does_not_come_is_told_where_it_is_waited_for(void **state) {
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  assert_int_equal(give(false, "{\"number\":3,\"ungiven\":[{\"host\":0,\"why\":\"of another one\"}]}"), EVEN_OK);
  assert_false(even_generation_ungiven(other.ranks_view, 3, why));
  assert_int_equal(give(false, "{\"number\":3,\"ungiven\":[{\"host\":1,\"why\":\"no memory is free\"}]}"), EVEN_OK);
  assert_true(even_generation_ungiven(other.ranks_view, 3, why));
  assert_string_equal(why, "no memory is free");

  kill_rank(0);
  kill_rank(1); /* nobody has the state any more */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_false(even_gifts_travel(&leader.job));
}

/* A rank of the other host gives, to newcomers here. */
static void a_host_says_where_it_could_not_send_the_state(void **state) {
  static const char *const odd = "{\"gift\":3,\"ungiven\":[{\"host\":2,\"why\":\"\"}]}";
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  all_can_go_on();
  assert_true(report());
  kill_rank(0);
  kill_rank(1);
  for (int rank = 0; rank < HERE; rank++) { /* as if they were started */
    leader.ranks[rank].alive = true;
    even_generation_offer(leader.ranks_view, rank);
    even_generation_stand(other.ranks_view, HERE + rank, 2);
  }
  leader.job.alive = RANKS;
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 3);
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_generation_gives_away(other.ranks_view, 2, 3) && even_gifts_await(&other.job));
  assert_int_not_equal(even_boards_look_ms(&other.job), 0);
  assert_int_equal(give(true, odd), EVEN_ERR_INPUT);
  assert_int_equal(give(true, "{\"gift\":2,\"ungiven\":[{\"host\":0,\"why\":\"late\"}]}"), EVEN_OK);
  assert_false(even_generation_ungiven(leader.ranks_view, 3, why));
  assert_int_equal(give(true, "{\"gift\":3,\"ungiven\":[{\"host\":0,\"why\":\"it broke\"}]}"), EVEN_OK);
  assert_true(even_generation_ungiven(leader.ranks_view, 3, why));
  assert_string_equal(why, "it broke");
  assert_non_null(strstr(
      leader.said.data, "host here does not get the state of the training that rank 2 on host there gives: it broke|"));
}

static void who_cannot_give_says_why_to_those_that_wait(void **state) {
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  fill_the_other_host();
  even_generation_fail_bringing(leader.ranks_view, 3, "rank 0 cannot give it: no memory");
  even_boards_turn(&leader.job);
  assert_non_null(strstr(leader.said.data,
                         "host there does not get the state of the training that rank 0 on host here "
                         "gives: rank 0 cannot give it: no memory|"));
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_generation_ungiven(other.ranks_view, 3, why));
  assert_string_equal(why, "rank 0 cannot give it: no memory");
}

/* A rank that was stopped goes on before one that joined had the state: all of it is made again. */
static void who_goes_on_in_time_keeps_nobody_from_the_state(void **state) {
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  even_job_rank_continues(&leader.job, &leader.ranks[1]);
  even_generation_doubt(leader.ranks_view, 0, 3);
  even_job_stands_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 4);
  assert_true(even_generation_gives_away(leader.ranks_view, 0, 4) && even_gifts_travel(&leader.job));
  assert_int_equal(carry(4), EVEN_OK);
  assert_true(even_gifts_travel(&other.job));
}

static void who_gives_nothing_for_long_is_looked_at_again(void **state) {
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_hold_up(&leader.job) && even_gifts_hold_up(&other.job));
  clock_ahead_set(UINT64_C(61000000000));
  assert_false(even_gifts_hold_up(&leader.job)); /* rank 0, and who waits with it */
  assert_true(even_gifts_hold_up(&other.job));
  even_os.clock_gettime = even_os_real.clock_gettime;
}

static void who_joined_lacks_the_state_until_it_took_it(void **state) {
  (void)state;
  fill_the_other_host();
  assert_false(even_gifts_any_lacks(&other.job)); /* nobody there knows yet that they joined */
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_any_lacks(&other.job));
  assert_false(even_gifts_any_lacks(&leader.job));
  even_generation_take(other.ranks_view, 2, 3);
  assert_true(even_gifts_any_lacks(&other.job));
  even_generation_take(other.ranks_view, 3, 3);
  assert_false(even_gifts_any_lacks(&other.job));
}

static void plans_of_ranks_and_hosts_that_are_none_are_refused(void **state) {
  static const char *const plans[] = {
      "{\"number\":1,\"members\":[0],\"giver\":4}",
      "{\"number\":1,\"members\":[0],\"giver\":\"0\"}",
      "{\"number\":1,\"members\":[0],\"giver\":0,\"gives_to\":[2]}",
      "{\"number\":1,\"members\":[0],\"ungiven\":[{\"host\":-1,\"why\":\"\"}]}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
    even_boards_begin(&other.job);
    assert_int_equal(even_gifts_begin(&other.job), EVEN_OK);
    assert_int_equal(give(false, plans[i]), EVEN_ERR_INPUT);
    assert_int_equal(even_generation_number(other.ranks_view), 0);
  }
}

/* Its agent was started again: its board begins where the others are, once it has said that it can follow. */
static void a_host_that_comes_back_follows_from_where_the_others_are(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  leader.agents[1].follows = false;
  leader.link.fd = -1;
  even_job_replace_tick(&leader.job);
  assert_false(leader.ranks[2].alive); /* nobody there can be asked */
  other.job.late = true;
  assert_int_equal(even_job_generations_begin(&other.job), EVEN_OK);
  assert_true(even_job_is_outside(&other.job, 2) && even_job_is_outside(&other.job, 3));
  assert_false(even_generation_has(other.ranks_view, 0, 0));
  leader.agents[1].link = NULL; /* nothing is sent by it here */
  assert_true(report());
  leader.agents[1].link = &leader.link;
  assert_true(leader.agents[1].follows);
  assert_true(even_job_host_reached(&leader.job, 2));
  assert_false(report());
  const bool nobody[RANKS] = {false, false, false, false};
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 2);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(even_generation_number(other.ranks_view), 2);
  assert_true(even_generation_has(other.ranks_view, 1, 2));
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 3);
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 4);
  assert_int_equal(carry(4), EVEN_ERR_INPUT); /* from then on one by one */
}

/* It joins where nobody was lost: its ranks must know who was there before them, who alone has a state to give. */
static void a_host_that_joins_knows_who_began(void **state) {
  const bool joins[RANKS] = {false, false, true, false};
  const bool nobody[RANKS] = {false};
  (void)state;
  even_generation_begin(leader.job.generation, (const bool[RANKS]){true, true, false, false});
  other.job.late = true;
  assert_int_equal(even_job_generations_begin(&other.job), EVEN_OK);
  assert_false(even_generation_has(other.ranks_view, 0, 0));
  assert_int_equal(carry(0), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 0, 0) && even_generation_has(other.ranks_view, 1, 0));
  assert_int_equal(even_generation_grow(leader.job.generation, joins), 1);
  assert_int_equal(carry(1), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 2, 1) && even_generation_has(other.ranks_view, 0, 0));
  assert_false(even_job_is_outside(&other.job, 2));
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 2);
  assert_int_equal(carry(0), EVEN_OK); /* an old one: nothing */
  assert_int_equal(even_generation_number(other.ranks_view), 1);
}

/* Ranks 0 here and 1 there, and a spare of each host: 2 and 3. */
static void who_waits_on_the_host_of_a_lost_rank_comes_first(void **state) {
  (void)state;
  leader.params.spares = 2;
  leader.job.local = leader.agents[1].count = 1;
  leader.agents[1].first = 1;
  leader.job.first_spare = 2;
  leader.agents[1].first_spare = 3;
  leader.job.spares = leader.agents[1].spares = 1;
  assert_int_equal(even_job_generations_begin(&leader.job), EVEN_OK);
  assert_true(even_job_is_here(&leader.job, 2) && !even_job_is_here(&leader.job, 1));
  assert_int_equal(even_job_host_number(&leader.job, 3), 1);
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say(leader.ranks_view, rank, "");
  }
  even_generation_offer(leader.ranks_view, 2);
  even_generation_offer(leader.ranks_view, 3);
  kill_rank(1);
  even_generation_stand(leader.ranks_view, 0, 1);
  even_job_replace_tick(&leader.job);
  assert_true(even_generation_has(leader.ranks_view, 3, 2));
  assert_false(even_generation_has(leader.ranks_view, 2, 2));
  assert_non_null(strstr(leader.said.data, "generation 2: rank 3 joins rank 0|"));
  even_generation_stand(leader.ranks_view, 0, 2);
  kill_rank(3); /* none of that host offers itself now */
  even_generation_stand(leader.ranks_view, 0, 3);
  even_job_replace_tick(&leader.job);
  assert_true(even_generation_has(leader.ranks_view, 2, 4));
}

static void the_least_are_not_waited_for_where_they_cannot_come(void **state) {
  (void)state;
  leader.params.least_ranks = 3;
  all_can_go_on();
  assert_true(report());
  kill_rank(1); /* rank 0 could give another one its state */
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  leader.agents[1].busy = false; /* a lost host's places are free when it is back, and not before */
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data,
                         "cannot go on without host there (ranks 2 and 3): 1 are left, and "
                         "--min-ranks is 3; only 1 can join them|"));
}

static void only_a_free_place_of_this_host_is_filled(void **state) {
  (void)state;
  assert_int_equal(even_job_replace_fill(&other.job, 0), EVEN_ERR_INPUT);     /* of another host */
  assert_int_equal(even_job_replace_fill(&other.job, HERE), EVEN_ERR_INPUT);  /* it lives */
  assert_int_equal(even_job_replace_fill(&other.job, RANKS), EVEN_ERR_INPUT); /* there is none */
  assert_true(even_job_replace_waits(&other.job));
  assert_false(even_job_replace_waits(&leader.job));
}

int main(void) {
#define REPLACING_TEST(name) cmocka_unit_test_setup_teardown(name, set_up_replacing, tear_down)
  const struct CMUnitTest tests[] = {
      REPLACING_TEST(who_takes_a_place_elsewhere_joins_those_that_stand),
      REPLACING_TEST(who_comes_anew_is_told_what_it_has_not_heard),
      REPLACING_TEST(who_takes_a_place_is_heard_where_it_says_the_same),
      REPLACING_TEST(where_nobody_is_left_the_state_comes_from_another_host),
      REPLACING_TEST(who_came_and_has_the_state_gives_it_to_others),
      REPLACING_TEST(why_the_state_does_not_come_is_told_where_it_is_waited_for),
      REPLACING_TEST(a_host_says_where_it_could_not_send_the_state),
      REPLACING_TEST(who_cannot_give_says_why_to_those_that_wait),
      REPLACING_TEST(who_goes_on_in_time_keeps_nobody_from_the_state),
      REPLACING_TEST(who_gives_nothing_for_long_is_looked_at_again),
      REPLACING_TEST(who_joined_lacks_the_state_until_it_took_it),
      REPLACING_TEST(plans_of_ranks_and_hosts_that_are_none_are_refused),
      REPLACING_TEST(a_host_that_comes_back_follows_from_where_the_others_are),
      REPLACING_TEST(a_host_that_joins_knows_who_began),
      REPLACING_TEST(who_waits_on_the_host_of_a_lost_rank_comes_first),
      REPLACING_TEST(the_least_are_not_waited_for_where_they_cannot_come),
      REPLACING_TEST(only_a_free_place_of_this_host_is_filled),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
